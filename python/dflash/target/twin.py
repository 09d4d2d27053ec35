"""Structural twins: copies of a model that share its parameters and buffers and own everything else."""

from __future__ import annotations

import copy
import enum
import types
from typing import Any

import torch
from torch import Tensor, nn

from .support import UnsupportedTargetError

# How `structure` takes values: these as they are, those by identity.
_PLAIN = {type(None), bool, int, float, str, bytes, torch.dtype, torch.device}
_BY_IDENTITY = (type, Tensor, types.FunctionType, types.BuiltinFunctionType, enum.Enum)


def structural_twin(module: nn.Module) -> nn.Module:
    """A copy of ``module`` that shares its parameters and buffers and owns everything else. Costs milliseconds."""
    memo = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    try:
        twin = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedTargetError(
            f"{type(module).__name__} holds something that cannot be copied: {error}"
        ) from error
    for original, copied in zip(module.modules(), twin.modules(), strict=True):
        forward = original.__dict__.get("forward")
        if forward is None:
            continue
        # An instance-level forward (torch.compile, accelerate) closes over the user's module: undo it on the twin.
        wrapped = getattr(forward, "_torchdynamo_orig_callable", None)
        if wrapped is not None or hasattr(original, "_hf_hook"):
            del copied.__dict__["forward"]
        elif not isinstance(forward, types.MethodType):
            raise UnsupportedTargetError(f"{type(original).__name__}.forward was replaced by {forward!r}")
    return twin.eval()


def structure(module: nn.Module) -> Any:
    """Everything that :func:`structural_twin` would copy, in a form that compares equal while nothing has changed.

    Tensors, functions and classes count by identity and are not kept alive. What cannot be looked into never compares
    equal, not even to itself.
    """
    seen: dict[int, Any] = {}  # keeps what is made on the way alive, so that no identity comes twice

    def frozen(value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, _BY_IDENTITY) or id(value) in seen:
            return id(value)
        if isinstance(value, types.MethodType):
            return id(value.__func__), id(value.__self__)
        seen[id(value)] = value
        if isinstance(value, dict):
            return kind, [(frozen(key), frozen(entry)) for key, entry in value.items()]
        if isinstance(value, (list, tuple)):
            return kind, [frozen(entry) for entry in value]
        try:
            state = value.__reduce_ex__(4)
        except Exception:
            return object()
        return frozen(state) if isinstance(state, tuple) else object()

    return frozen(module)


def first_hook(model: nn.Module) -> str:
    """The name of the first module with a forward hook of the user's; empty when there is none."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            # transformers' own, which collect hidden states and attentions, are idle here.
            if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                return name or type(model).__name__
    return ""


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile(model)``, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)
