"""Griffe extension: show ops as they are called, without the ``launch`` argument that the registry passes."""

from typing import Any

import griffe


class HideLaunch(griffe.Extension):
    """Drop the first parameter of every function that ``@op()`` registers."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Drop ``launch`` from the parameters of ``func``, if it has one."""
        if func.path.startswith("dflash.ops.") and "launch" in func.parameters:
            del func.parameters["launch"]
