"""Structural copies of a model: they share its parameters and buffers and own everything else."""

from __future__ import annotations

import copy
import types
from typing import Any

from torch import nn

from .parallel import forward_of_copy, meshes
from .quantized import finish_loading, forward_before_dispatch, shared_states
from .recurrent import is_stateful
from .support import UnsupportedTargetError
from .weights import plain_tensors

__all__ = ["structural_copy"]


def structural_copy(module: nn.Module) -> nn.Module:
    """Return a copy of ``module``, in eval mode, that shares its tensors. Takes milliseconds.

    Raises:
        UnsupportedTargetError: something in the module cannot be copied, or a forward was replaced.
    """
    finish_loading(module)
    tensors = (*module.parameters(), *module.buffers(), *plain_tensors(module))
    shared = (*tensors, *shared_states(module), *meshes(module))
    memo: dict[int, Any] = {id(value): value for value in shared}
    try:
        result = copy.deepcopy(module, memo).eval()
    except (TypeError, RuntimeError) as error:
        raise UnsupportedTargetError(
            f"{type(module).__name__} holds something that cannot be copied: {error}"
        ) from error
    for original, copied in zip(module.modules(), result.modules(), strict=True):
        _restore_forward(original, copied)
    return result


def _restore_forward(original: nn.Module, copied: nn.Module) -> None:
    """Undo an instance-level forward on the copy: one of torch.compile or accelerate would call the original.

    That of transformers' tensor parallelism is made again for the copy.
    """
    forward = original.__dict__.get("forward")
    if forward is None:
        return
    if (own := forward_of_copy(original, copied)) is not None:
        copied.__dict__["forward"] = own
        return
    inside = getattr(forward, "_torchdynamo_orig_callable", None) or forward_before_dispatch(original)
    if inside is None and _is_idle_hook(getattr(original, "_hf_hook", None)):
        inside = getattr(original, "_old_forward", None)
    if _is_of_class(inside or forward, original):
        del copied.__dict__["forward"]
    elif inside is not None or not isinstance(forward, types.MethodType) or is_stateful(original):
        raise UnsupportedTargetError(f"{type(original).__name__}.forward was replaced by {forward!r}")


def _is_of_class(forward: Any, module: nn.Module) -> bool:
    """Return True for a bound method that is the forward of the module's class."""
    return isinstance(forward, types.MethodType) and forward.__func__ is getattr(type(module), "forward", None)


def _is_idle_hook(hook: Any) -> bool:
    """Return True for a hook of accelerate that only moves inputs to the device of weights that stay there."""
    if type(hook).__module__ != "accelerate.hooks":
        return False
    if type(hook).__name__ == "SequentialHook":
        return all(map(_is_idle_hook, hook.hooks))
    return type(hook).__name__ == "AlignDevicesHook" and not hook.offload
