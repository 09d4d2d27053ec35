"""The ``dflash`` command. It may import all other modules; none of them imports it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys

from .running import run


def main() -> None:
    """Run the command. A user's mistake prints one line and exits with code 2; ``--debug`` shows the traceback."""
    run(_main)


def _main() -> None:
    named = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    with contextlib.ExitStack() as stack:
        # What a command holds while it runs, such as a server's port: importing the commands takes seconds.
        for entry in importlib.metadata.entry_points(group="dflash.before", name=named):
            stack.enter_context(entry.load()(sys.argv[1:]))
        from .commands import application

        application(named)()
