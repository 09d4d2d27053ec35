"""More names for ``dflash_serve`` and ``dflash_tools``: for declaring commands. None is slow to import."""

# ruff: noqa: F401
from . import terminal
from .cli import options, running
from .options import OPTIONS
from .settings import SETTINGS, checked
