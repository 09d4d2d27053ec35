"""Read JSON, safetensors and torch files that others wrote, and packages' versions; write files atomically."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pickle
import re
import shutil
import socket
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .terminal import named, printable, shortened

MAX_JSON_BYTES = 2**26  # of one file. Python objects take up to thirty times the bytes of the JSON they are read from.
UNFINISHED = ".unfinished-"
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


# ---------------------------------------------------------------------------------------------- JSON


def parse_json(text: str | bytes, where: str, *, unique_keys: bool = False) -> Any:
    """Parse JSON that someone else wrote.

    Args:
        text: the JSON; bytes must be UTF-8.
        where: where it comes from, the first words of an error.
        unique_keys: refuse an object that has a key twice, instead of using its last value.

    Raises:
        ValueError: it is not JSON, or a string in it is not Unicode text.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        content = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
        if _ESCAPED_SURROGATE.search(text):
            json.dumps(content, ensure_ascii=False).encode("utf-8")  # fails for half of a surrogate pair
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON that can be read: {printable(error)}") from error
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key[:60]!r} is there twice")
        content[key] = value
    return content


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES, *, unique_keys: bool = False) -> dict[str, Any]:
    """Read a JSON object that someone else wrote.

    Raises:
        ValueError: as `parse_json`; or the file has more than ``max_bytes`` or no object, or it cannot be read.
    """
    where = printable(path)
    try:
        with open(path, "rb") as file:
            text = file.read(min(os.fstat(file.fileno()).st_size, max_bytes) + 1)  # allocates what it is asked for
    except OSError as error:
        raise ValueError(f"{where}: cannot be read: {error.strerror or error}") from error
    if len(text) > max_bytes:
        raise ValueError(f"{where}: must have at most {max_bytes} bytes")
    content = parse_json(text, where, unique_keys=unique_keys)
    if not isinstance(content, dict):
        raise ValueError(f"{where}: must be a JSON object, got {type(content).__name__}")
    return content


def read_architectures(config: Mapping[str, Any], where: object) -> list[str]:
    """Return the ``architectures`` of a parsed ``config.json``. Raises ValueError unless they are a list of names."""
    names = config.get("architectures")
    if names is None:
        return []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{printable(where)}: architectures must be a list of names, got {shortened(names)}")
    return list(names)


# ---------------------------------------------------------------------------------------------- weights


def find_shards(folder: Path, single_name: str = "model.safetensors") -> list[Path]:
    """Return the files that hold a model's weights: ``single_name``, or those that its index names.

    Raises:
        FileNotFoundError: there is neither, or a file that the index names is missing.
        ValueError: the index is broken, or names a file outside of the folder.
    """
    single, index = folder / single_name, folder / f"{single_name}.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(f"{printable(folder)} has neither {single.name} nor {index.name}")
    mapping = read_json(index, unique_keys=True).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise ValueError(f"{printable(index)}: weight_map must map tensor names to files")
    names = sorted(set(mapping.values()))
    for name in names:
        if not name or "\0" in name or len(name) > 255 or Path(name).name != name or name == "..":
            raise ValueError(f"{printable(index)}: weight_map names {shortened(name)}, not a file in the same folder")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{printable(folder)}: shard {named(name)} is missing, but {index.name} names it")
    return [folder / name for name in names]


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file as `safetensors.safe_open` does. Raises ValueError if it is broken or cut.

    The memory of a tensor read from it is the file until the tensor is copied.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        what = "not a complete safetensors file (truncated or corrupt?)"
        raise ValueError(f"{printable(path)}: {what}: {named(error)}") from error


def read_torch_file(path: Path) -> Any:
    """Read tensors and numbers of ``torch.save``. Never runs code of the file, and never expands it."""
    import torch

    with zipfile.ZipFile(path) as file:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
            raise ValueError(f"{path.name} is compressed, which torch.save never does")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message recommends to load it nevertheless
        raise ValueError(f"{path.name} holds other things than tensors and numbers") from error


# ---------------------------------------------------------------------------------------------- writing


def fsync(path: Path) -> None:
    """Wait until a file is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def unfinished_path(path: Path) -> Path:
    """Return the name under which ``path`` is written, without what a killed run of this host left there."""
    unfinished = path.with_name(f"{UNFINISHED}{socket.gethostname()}-{path.name}")
    remove(unfinished)
    return unfinished


def remove(path: Path) -> None:
    """Remove a file or a folder; do nothing if it is missing."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Have ``write`` make a file under another name, then rename it: ``path`` is never half a file."""
    unfinished = unfinished_path(path)
    try:
        write(unfinished)
        fsync(unfinished)
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise ``OSError`` unless a file can be made in ``path``, or next to it if it is missing. Leaves nothing there."""
    folder = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"{printable(folder)} cannot be written to: {error.strerror or error}") from error


# ---------------------------------------------------------------------------------------------- packages


def version_of(distribution: str) -> str:
    """Return the version of an installed package, else "not installed"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
