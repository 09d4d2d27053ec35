"""The run of a command, from its streams to its exit code. Imports nothing that is slow to import."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable

import typer

from ..terminal import printable

_state = {"debug": False, "is_output_closed": False}


def set_debug(debug: bool) -> None:
    """Show the traceback of an error, or only its message."""
    _state["debug"] = debug


def run(command: Callable[[], None]) -> None:
    """Run a command on the command line's arguments. A user's mistake exits with code 2, an interrupt with 130."""
    _replace_closed_streams()
    warnings.showwarning = _show_warning
    try:
        command()
    except (ValueError, TypeError, OSError) as error:
        print_error(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def print_error(error: Exception) -> None:
    """Print an error's message as one line on standard error. With ``--debug``, raise it again."""
    if _state["debug"]:
        raise error
    typer.echo(f"dflash: {printable(' '.join(str(error).split()))}", err=True)


def _show_warning(message: Warning | str, category: type[Warning], *place: object) -> None:
    """Print a warning's message as one line on standard error, with ``--debug`` its place too."""
    where = f" ({category.__name__}, {place[0]}:{place[1]})" if _state["debug"] else ""
    typer.echo(f"dflash: warning: {printable(' '.join(str(message).split()))}{where}", err=True)


def require_output() -> None:
    """Raise ``ValueError`` if standard output was closed (``>&-``) and the command has nothing else to write to."""
    if _state["is_output_closed"]:
        raise ValueError("standard output is closed, so the text would be lost; > /dev/null discards it")


def _replace_closed_streams() -> None:
    """Open /dev/null for each standard stream that was closed. Python has None there, on which any use of it fails.

    The descriptor is taken too if it is free: a file opened later would get its number, and what a library prints.
    """
    _state["is_output_closed"] = sys.stdout is None
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            try:
                os.fstat(descriptor)
            except OSError:
                os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: SIM115  it stays open


def keep_wrong_bytes() -> None:
    """Read bytes of standard input that are not UTF-8 as surrogates, which `check_text` finds."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
