"""The training loop."""

from ..data.batches import Batches
from ..optimizers import learning_rate
from .trainer import Trainer, make_accelerator

__all__ = ["Batches", "Trainer", "learning_rate", "make_accelerator"]
