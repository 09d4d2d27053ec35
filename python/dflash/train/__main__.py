"""``accelerate launch -m dflash.train``: the options of ``dflash train``."""

import sys

import typer

from .command import train

if __name__ == "__main__":
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(train)
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        if debug:
            raise
        typer.echo(f"dflash: {' '.join(str(error).split())}", err=True)
        raise SystemExit(2) from None
