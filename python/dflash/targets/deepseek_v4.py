"""Compressed keys: DeepSeek-V4, whose layers attend to windows of positions that were pooled into one key each.

A window of ``rate`` positions becomes one entry, by weights that its positions' gates give (DeepSeek-V4 report, section
2.3.2). Where windows overlap, the window before it takes part, and an indexer selects entries (section 2.3.1). An entry
depends on all of its window, so a rejected row must not be part of one that later rows see.

Here what goes into the entries stays in the cache, by position, and an entry is written to the slot of its window's
last position. So counters trim entries with the rest: one is seen only by rows at or behind that position. Each pass
makes again those whose windows end in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import ops
from ..cache import further_index
from .copies import CacheView
from .recurrent import Pass


def entries_and_mask(
    self: nn.Module, hidden: Tensor, q_residual: Tensor, positions: Tensor, cache: CacheView, layer: int
) -> tuple[Tensor, Tensor]:
    """Return a layer's entries ``[batch, 1, windows, dim]``, and which of them each row sees, as bool.

    Compressors of a copy run this: it keeps what they need in the cache of the pass.
    """
    entries = _entries(self, hidden, cache, layer, 1)
    complete = (positions + 1) // self.compress_rate  # windows that end at or before each row
    seen = torch.arange(entries.shape[1], device=hidden.device) < complete[..., None]
    if hasattr(self, "indexer"):
        seen = _selected(self.indexer, hidden, q_residual, positions, cache, layer, seen, self.running_pass)
    return entries[:, None], seen[:, None]


def _entries(module: nn.Module, hidden: Tensor, cache: CacheView, layer: int, number: int) -> Tensor:
    """Return all entries of a compressor or an indexer, as `pooled` does."""
    kv, gate, rate = module.kv_proj(hidden), module.gate_proj(hidden), module.compress_rate
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb

    def pool(kv: Tensor, gate: Tensor, windows: Tensor) -> Tensor:
        gate = gate + module.position_bias.repeat(gate.shape[2] // rate, 1)
        if gate.shape[2] > rate:  # the first half of the channels counts for the window after
            kv, gate = (
                torch.cat([x[:, :, :rate, : module.head_dim], x[:, :, rate:, module.head_dim :]], 2) for x in (kv, gate)
            )
            is_first = torch.arange(2 * rate, device=kv.device) < rate * (windows == 0)[..., None]
            kv, gate = kv.masked_fill(is_first[..., None], 0), gate.masked_fill(is_first[..., None], -torch.inf)
        made = module.kv_norm((kv * gate.softmax(2, dtype=torch.float32).to(kv.dtype)).sum(2))
        cos, sin = module.rotary_emb(made, position_ids=windows * rate, layer_type=module.rope_layer_type)
        return rotate(made[:, None], cos, sin)[:, 0]

    return pooled(cache, layer, number, kv, gate, rate, 1 + (kv.shape[-1] > module.head_dim), pool)


def pooled(
    cache: CacheView, layer: int, number: int, kv: Tensor, gate: Tensor, rate: int, count: int,
    pool: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:  # fmt: skip
    """Keep what a pass adds, and return all entries, ``[batch, windows, dim]``; those that are not whole mean nothing.

    Args:
        cache: of the pass.
        layer: whose they are.
        number: of the layer's buffers for what goes in; the next one is that of the entries.
        kv: ``[batch, rows, width]``, what is pooled.
        gate: likewise, by what weights.
        rate: positions of a window.
        count: windows that an entry is made of, its own the last.
        pool: makes entries ``[batch, n, dim]`` of ``kv`` and ``gate [batch, n, count * rate, width]`` and the windows'
            numbers ``[batch, n]``. Where there is no window ahead, it must drop the first positions.
    """
    slots, capacity = cache.slots, cache.cache.capacity
    # 1. What goes in, of each position.
    kv, gate = (x[:, 0] for x in cache.update(kv[:, None], gate[:, None], further_index(layer, number)))
    # 2. The windows that may end in this pass.
    windows = slots[:, :1] // rate + torch.arange((slots.shape[1] - 1) // rate + 2, device=kv.device)
    places = ((windows + 1 - count) * rate)[..., None] + torch.arange(count * rate, device=kv.device)
    found = places.clamp(0, capacity - 1).flatten(1)[..., None].expand(-1, -1, kv.shape[-1])
    made = pool(*(x.gather(1, found).view(*places.shape, -1) for x in (kv, gate)), windows)[:, None]
    # 3. Their entries, at the slots of their last positions.
    buffer, nothing = cache.cache.layer(further_index(layer, number + 1), made, made[..., :0])
    ends = (windows + 1) * rate - 1
    ops.append_kv_(made.contiguous(), made[..., :0], torch.where(ends < capacity, ends, -1), buffer, nothing)
    return buffer[:, 0, rate - 1 :: rate]


def _selected(
    indexer: nn.Module, hidden: Tensor, q_residual: Tensor, positions: Tensor, cache: CacheView, layer: int,
    seen: Tensor, running: Pass,
) -> Tensor:  # fmt: skip
    """Return which of the entries that it sees an indexer selects for each row, ``[batch, rows, windows]`` bool."""
    keys = _entries(indexer, hidden, cache, layer, 3)
    cos, sin = indexer.rotary_emb(hidden, position_ids=positions, layer_type=indexer.rope_layer_type)
    q = indexer.q_b_proj(q_residual).unflatten(-1, (-1, indexer.head_dim)).transpose(1, 2)
    q = sys.modules[type(indexer).__module__].apply_rotary_pos_emb(q, cos, sin).transpose(1, 2)
    keys = keys.masked_fill(~seen.any(1)[..., None], 0)  # may be NaN
    return best_entries(indexer.scorer(q, keys, hidden), seen, indexer.index_topk, indexer.compress_rate, running)


def best_entries(scores: Tensor, seen: Tensor, most: int, rate: int, running: Pass) -> Tensor:
    """Return which of the entries that it sees each row selects, ``[batch, rows, windows]`` bool, by their scores."""
    scores = scores.masked_fill(~seen, -torch.inf)
    if scores.device.type != "cpu" or torch.compiler.is_compiling():
        best = scores.topk(min(most, scores.shape[-1])).indices
        return torch.zeros_like(seen).scatter(-1, best, True) & seen
    chosen = torch.zeros_like(seen)
    for row in seen.flatten(0, 1).any(-1).nonzero()[:, 0].tolist():  # ties as the model breaks them, see `deepseek_v32`
        b, i = divmod(row, seen.shape[1])
        count = int(seen[b, i].sum()) if running.ends is None else int(running.ends[b]) // rate
        best = scores[b, i, :count].topk(min(most, count)).indices
        chosen[b, i].index_fill_(0, best, True)
    return chosen & seen
