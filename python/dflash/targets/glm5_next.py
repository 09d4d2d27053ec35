"""Pooled indexers: GLM-5.3, whose layers attend to pools of positions that an indexer selects by one key per pool.

The pools' keys are made and kept as the entries of `dflash.targets.deepseek_v4`. Beside whole pools a row sees those
positions of its own pool that are not whole yet.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .copies import CacheView
from .deepseek_v4 import best_entries, pooled


def select(
    self: nn.Module, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, cache: CacheView,  # noqa: ARG001
) -> Tensor:  # fmt: skip
    """Return the slots that each row attends to, ``[batch, rows, n]``, and -1.

    Indexers of a copy run this: it keeps what they pool in the cache of the pass.
    """
    rate, positions, device = self.index_kpool, cache.slots, hidden_states.device

    def pool(keys: Tensor, gate: Tensor, _windows: Tensor) -> Tensor:
        weights = (gate.float() + self.index_kpool_compress_ape.float()).softmax(2)
        return (weights.to(keys.dtype) * keys).sum(2)

    # 1. Pools that are whole at each row, and their scores.
    keys = self.k_norm(self.wk(hidden_states))
    gate = F.linear(hidden_states, self.index_kpool_compress_gate)
    entries = pooled(cache, self.layer_idx, 1, keys, gate, rate, 1, pool)
    whole = (positions + 1) // rate
    seen = torch.arange(entries.shape[1], device=device) < whole[..., None]
    entries = entries.masked_fill(~seen.any(1)[..., None], 0)  # may be NaN
    q = self.wq_b(q_resid).unflatten(-1, (-1, self.head_dim))
    scores = F.relu(q.float() @ entries.transpose(1, 2).float()[:, None] * self.softmax_scale)
    weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float() * self.n_heads**-0.5
    chosen = best_entries((weights[..., None, :] @ scores)[..., 0, :], seen, self.index_topk // rate, rate,
                          self.running_pass)  # fmt: skip
    # 2. Their slots, and those of the pool that is not whole.
    most = min(self.index_topk // rate, chosen.shape[-1])
    number = chosen.int().topk(most).indices  # the chosen ones, then others
    slots = number[..., None] * rate + torch.arange(rate, device=device)
    slots = slots.masked_fill(~chosen.gather(-1, number)[..., None], -1).flatten(2)
    if not self.index_kpool_always_select_tail:
        return slots
    tail = (whole * rate)[..., None] + torch.arange(rate - 1, device=device)
    return torch.cat([slots, tail.masked_fill(tail > positions[..., None], -1)], -1)
