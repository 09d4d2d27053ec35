"""``accelerate launch -m dflash.train``: the options of ``dflash train``."""

import typer

from ..cli.running import run
from ..cli.training import train

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(train)
    run(app)
