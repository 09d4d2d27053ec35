"""Our attention and our cache, as transformers' decoder layers see them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig

from .. import ops
from ..state import KVCache
from .support import UnsupportedTargetError, text_config

__all__ = ["CacheView", "use_attention", "window_of"]

# transformers tests names for "flash", so the name must not contain it. It has no mask interface: no mask is built.
_NAME = "block_verify"


def use_attention(model: nn.Module, name: str = _NAME) -> None:
    """Make every module of a copy call a registered attention function, by default ours."""
    for module in model.modules():  # attention modules may have been given a config of their own
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._attn_implementation = name
    text_config(model)._attn_implementation = name


def _block_attention(  # noqa: PLR0913 - transformers' signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    block_lengths: Tensor | None = None,
    block_ancestors: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over whole cache buffers, behind the signature that transformers calls.

    Args:
        module: the attention module.
        query: ``[batch, heads, rows, head_dim]``.
        key: ``[batch, kv_heads, capacity, head_dim]``, from `CacheView.update`.
        value: like ``key``.
        attention_mask: must be None.
        block_lengths: ``[batch]`` int64, positions before the first row; passed through the model's forward.
        block_ancestors: of a block that is a tree, as in `dflash.ops.block_attention`; passed like ``block_lengths``.
        scaling: factor on the scores; None for ``head_dim ** -0.5``.
        softcap: of the scores, or None.
        s_aux: ``[heads]`` attention sinks, or None.
        position_bias: must be None.
        **kwargs: ``sliding_window`` if the family passes it; others are ignored.
    """
    if block_lengths is None and hasattr(module, "running_pass"):
        block_lengths = module.running_pass.lengths
    if block_lengths is None or attention_mask is not None or position_bias is not None:
        reason = "it does not pass the cache lengths on" if block_lengths is None else "it builds its own mask or bias"
        raise UnsupportedTargetError(f"{type(module).__name__} cannot run on dflash's attention: {reason}")
    # Nothing may be read early (`fresh`): some families, such as deepseek_v3, attend to keys and values that the kernel
    # ahead computes of the cache.
    out = ops.block_attention(
        query.transpose(1, 2),
        key,
        value,
        block_lengths,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        causal=True,
        window=window_of(module, kwargs) or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
        ancestors=block_ancestors,
    )
    return out, None


def window_of(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Return the window of an attention module that was called with these keyword arguments, or None."""
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"]
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    if getattr(getattr(module, "config", None), "sliding_window", None) is not None:
        raise UnsupportedTargetError(f"{type(module).__name__} applies its sliding window only through a mask")
    return None


AttentionInterface.register(_NAME, _block_attention)


class CacheView:
    """The ``past_key_values`` of one forward pass: writes to slots on the device, returns whole buffers.

    Args:
        cache: written to.
        slots: ``[batch, rows]`` int64, of the rows of this pass.
    """

    is_compileable = True

    def __init__(self, cache: KVCache, slots: Tensor) -> None:
        self.cache, self.slots = cache, slots

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``key`` and ``value [batch, kv_heads, rows, head_dim]`` and return the layer's buffers."""
        keys, values = self.cache.layer(layer_idx, key, value)
        ops.append_kv_(key, value, self.slots, keys, values)
        return keys, values

    def get_seq_length(self, *_args: Any) -> int:
        """Return 0: positions are always passed, nothing may be derived from the buffers."""
        return 0

    # Recurrent modules are told that there is no state yet. Their functions in `recurrent` keep it.

    def get_conv_state(self, *_args: Any, **_kwargs: Any) -> None:
        """Return None: the pass then takes the branch for several rows."""

    get_recurrent_state = get_conv_state

    def has_previous_state(self, *_args: Any, **_kwargs: Any) -> bool:
        """Return False, which is what transformers before 5.21 asks for instead."""
        return False

    def update_conv_state(self, states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        """Return the rows as they are, without inputs in front of them."""
        return states

    update_recurrent_state = update_conv_state
