"""Write checkpoints and datasets so that a killed run leaves no half of one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch

from dflash.internals import files
from dflash.light import terminal


def save_tensors(tensors: Mapping[str, Any], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with the usual file mode; safetensors makes it readable only by its owner."""
    path.touch()
    mode = path.stat().st_mode
    safetensors.torch.save_file(dict(tensors), path, metadata=metadata)
    path.chmod(mode)
    files.fsync(path)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed runs left in ``folder``. Nothing may be writing there."""
    for left in folder.glob(f"{files.UNFINISHED}*"):
        files.remove(left)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill. When the block ends without an error, it replaces ``path``."""
    unfinished = files.unfinished_path(path)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(unfinished, path)
        files.fsync(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def one_line_errors(what: str, kind: type[OSError] = OSError) -> Iterator[None]:
    """Turn an error of the block into a ``kind`` that says in one line ``what`` failed and the system's reason."""
    try:
        yield
    except Exception as error:
        errors: list[BaseException] = [error]
        while errors[-1].__context__ is not None:
            errors.append(errors[-1].__context__)
        # "disk full", not what torch makes of it
        cause = next((one for one in errors if isinstance(one, OSError)), error)
        reason = terminal.printable(" ".join(str(cause).split()))[:400] or type(error).__name__
        raise kind(f"{terminal.printable(what)}: {reason}") from error


def write_json(content: Any, path: Path) -> None:
    """Write indented JSON with sorted keys."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    files.fsync(path)
