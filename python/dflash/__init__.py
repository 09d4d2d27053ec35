"""Lossless speculative decoding with DFlash block-diffusion drafters."""

import importlib.metadata as _metadata
import warnings as _warnings

from .api import generate, release, stream
from .drafter import DraftConfig, Drafter, load_draft
from .evaluate import demo_pair
from .generator import Generator
from .grammar import Grammar
from .hf import as_assistant, custom_generate
from .outputs import GenerateOutput, Statistics, StreamEvent, TokenLogprobs
from .receipts import Receipt, Recorder, Verification, verify
from .targets import UnsupportedTargetError

__all__ = [
    "DraftConfig",
    "Drafter",
    "GenerateOutput",
    "Generator",
    "Grammar",
    "Receipt",
    "Recorder",
    "Statistics",
    "StreamEvent",
    "TokenLogprobs",
    "UnsupportedTargetError",
    "Verification",
    "as_assistant",
    "custom_generate",
    "demo_pair",
    "generate",
    "load_draft",
    "release",
    "stream",
    "verify",
]
__version__ = "0.1.0"

if any(_metadata.distributions(name="dflash")):
    _warnings.warn(
        "the distributions dflash and dflash-engine are both installed, and both own the import name dflash: "
        "uninstall both, then install one",
        stacklevel=2,
    )
