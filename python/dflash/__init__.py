"""Lossless speculative decoding with DFlash block-diffusion drafters."""

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
