"""Lossless speculative decoding with DFlash block-diffusion drafters."""

import importlib.metadata as _metadata
import warnings as _warnings

from .config import DraftConfig
from .drafter import Drafter, load_draft
from .generate import GenerateOutput, Generator, Statistics, generate, release
from .target import UnsupportedTargetError

__all__ = [
    "DraftConfig",
    "Drafter",
    "GenerateOutput",
    "Generator",
    "Statistics",
    "UnsupportedTargetError",
    "generate",
    "load_draft",
    "release",
]
__version__ = "0.1.0"

if any(_metadata.distributions(name="dflash")):
    _warnings.warn(
        "the distributions dflash and dflash-engine are both installed, and both own the import name dflash: "
        "uninstall both, then install one",
        stacklevel=2,
    )
