"""The runners by name; what each is: ``python bench/step --help``."""

from collections.abc import Callable

from .foreign import native, reference
from .ours import another, ours
from .setting import Run, Setting
from .static import static

RUNNERS: dict[str, Callable[[Setting], Run]] = {
    "reference": reference,
    "native": native,
    "static": static,
    "eager": lambda setting: ours(setting, setting.ours, "eager"),
    "graph": lambda setting: ours(setting, setting.ours),
    "fused": lambda setting: another(setting, fused=True),
    "compiled": lambda setting: another(setting, compile=setting.compile, fused=False),
}


def tree_runners(sizes: list[int]) -> dict[str, Callable[[Setting], Run]]:
    """Return the runners that verify trees of these sizes, by name."""
    found: dict[str, Callable[[Setting], Run]] = {}
    for rows in sizes:
        found[f"graph tree {rows}"] = lambda setting, rows=rows: another(setting, tree=rows, fused=False)
        found[f"fused tree {rows}"] = lambda setting, rows=rows: another(setting, tree=rows, fused=True)
    return found


ONE_ROW = ("reference", "native")  # their loops take one row
