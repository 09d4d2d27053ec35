"""Checks of the prompts of a call."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_ids"]


def check_ids(ids: Tensor, attention_mask: Tensor | None, vocab_size: int, device: torch.device) -> Tensor:
    """Return the mask as bool ``[batch, length]``; raise on any prompt that cannot be run."""
    if not isinstance(ids, Tensor):
        raise TypeError(f"ids must be a tensor [batch, length] of token ids, got {type(ids).__name__}")
    if ids.dim() != 2:
        raise ValueError(f"ids must be [batch, length], got {ids.dim()} dimensions")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids must be int64 or int32, got {ids.dtype}")
    if ids.device != device:
        raise ValueError(f"ids must be on the target's device, {device}, got {ids.device}")
    if ids.numel() == 0:
        raise ValueError(f"ids must hold at least one token in each row, got shape {list(ids.shape)}")
    everything = torch.ones_like(ids, dtype=torch.bool)
    mask = everything if attention_mask is None else _check_mask(attention_mask, ids)
    live = ids[mask]
    low, high = int(live.min()), int(live.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"ids must lie in 0 .. {vocab_size - 1} (the target's vocabulary), got {wrong}")
    return mask


def _check_mask(attention_mask: Tensor, ids: Tensor) -> Tensor:
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != ids.shape:
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(f"attention_mask must have the shape of ids, {list(ids.shape)}, got {got}")
    if attention_mask.device != ids.device:
        raise ValueError(f"attention_mask must be on the target's device, {ids.device}, got {attention_mask.device}")
    if not attention_mask.eq(0).logical_or(attention_mask.eq(1)).all():
        raise ValueError("attention_mask must hold zeros and ones only")
    mask = attention_mask.bool()
    edges = mask[:, 1:].ne(mask[:, :-1]).sum(1) + mask[:, 0] + mask[:, -1]
    if not mask.any(1).all():
        raise ValueError("attention_mask hides a whole row: every row needs at least one token")
    if edges.gt(2).any():
        raise ValueError("attention_mask has holes: a row's ones must be contiguous (pad left or right)")
    return mask
