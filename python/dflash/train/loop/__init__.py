"""The training loop: `Trainer`, its metrics, evaluation and checkpoints."""

from .accelerator import make_accelerator
from .trainer import Trainer

__all__ = ["Trainer", "make_accelerator"]
