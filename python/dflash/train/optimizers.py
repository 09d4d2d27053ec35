"""The optimizers of a run and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..drafter import Drafter
from .config import TrainConfig

__all__ = ["learning_rate"]


def learning_rate(step: int, steps: int, warmup: float, constant: float) -> float:
    """The rate of step ``step`` (from 0) as a share of the full one: a rise, a plateau, a cosine to 0.

    ``warmup`` and ``constant`` are the shares of ``steps`` at which the rise and the plateau end.
    """
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    start = max(rise, round(constant * steps))
    if step < start:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - start) / max(1, steps - start)))


def _optimizers(drafter: Drafter, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """One for all parameters, or one for the matrices and one for the rest; norms do not decay."""
    matrices = [p for p in drafter.parameters() if p.dim() > 1]
    plain = [p for p in drafter.parameters() if p.dim() == 1]
    decay = config.weight_decay
    adamw: dict[str, Any] = {"lr": config.learning_rate, "betas": (0.9, 0.95), "fused": True, "weight_decay": 0.0}
    if config.optimizer == "adamw":
        return [torch.optim.AdamW([{"params": matrices, "weight_decay": decay}, {"params": plain}], **adamw)]
    muon = torch.optim.Muon(matrices, lr=config.learning_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(plain, **adamw)]
