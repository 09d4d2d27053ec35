"""Blocks of keys and embedded n-grams: Qwen4, whose modules run as they are on a cache that answers their questions.

Its indexers select blocks of positions that each row sees, by keys and positions of the whole past. Its embeddings of
n-grams read the last tokens, and a convolution over them the last inputs, which transformers keeps as states. Here all
of these stay in the cache by position, so a pass finds those in front of its first row whatever was rejected.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from ..cache import KVCache, further_index
from .copies import CacheView

_INPUTS, _IDS = 1, 2  # states of the convolution and of the n-grams, as the family numbers them


class BlockView(CacheView):
    """A `CacheView` that also answers what this family asks."""

    def __init__(self, cache: KVCache, slots: Tensor, config: Any) -> None:
        super().__init__(cache, slots, config)
        positions = torch.arange(cache.capacity, device=slots.device).expand(3, len(slots), -1)
        # By layer, what has the positions of its keys: of all slots, then of the rows
        self.layers = [types.SimpleNamespace(indexer_position_ids=positions)] * len(config.layer_types)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the ids of the last tokens, ``[batch, n]``; None for a recurrent layer's own state."""
        if state_idx != _IDS:
            return None
        end = self.config.eos_token_id
        end = end[0] if isinstance(end, list) else end
        ids = self.slots.new_zeros(len(self.slots), 1, 0, 1, dtype=torch.float32)  # which holds every id exactly
        return self._before(ids, layer_idx, state_idx, self.config.ngram_size - 1, end)[..., 0].long()

    def update_conv_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **_: Any
    ) -> Tensor:
        """Keep ``states [batch, channels, rows]``, and return them with those in front; a recurrent layer's alone."""
        if state_idx == _IDS:  # [batch, rows]
            kept = states[:, None, :, None].float()
            self.update(kept, kept[..., :0], further_index(layer_idx, state_idx))
        if state_idx != _INPUTS:
            return states
        rows = states.transpose(1, 2)[:, None]
        before = self._before(rows, layer_idx, state_idx, conv_kernel_size, 0)
        self.update(rows, rows[..., :0], further_index(layer_idx, state_idx))
        return torch.cat([before.transpose(1, 2), states], -1)

    def _before(self, like: Tensor, layer: int, state: int, count: int, filler: int) -> Tensor:
        """Return what is kept of the ``count`` positions in front of the pass, ``[batch, count, width]``."""
        buffer = self.cache.layer(further_index(layer, state), like, like[..., :0])[0][:, 0]
        places = self.slots[:, :1] - count + torch.arange(count, device=self.slots.device)
        found = buffer.gather(1, places.clamp(min=0)[..., None].expand(-1, -1, buffer.shape[-1]))
        return found.masked_fill((places < 0)[..., None], filler)
