"""Run a command, and report a user's mistake in one line, with a traceback only on request."""

from __future__ import annotations

import typer

__all__ = ["run", "set_debug"]

_state = {"debug": False}


def set_debug(debug: bool) -> None:
    """Show the traceback of an error, or only its message."""
    _state["debug"] = debug


def run(app: typer.Typer) -> None:
    """Run ``app`` on the command line's arguments.

    A user's mistake (``ValueError``, ``TypeError`` or ``OSError``) prints one line and exits with code 2, an interrupt
    exits with code 130.
    """
    try:
        app()
    except (ValueError, TypeError, OSError) as error:
        if _state["debug"]:
            raise
        typer.echo(f"dflash: {' '.join(str(error).split())}", err=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
