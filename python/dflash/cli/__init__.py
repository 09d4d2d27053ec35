"""The ``dflash`` command. It may import all other modules; none of them imports it.

Entry points name the subcommands, here and in other packages.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import sys
from typing import Annotated

import typer

from .. import __version__
from ..terminal import printable
from .running import run, set_debug

_TRAINING = ("train", "learn", "regenerate", "export")
COMMANDS = ("generate", "chat", "serve", "verify", *_TRAINING, "demo", "benchmark", "doctor")  # in the help's order
EXTRAS = {"serve": "serve", **dict.fromkeys(_TRAINING, "train")}  # that install them


def main() -> None:
    """Run the command. A user's mistake prints one line and exits with code 2; ``--debug`` shows the traceback."""
    run(_main)


def _main() -> None:
    first = next((word for word in sys.argv[1:] if word != "--debug"), "")
    named = "" if first.startswith("-") else first
    application(named)()


def application(named: str = "") -> typer.Typer:
    """Return the command with the subcommand ``named``, or with all that are installed."""
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group="dflash.commands")}
    if named in COMMANDS and named not in found:
        extra = f"[{EXTRAS[named]}]" if named in EXTRAS else ""
        raise ValueError(
            f"dflash {named} is not installed: pip install 'dflash-engine{extra}', or '.{extra}' in a clone"
        )
    if named and named not in found:
        close = difflib.get_close_matches(named, found, 1)
        meant = f": did you mean {close[0]}?" if close else ""
        raise ValueError(f"there is no command {printable(named)}{meant} (dflash --help lists all)")
    asks = {"help_option_names": ["-h", "--help"]}
    # typer imports pydantic, which is slow, to learn that none of its own options stands before a command.
    own = dict.fromkeys(("add_completion", "add_help_option"), named not in found)
    app = typer.Typer(context_settings=asks, no_args_is_help=True, pretty_exceptions_enable=False, **own)
    app.callback()(_options)
    for name in [named] if named in found else [name for name in COMMANDS if name in found]:
        app.command(name, context_settings=asks)(found[name].load())
    return app


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dflash {__version__}")
        raise typer.Exit


def _options(
    debug: Annotated[bool, typer.Option("--debug", metavar="", help="Show the traceback of an error.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", metavar="", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Lossless speculative decoding with DFlash block-diffusion drafters."""
    set_debug(debug)
