"""Read text and JSONL files line by line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..files import parse_json


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
