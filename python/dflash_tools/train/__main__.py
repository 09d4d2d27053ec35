"""``accelerate launch -m dflash_tools.train``: the options of ``dflash train``."""

import typer

from dflash.light import running

from ..commands.training import train

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(train)
    running.run(app)
