"""Options of ``dflash serve`` from files. Imports nothing that is slow to import."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer


def read_config(path: Path) -> dict[str, Any]:
    """Return the options in a YAML file by their names, with underscores. null leaves one at its default.

    Raises:
        ValueError: it cannot be read, or is not a mapping.
    """
    import yaml  # only who has such a file needs it

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.MarkedYAMLError as error:  # its own text shows the line, which may hold a key
        where = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise ValueError(f"--config {path} cannot be read as YAML{where}: {error.problem}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"--config {path} must have a line OPTION: VALUE for each option, got {type(found).__name__}")
    return {str(name).replace("-", "_"): value for name, value in found.items() if value is not None}


def apply_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options in a file the defaults of a command.

    Raises:
        ValueError: the file cannot be read, or the command has no such option.
    """
    if path is None:
        return None
    options = {option.name: option for option in context.command.params if option.name != "config"}
    found = read_config(path)
    for name, value in found.items():
        if name not in options:
            close = difflib.get_close_matches(name, filter(None, options), 1)
            advice = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"--config {path} has {name}, which is no option of dflash serve{advice}")
        if name == "api_key" and not isinstance(value, str):
            raise ValueError(f"--config {path}: api-key must be a text: put quotes around it")
        if getattr(options[name], "multiple", False) and not isinstance(value, list):
            found[name] = [value]
    context.default_map = found
    return path


def read_keys(path: Path) -> Sequence[str]:
    """Return the keys in a file, one per line; empty lines and those with a # are left out.

    Raises:
        ValueError: it cannot be read, or has no key.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {path} cannot be read: {error}") from error
    keys = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"--api-key-file {path} must have a key per line, and has none")
    return keys


def check_keys(keys: Sequence[str]) -> None:
    """Raise ValueError for a key that a header cannot hold."""
    if not all(re.fullmatch("[!-~]+", key) for key in keys):
        raise ValueError(
            "a key (--api-key, --api-key-file) must be visible ASCII characters without spaces: a header holds no other"
        )
