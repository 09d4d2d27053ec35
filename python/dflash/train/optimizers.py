"""Optimizers and the learning rate schedule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..drafter import Drafter
from .config import TrainConfig

__all__ = ["check_state", "drafter_optimizers", "learning_rate", "make_adamw", "make_muon"]

_BETAS = (0.9, 0.95)
_MOMENTS = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), torch.optim.Muon: ("momentum_buffer",)}


def make_adamw(
    matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], rate: float, weight_decay: float = 0.0
) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters. Only matrices decay."""
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": weight_decay}, {"params": others}]
    return [torch.optim.AdamW(groups, lr=rate, betas=_BETAS, weight_decay=0.0, fused=True)]


def make_muon(
    matrices: Sequence[nn.Parameter],
    others: Sequence[nn.Parameter],
    rate: float,
    weight_decay: float = 0.0,
    *,
    fused: bool | None = True,
) -> list[torch.optim.Optimizer]:
    """Return Muon (Jordan et al., 2024) for the matrices and AdamW without decay for the others.

    ``fused`` is AdamW's argument; it changes only the last bits.
    """
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=rate, betas=_BETAS, weight_decay=0.0, fused=fused)]


def drafter_optimizers(drafter: Drafter, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers that ``config`` selects. Norms, a selector's codebooks and fixed kernels do not decay."""
    named = [(name.endswith("_codebook"), p) for name, p in drafter.named_parameters()]
    matrices = [p for is_codebook, p in named if p.dim() == 2 and not is_codebook]
    others = [p for is_codebook, p in named if p.dim() != 2 or is_codebook]
    make = make_adamw if config.optimizer == "adamw" else make_muon
    return make(matrices, others, config.learning_rate, config.weight_decay)


def check_state(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Raise ``ValueError`` unless ``saved`` is a ``state_dict`` of ``optimizer`` after one or more steps."""
    try:
        groups, own = saved["param_groups"], optimizer.state_dict()["param_groups"]
        is_ours = len(groups) == len(own) and all(map(_is_same_group, groups, own))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        entries = [saved["state"][number] for number in range(len(parameters))]
        is_ours &= len(saved["state"]) == len(parameters)
        is_ours &= all(map(_is_entry, itertools.repeat(type(optimizer)), entries, parameters))
    except (KeyError, TypeError, AttributeError, RuntimeError):
        is_ours = False
    if not is_ours:
        raise ValueError(f"it does not hold the state of this run's {type(optimizer).__name__}")


def _is_same_group(saved: dict[str, Any], own: dict[str, Any]) -> bool:
    """True if two groups have the same settings, as far as both know them. The trainer sets the rate at each step."""
    names = saved.keys() & own.keys() - {"lr"}
    pairs = [(saved[name], own[name]) for name in names]
    return "params" in names and all(type(theirs) is type(ours) and theirs == ours for theirs, ours in pairs)


def _is_entry(kind: type, entry: dict[str, Tensor], parameter: nn.Parameter) -> bool:
    """True if ``entry`` is what an optimizer of this kind knows of ``parameter``."""
    shapes: dict[str, tuple[int, ...]] = {"step": ()} if kind is torch.optim.AdamW else {}
    shapes |= dict.fromkeys(_MOMENTS[kind], tuple(parameter.shape))
    is_plain = all(type(x) is Tensor and x.layout == torch.strided and not x.is_meta for x in entry.values())
    return is_plain and {name: (tuple(x.shape), x.dtype) for name, x in entry.items()} == {
        name: (shape, torch.float32) for name, shape in shapes.items()
    }


def learning_rate(step: int, steps: int, warmup: float, constant: float) -> float:
    """Return the learning rate of a step as a fraction of the peak: linear warmup, plateau, cosine decay to 0.

    Args:
        step: number of the step, from 0.
        steps: steps of the run.
        warmup: fraction of ``steps`` after which the warmup ends.
        constant: fraction of ``steps`` after which the plateau ends.
    """
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    start = max(rise, round(constant * steps))
    if step < start:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - start) / max(1, steps - start)))
