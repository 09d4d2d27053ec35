"""Read JSON of unknown origin, and JSONL with line numbers; write files atomically."""

from __future__ import annotations

import contextlib
import glob
import gzip
import json
import os
import re
import shutil
import socket
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .limits import MAX_JSON_DEPTH
from .terminal import printable, shortened

__all__ = [
    "atomic_folder",
    "check_writable",
    "fsync",
    "parse_json",
    "read_architectures",
    "read_json",
    "read_jsonl",
    "read_lines",
    "remove_unfinished",
    "save_tensors",
    "write_atomically",
    "write_json",
]

_UNFINISHED = ".unfinished-"
_STRUCTURE = re.compile(r'\\.|["\[{\]}]', re.DOTALL)
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str | bytes, where: str, *, unique_keys: bool = False) -> Any:
    """Parse JSON of unknown origin.

    Args:
        text: the JSON; bytes must be UTF-8.
        where: where it comes from, the first words of an error.
        unique_keys: refuse an object that has a key twice, instead of using its last value.

    Raises:
        ValueError: it is not JSON, is nested too deep, has integers of thousands of digits, or a string that is not
            Unicode text (half of a surrogate pair).
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        # Before parsing, because the parser's stack may overflow. Counting brackets first spares most texts the scan.
        if text.count("[") + text.count("{") > MAX_JSON_DEPTH and _depth(text) > MAX_JSON_DEPTH:
            raise ValueError(f"more than {MAX_JSON_DEPTH} levels of brackets")
        content = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
        if _ESCAPED_SURROGATE.search(text) and (half := _SURROGATE.search(json.dumps(content, ensure_ascii=False))):
            raise ValueError(f"\\u{ord(half[0]):04x} is half of a surrogate pair, not a character")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON that can be read: {printable(error)}") from error
    return content


def read_json(path: Path, max_bytes: int, *, unique_keys: bool = False) -> dict[str, Any]:
    """Read a JSON object of unknown origin.

    Raises:
        ValueError: as `parse_json`; or the file has more than ``max_bytes`` or no object, or it cannot be read.
    """
    where = printable(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = file.read(min(size, max_bytes) + 1)  # Python allocates what it is asked for
    except OSError as error:
        raise ValueError(f"{where}: cannot be read: {error.strerror or error}") from error
    if len(text) > max_bytes:
        raise ValueError(f"{where}: must have at most {max_bytes} bytes")
    content = parse_json(text, where, unique_keys=unique_keys)
    if not isinstance(content, dict):
        raise ValueError(f"{where}: must be a JSON object, got {type(content).__name__}")
    return content


def read_architectures(config: Mapping[str, Any], where: object) -> list[str]:
    """Return the ``architectures`` of a parsed ``config.json``; none if the key is missing.

    Raises:
        ValueError: they are not a list of names.
    """
    names = config.get("architectures")
    if names is None:
        return []
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{printable(where)}: architectures must be a list of names, got {shortened(names)}")
    return list(names)


def _depth(text: str) -> int:
    """Return how deep the brackets outside of strings are nested, or the first depth above the limit."""
    depth = deepest = 0
    in_string = False
    for match in _STRUCTURE.finditer(text):
        token = match[0]
        if token == '"':
            in_string = not in_string
        elif not in_string and token[0] != "\\":
            depth += 1 if token in "[{" else -1
            deepest = max(deepest, depth)
            if deepest > MAX_JSON_DEPTH:
                break
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's pairs as a dict. Raise if a key is there twice."""
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key[:60]!r} is there twice")
        content[key] = value
    return content


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read the lines of a UTF-8 text file, gzipped if its name ends in ``.gz``, with their numbers from 1.

    Raises:
        ValueError: a line is not UTF-8, and is named; or the file is cut short, and the last good line is named.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rb") as file:  # as text, a wrong byte would be found with its whole buffer, lines too early
            for number, line in enumerate(file, 1):
                yield number, line.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"the byte {error.object[error.start]:#x}"
        raise ValueError(f"{path}, line {number}: not UTF-8 text: {what}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file after line {number}: {error}") from error


def read_jsonl(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Read the objects of a JSONL file; empty lines are skipped.

    Yields:
        The place for error messages, the line's number, the object.

    Raises:
        ValueError: as `read_lines`, and for a line that is not a JSON object.
    """
    for number, content in read_lines(path):
        if not content.strip():
            continue
        where = f"{path}, line {number}"
        row = parse_json(content, where)
        if not isinstance(row, dict):
            raise ValueError(f"{where}: must be a JSON object, got {type(row).__name__}")
        yield where, number, row


def _unfinished(path: Path) -> Path:
    """Return a name next to ``path`` that no other process uses, on this host or one that shares the disk."""
    return path.with_name(f"{_UNFINISHED}{socket.gethostname()}-{os.getpid()}-{path.name}")


def remove_unfinished(folder: Path) -> None:
    """Remove what killed runs left in ``folder``. Nothing may be writing there."""
    for left in folder.glob(f"{_UNFINISHED}*"):
        _remove(left)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Remove what processes of this host that were killed left next to ``path`` while they wrote it."""
    start, end = f"{_UNFINISHED}{socket.gethostname()}-", f"-{path.name}"
    for left in path.parent.glob(f"{glob.escape(start)}*{glob.escape(end)}"):
        process = left.name[len(start) : -len(end)]
        if process.isdecimal() and not _is_another_process(int(process)):
            _remove(left)


def _is_another_process(number: int) -> bool:
    """True if ``number`` is the id of a process that runs, other than this one."""
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return number != os.getpid()


def check_writable(path: Path) -> None:
    """Raise ``OSError`` unless a file can be made in ``path``, or next to it if it is missing. Leaves nothing there."""
    folder = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"{printable(folder)} cannot be written to: {error.strerror or error}") from error


def fsync(path: Path) -> None:
    """Wait until a file is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Have ``write`` make a file under another name, then rename it: ``path`` is never half a file."""
    _remove_abandoned(path)
    unfinished = _unfinished(path)
    try:
        write(unfinished)
        fsync(unfinished)
        os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill. When the block ends without an error, it replaces ``path``."""
    _remove_abandoned(path)
    unfinished = _unfinished(path)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(unfinished, path)
        fsync(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_json(content: Any, path: Path) -> None:
    """Write indented JSON with sorted keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    fsync(path)


def save_tensors(tensors: Mapping[str, Any], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the usual file mode; safetensors makes it readable only by its owner."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)
    fsync(path)
