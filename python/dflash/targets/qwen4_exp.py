"""Blocks of keys and embedded n-grams: Qwen4, whose modules run as they are on a cache that answers their questions.

Its indexers select blocks of positions that each row sees, by keys and positions of the whole past. Its embeddings of
n-grams read the last tokens, and a convolution over them the last inputs, which transformers keeps as states. Here all
of these stay in the cache by position, so a pass finds those in front of its first row whatever was rejected.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cache import KVCache
from .copies import CacheView
from .model import text_config
from .recurrent import has_modules_that_use

LAYER_TYPE = "indexed_attention"  # of the mask
LAYER_TYPES = {LAYER_TYPE, "linear_attention"}
_INPUTS, _IDS = 1, 2  # states of the convolution and of the n-grams, as the family numbers them


def has_block_indexers(model: nn.Module) -> bool:
    """Return True if modules are indexers that select blocks as those of Qwen4 do."""
    return has_modules_that_use(model, {"update_indexer", "block_topk"})


class BlockView(CacheView):
    """A `CacheView` for this family.

    Args:
        model: whose.
        cache: see `CacheView`.
        slots: see `CacheView`.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, slots: Tensor) -> None:
        super().__init__(cache, slots)
        self._config = text_config(model)
        positions = torch.arange(cache.capacity, device=slots.device).expand(3, len(slots), -1)
        self._layer = types.SimpleNamespace(indexer_position_ids=positions)  # of all slots, then of the rows

    @property
    def layers(self) -> Any:
        """What has the positions of a layer's keys, by the layer's index."""
        return _Same(self._layer)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the ids of the last tokens, ``[batch, n]``; None for a recurrent layer's own state."""
        if state_idx != _IDS:
            return None
        end = self._config.eos_token_id
        end = end[0] if isinstance(end, list) else end
        ids = self.slots.new_zeros(len(self.slots), 1, 0, 1, dtype=torch.float32)  # which holds every id exactly
        return self._before(ids, layer_idx, state_idx, self._config.ngram_size - 1, end)[..., 0].long()

    def update_conv_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **_: Any
    ) -> Tensor:
        """Keep ``states [batch, channels, rows]``, and return them with those in front; a recurrent layer's alone."""
        if state_idx == _IDS:  # [batch, rows]
            kept = states[:, None, :, None].float()
            self.update(kept, kept[..., :0], _index(layer_idx, state_idx))
        if state_idx != _INPUTS:
            return states
        rows = states.transpose(1, 2)[:, None]
        before = self._before(rows, layer_idx, state_idx, conv_kernel_size, 0)
        self.update(rows, rows[..., :0], _index(layer_idx, state_idx))
        return torch.cat([before.transpose(1, 2), states], -1)

    def _before(self, like: Tensor, layer: int, state: int, count: int, filler: int) -> Tensor:
        """Return what is kept of the ``count`` positions in front of the pass, ``[batch, count, width]``."""
        buffer = self.cache.layer(_index(layer, state), like, like[..., :0])[0][:, 0]
        places = self.slots[:, :1] - count + torch.arange(count, device=self.slots.device)
        found = buffer.gather(1, places.clamp(min=0)[..., None].expand(-1, -1, buffer.shape[-1]))
        return found.masked_fill((places < 0)[..., None], filler)


class _Same:
    """A list that has the same item everywhere."""

    def __init__(self, item: object) -> None:
        self._item = item

    def __getitem__(self, _index: int) -> object:
        return self._item


def _index(layer: int, state: int) -> int:
    """Return under which number the cache keeps a state of a layer, beside the indexers' keys."""
    return ~(2**16 * state + layer)
