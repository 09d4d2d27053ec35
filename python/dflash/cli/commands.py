"""All commands of ``dflash``. Importing them imports torch and transformers."""

from __future__ import annotations

from typing import Annotated

import typer

from .diagnosis import doctor
from .learning import learn
from .measure import benchmark, demo
from .running import set_debug
from .serving import serve
from .text import chat, generate, verify
from .training import export, regenerate, train

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
for command in (generate, chat, serve, verify, train, learn, regenerate, export, demo, benchmark, doctor):
    app.command()(command)


@app.callback()
def _options(debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False) -> None:
    """Lossless speculative decoding with DFlash block-diffusion drafters."""
    set_debug(debug)
