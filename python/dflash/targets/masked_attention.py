"""Attention of families whose rows see neither the whole past nor a window of it: over a mask of slots, in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "masked_verify"  # must contain no "flash", and be neither "eager" nor "sdpa": modules then pass indices on

_SCORES = 2**27  # that are held at once where attention has sinks


def _attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *,
    indices: Tensor | None = None, scaling: float, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend over whole cache buffers to what each row sees, behind transformers' signature.

    ``attention_mask [batch, 1, rows, slots]`` is bool, or a number that is 0 for what is seen; ``indices [batch, rows,
    n]`` are what an indexer selects.
    """
    seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    if indices is not None:
        seen = torch.zeros_like(seen).scatter(-1, indices.long()[:, None], True) & seen
    unused = ~seen.any(-2)[..., None]  # their slots may hold anything, NaN too
    key, value = key.masked_fill(unused, 0), value.masked_fill(unused, 0)
    if s_aux is None:
        options = {"scale": scaling, "enable_gqa": key.shape[1] != query.shape[1]}
        return nn.functional.scaled_dot_product_attention(query, key, value, seen, **options).transpose(1, 2), None
    keys, sinks = key.transpose(2, 3), s_aux.float().view(1, -1, 1, 1)  # one head of keys for all
    rows = max(1, _SCORES // (query.shape[0] * query.shape[1] * key.shape[2]))
    out = []
    for part, visible_part in zip(query.split(rows, 2), seen.split(rows, 2), strict=True):
        scores = (part @ keys * scaling).float().masked_fill(~visible_part, -torch.inf)
        weights = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], -1).softmax(-1)[..., :-1]
        out.append(weights.to(value.dtype) @ value)
    return torch.cat(out, 2).transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attend)
