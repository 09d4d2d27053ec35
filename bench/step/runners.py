"""Runners by name."""

from collections.abc import Callable

from .foreign import native, reference
from .ours import another, ours
from .setting import Run, Setting
from .static import static

MAKERS: dict[str, Callable[[Setting], Run]] = {
    "reference": reference,
    "native": native,
    "static": static,
    "eager": lambda setting: ours(setting, setting.generator, "eager", False),
    "graph": lambda setting: ours(setting, setting.generator),
    "fused": lambda setting: another(setting, fused=True),
    "compiled": lambda setting: another(setting, compile=setting.compile),
}
ONE_ROW = ("reference", "native")

RUNNERS = ("reference", "native", "static", "eager", "graph", "fused", "compiled")
