"""transformers' attention interface over the full buffers of our cache."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import AttentionInterface

from .. import ops
from ..cache import LazyKVCache
from .support import UnsupportedTargetError

# The name must not contain "flash" (transformers tests for it), and must have no mask interface: no mask is built.
_ATTENTION = "block_verify"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    block_lengths: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention interface over the full cache buffers that `_CacheView.update` returned.

    ``query [batch, heads, rows, head_dim]``; ``key``, ``value [batch, kv_heads, capacity, head_dim]``.
    """
    if block_lengths is None or attention_mask is not None or position_bias is not None:
        missing = "the cache lengths were not passed on" if block_lengths is None else "it builds its own mask or bias"
        raise UnsupportedTargetError(f"{type(module).__name__} cannot run on dflash's attention: {missing}")
    if "sliding_window" in kwargs:
        window = kwargs["sliding_window"]
    elif hasattr(module, "sliding_window"):
        window = module.sliding_window
    elif getattr(getattr(module, "config", None), "sliding_window", None) is not None:
        raise UnsupportedTargetError(f"{type(module).__name__} applies its sliding window through a mask alone")
    else:
        window = None
    out = ops.block_attention(
        query.transpose(1, 2),
        key,
        value,
        block_lengths,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        causal=True,
        window=window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out, None


AttentionInterface.register(_ATTENTION, _attention)


class _CacheView:
    """What transformers' attention layers see as ``past_key_values`` during one forward.

    ``update`` writes at device-side positions into the preallocated buffers and returns them whole.
    """

    is_compileable = True

    def __init__(self, cache: LazyKVCache, positions: Tensor) -> None:
        self.cache = cache
        self.positions = positions

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.layer(layer_idx, key, value)
        ops.append_kv_(key, value, self.positions, keys, values)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always passed; nothing may be derived from the buffers
