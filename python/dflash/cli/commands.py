"""All commands of ``dflash``: entry points name them, here and in other packages."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from .running import set_debug

# In the order of the help.
COMMANDS = [
    "generate",
    "chat",
    "serve",
    "verify",
    "train",
    "learn",
    "regenerate",
    "export",
    "demo",
    "benchmark",
    "doctor",
]
EXTRAS = {"serve": "serve", "train": "train", "learn": "train", "regenerate": "train", "export": "train"}


def application(named: str = "") -> typer.Typer:
    """Return the command with the subcommand ``named``, or with all that are installed."""
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group="dflash.commands")}
    if named in COMMANDS and named not in found:
        extra = f"[{EXTRAS[named]}]" if named in EXTRAS else ""
        raise ValueError(
            f"dflash {named} is not installed: pip install 'dflash-engine{extra}', or '.{extra}' in a clone"
        )
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_options)
    for name in [named] if named in found else [name for name in COMMANDS if name in found]:
        app.command(name)(found[name].load())
    return app


def _options(debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False) -> None:
    """Lossless speculative decoding with DFlash block-diffusion drafters."""
    set_debug(debug)
