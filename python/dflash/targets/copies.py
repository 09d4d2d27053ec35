"""The copy of a model: it shares the model's tensors, owns everything else, and runs our attention on our cache."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedConfig

from .. import ops
from ..cache import KVCache, further_index
from .model import UnsupportedTargetError, library, modules_of, tensors_of, text_config
from .parallel import forward_of_copy, meshes
from .recurrent import is_stateful


def structural_copy(module: nn.Module) -> nn.Module:
    """Return a copy of ``module``, in eval mode, that shares its tensors. Takes milliseconds.

    Raises UnsupportedTargetError if something in it cannot be copied, or a forward was replaced.
    """
    _finish_loading(module)
    # Parameters, buffers (compressed-tensors keeps them in mappings of its own), and what other lists and dicts hold
    modules = modules_of(module)
    tensors = tensors_of(modules) + [leaf for leaf in tree_leaves([*map(vars, modules)]) if isinstance(leaf, Tensor)]
    memo: dict[int, Any] = {id(value): value for value in (*tensors, *_shared_states(module), *meshes(module))}
    try:
        result = copy.deepcopy(module, memo).eval()
    except (TypeError, RuntimeError) as error:
        raise UnsupportedTargetError(f"{type(module).__name__} cannot be copied: {error}") from error
    for original, copied in zip(module.modules(), result.modules(), strict=True):
        _restore_forward(original, copied)
    return result


def _restore_forward(original: nn.Module, copied: nn.Module) -> None:
    """Undo or make again an instance-level forward on the copy, where it would call the original."""
    forward = original.__dict__.get("forward")
    if forward is None:
        return
    if (own := forward_of_copy(original, copied)) is not None:
        copied.__dict__["forward"] = own
        return
    inside = getattr(forward, "_torchdynamo_orig_callable", None) or _forward_before_dispatch(original)
    if inside is None and _is_idle_hook(getattr(original, "_hf_hook", None)):
        inside = getattr(original, "_old_forward", None)
    of_class = getattr(type(original), "forward", None)
    if isinstance(inside or forward, types.MethodType) and (inside or forward).__func__ is of_class:
        del copied.__dict__["forward"]
    elif inside is not None or not isinstance(forward, types.MethodType) or is_stateful(original):
        raise UnsupportedTargetError(f"{type(original).__name__}.forward was replaced by {forward!r}")


def _is_idle_hook(hook: Any) -> bool:
    """Return True for a hook of accelerate that only moves inputs to the device of weights that stay there."""
    if type(hook).__module__ != "accelerate.hooks":
        return False
    if type(hook).__name__ == "SequentialHook":
        return all(map(_is_idle_hook, hook.hooks))
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload


# ---------------------------------------------------------------------------------------------- quantized layers


def _shared_states(model: nn.Module) -> Iterator[Any]:
    """Yield the objects of bitsandbytes that a copy must share with the model, because it shares the parameters.

    A layer's first pass moves tensors from the parameter into the state of the layer (``CB``), or replaces both the
    parameter's values and tensors of its ``quant_state``. With states of their own, the layer that runs second would
    have lost its scales.
    """
    for module in modules_of(model):
        if library(module) == "bitsandbytes":
            yield from (value for value in module.__dict__.values() if library(value) == "bitsandbytes")


@torch.no_grad()
def _finish_loading(model: nn.Module) -> None:
    """Have compressed-tensors decompress and GPTQModel pack now, not at the first pass, so that a copy shares it."""
    with torch.inference_mode(False):
        handle = model.__dict__.get("ct_decompress_hook")
        hook = model._forward_pre_hooks.get(getattr(handle, "id", None))
        if hook is not None:
            hook(model, ())
        for module in modules_of(model):
            is_pending = library(module) == "gptqmodel" and getattr(module, "linear_mode", "") is None
            if is_pending and not module.training:
                row = torch.zeros(1, module.in_features, dtype=model.dtype, device=module.scales.device)
                type(module).forward(module, row)


def _forward_before_dispatch(module: nn.Module) -> types.MethodType | None:
    """Return the class's forward below one of compressed-tensors that only moves inputs; None for other forwards."""
    inside = module.__dict__.get("_original_forward_func")
    is_own = inside is not None and inside is getattr(type(module), "forward", None)
    return types.MethodType(inside, module) if is_own else None


