"""The training loop: `Trainer`, and what it measures, writes and continues from."""

from .accelerator import make_accelerator
from .trainer import Trainer

__all__ = ["Trainer", "make_accelerator"]
