"""A file of finished work, one JSON line per piece, from which a run that was killed continues."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..files import check_writable, parse_json
from ..terminal import printable

__all__ = ["Journal"]


class Journal:
    """Append-only JSON lines. Use it as a context manager, which keeps other processes out of the file.

    A last line that a kill cut short does not count, and `append` overwrites it. Until then the file stays as it
    was, and a new file that is still empty at the end is removed.

    Args:
        path: the file; its folder must exist.
        settings: written on the first line; a file with other settings is refused. None for a file of records only.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.settings = None if settings is None else json.loads(json.dumps(settings))

    @staticmethod
    def check(path: Path) -> None:
        """Raise if ``path`` cannot be written. Writes nothing.

        Raises:
            ValueError: there is no such folder, or ``path`` is a folder or a device.
            OSError: the folder or the file must not be written.
        """
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {str(path.parent)!r} to write {path.name} into")
        if not path.exists():
            check_writable(path.parent)
        elif not path.is_file():
            raise ValueError(f"{path} is not a regular file: name another")
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    def __enter__(self) -> Journal:
        """Open and lock the file, and compare its settings.

        Raises:
            ValueError: see `check`; or another process has the file, or its settings are others.
            OSError: see `check`.
        """
        self.check(self.path)
        self._is_new = not self.path.exists()
        with contextlib.ExitStack() as stack:  # closes the file if what follows raises
            self._file = stack.enter_context(open(self.path, "a+b", buffering=0))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"{self.path} is being written by another process") from error
            stack.callback(self._remove_if_empty)
            with open(self.path, "rb") as lines:
                self._end = sum(len(line) for line in lines if line.endswith(b"\n"))
            if self._end and self.settings is not None:
                self._compare(next(self._lines())[1])
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file, which unlocks it."""
        self._open.close()

    def _remove_if_empty(self) -> None:
        if self._is_new and not os.fstat(self._file.fileno()).st_size:
            self.path.unlink(missing_ok=True)

    def _lines(self) -> Iterator[tuple[int, Any]]:
        """Every complete line with its number from 1."""
        end = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                end += len(line)
                if end > self._end:
                    return
                yield number, parse_json(line, f"{self.path}, line {number}")

    def _compare(self, header: Any) -> None:
        theirs = header.get("settings") if isinstance(header, dict) else None
        if not isinstance(theirs, dict):
            raise ValueError(f"{self.path}, line 1: must hold the settings of the run; delete the file")
        names = [name for name in {**theirs, **self.settings} if theirs.get(name) != self.settings.get(name)]
        if names:
            listed = ", ".join(f"{name} {theirs.get(name)!r}, now {self.settings.get(name)!r}" for name in names)
            raise ValueError(f"{self.path} was written with {listed}: write to another place, or delete it")

    def read(self) -> Iterator[tuple[int, Any]]:
        """The records that were written before, each with the number of its line.

        Raises:
            ValueError: a line is not JSON; it is named.
        """
        lines = self._lines()
        if self.settings is not None:
            next(lines, None)
        return lines

    def append(self, records: Iterable[Any]) -> None:
        """Write records; they are on the disk when this returns.

        Raises:
            OSError: the disk is full, for example. What was appended before stays whole.
        """
        header = [] if self._end or self.settings is None else [{"settings": self.settings}]
        data = "".join(json.dumps(record) + "\n" for record in [*header, *records]).encode()
        try:
            self._file.truncate(self._end)
            rest = memoryview(data)
            while rest:  # the file has no buffer, which would be written again when the file is closed
                rest = rest[self._file.write(rest) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise OSError(
                f"{printable(self.path)} could not be written ({error.strerror or error}); its lines so far are whole: "
                "make room, and start again with the same arguments"
            ) from error
        self._end += len(data)
