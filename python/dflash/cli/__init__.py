"""The ``dflash`` command. It may import all other modules; none of them imports it."""

from __future__ import annotations

import sys

from .port import claimed
from .running import run


def main() -> None:
    """Run the command. A user's mistake prints one line and exits with code 2; ``--debug`` shows the traceback."""
    run(_main)


def _main() -> None:
    with claimed(sys.argv[1:]):  # what follows takes seconds, so a port that is in use is refused before it
        from .commands import app

        app()