# ---------------------------------------------------------------------------------------------- attention

# transformers tests names for "flash", so the name must not contain it. It has no mask interface: no mask is built.
_NAME = "block_verify"


def use_attention(model: nn.Module, name: str = _NAME) -> None:
    """Make every module of a copy call a registered attention function, by default ours."""
    for module in model.modules():  # attention modules may have been given a config of their own
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            module.config._attn_implementation = name
    text_config(model)._attn_implementation = name


def _block_attention(  # noqa: PLR0913 - transformers' signature
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    block_lengths: Tensor | None = None, block_ancestors: Tensor | None = None, scaling: float | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend over whole cache buffers, ``key`` and ``value [batch, kv_heads, capacity, head_dim]``.

    ``query`` is ``[batch, heads, rows, head_dim]``. What begins with ``block_`` passes through the model's forward.
    """
    if block_lengths is None and hasattr(module, "running_pass"):
        block_lengths = module.running_pass.lengths
    if block_lengths is None or attention_mask is not None or position_bias is not None:
        reason = "it does not pass the cache lengths on" if block_lengths is None else "it builds its own mask or bias"
        raise UnsupportedTargetError(f"{type(module).__name__} cannot run on dflash's attention: {reason}")
    # Nothing may be read early (`fresh`): some families, such as deepseek_v3, attend to keys and values that the kernel
    # ahead computes of the cache.
    scale, window = query.shape[-1] ** -0.5 if scaling is None else float(scaling), window_of(module, kwargs) or 0
    heads = query.transpose(1, 2), key, value, block_lengths
    return ops.block_attention(*heads, scale, True, window, softcap or 0.0, s_aux, block_ancestors), None


def window_of(module: nn.Module, kwargs: dict[str, Any]) -> int | None:
    """Return the window of an attention module that was called with these keyword arguments, or None.

    A window that the module leaves to a mask is not seen here: the trial compares masks.
    """
    return kwargs["sliding_window"] if "sliding_window" in kwargs else getattr(module, "sliding_window", None)


AttentionInterface.register(_NAME, _block_attention)


class CacheView:
    """The ``past_key_values`` of one forward pass: writes to slots on the device, returns whole buffers.

    It answers as a cache that holds nothing: positions are always passed, and `recurrent` keeps the states.

    Args:
        cache: written to.
        slots: ``[batch, rows]`` int64, of the rows of this pass.
        config: of the language model.
    """

    is_compileable = True

    def __init__(self, cache: KVCache, slots: Tensor, config: Any) -> None:
        self.cache, self.slots, self.config = cache, slots, config

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``key`` and ``value [batch, kv_heads, rows, head_dim]`` and return the layer's buffers."""
        keys, values = self.cache.layer(layer_idx, key, value)
        ops.append_kv_(key, value, self.slots, keys, values)
        return keys, values

    def index_keys(self, key: Tensor, layer_idx: int) -> Tensor:
        """Return the buffer ``[batch, 1, capacity, dim]`` of an indexer's keys ``[batch, rows, dim]``."""
        return self.cache.layer(further_index(layer_idx, 0), key[:, None], key[:, None, :, :0])[0]

    def update_indexer(self, key: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any) -> Tensor:
        """Append an indexer's keys ``[batch, rows, dim]`` and return its buffer ``[batch, capacity, dim]``."""
        return self.update(key[:, None], key[:, None, :, :0], further_index(layer_idx, 0))[0][:, 0]

    def get_seq_length(self, *_args: Any) -> int:
        return 0

    def get_conv_state(self, *_args: Any, **_kwargs: Any) -> None:
        """Return None: recurrent modules then take the branch for several rows."""

    get_recurrent_state = get_conv_state

    def has_previous_state(self, *_args: Any, **_kwargs: Any) -> bool:
        return False  # transformers before 5.21 asks for this instead

    def update_conv_state(self, states: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:
        return states  # without inputs in front of them

    update_recurrent_state = update_conv_state
