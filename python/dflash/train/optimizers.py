"""Optimizers and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from ..drafter import Drafter
from .config import TrainConfig

_BETAS = (0.9, 0.95)


def make_muon(
    matrices: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    rate: float,
    weight_decay: float = 0.0,
    *,
    fused: bool | None = True,
) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan et al., 2024) for the matrices and AdamW without decay for the others."""
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=rate, betas=_BETAS, weight_decay=0.0, fused=fused)]


def drafter_optimizers(drafter: Drafter, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers that ``config`` selects. Norms, a selector's codebooks and fixed kernels do not decay."""
    named = [(p.dim() == 2 and not name.endswith("_codebook"), p) for name, p in drafter.named_parameters()]
    matrices, others = ([p for is_matrix, p in named if is_matrix == wanted] for wanted in (True, False))
    if config.optimizer == "muon":
        return make_muon(matrices, others, config.learning_rate, config.weight_decay)
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others}]
    return [torch.optim.AdamW(groups, lr=config.learning_rate, betas=_BETAS, weight_decay=0.0, fused=True)]


def learning_rate(step: int, steps: int, warmup: float, constant: float) -> float:
    """Return the learning rate of a step as a fraction of the peak: linear warmup, plateau, cosine decay to 0.

    ``warmup`` and ``constant`` are the fractions of ``steps`` after which warmup and plateau end.
    """
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    start = max(rise, round(constant * steps))
    if step < start:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - start) / max(1, steps - start)))
