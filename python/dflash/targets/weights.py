"""The tensors of a model: which of them cannot be computed with, and those that are neither parameters nor buffers."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig

from .. import ops

__all__ = [
    *("KERNEL_DTYPES", "is_plain_module", "is_plain_tensor", "kernel_obstacle", "modules_of", "name_of"),
    *("plain_tensors", "refusal_of_weights", "repeated_modules", "shard_of", "tensors_of"),
]

KERNEL_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}
"""The dtypes that our kernels multiply in."""

_PLAIN = (Tensor, nn.Parameter)
_LEAVES = (
    *(str, bytes, bool, int, float, complex, type(None), type, torch.dtype, torch.device, PreTrainedConfig),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)
_REFUSED_MODULES = ("torch.ao.", "torch.nn.quantized", "torch.distributed.")
_CHECKPOINTING = "torch.distributed.algorithms._checkpoint."  # wraps modules that are whole


def refusal_of_weights(model: nn.Module, loaded: bool = True, shards: Mapping[int, Tensor] | None = None) -> str | None:
    """Return why a model's modules and tensors cannot be run, or None. Reads sizes and addresses only.

    Args:
        model: the target, or a drafter.
        loaded: False to accept weights on the meta device.
        shards: what to judge in place of tensors spread over processes, by their ``id``; others are refused.
    """
    modules = modules_of(model)
    for kind in set(map(type, modules)):
        if kind.__module__.startswith(_REFUSED_MODULES) and not kind.__module__.startswith(_CHECKPOINTING):
            return _refusal_of_class(kind)
    for tensor in tensors_of(modules):
        judged = shards.get(id(tensor), tensor) if shards else tensor
        if not (judged.is_meta and not loaded) and (reason := refusal_of_tensor(judged)):
            return f"{name_of(model, tensor)} {reason}"
    return None


def _refusal_of_class(module: type) -> str:
    kind = f"{module.__module__}.{module.__qualname__}"
    if kind.startswith("torch.distributed."):
        return f"it is sharded by torch.distributed ({kind}): one process with all of the weights is needed"
    return (
        f"{kind} quantizes activations with one scale for all rows, so that a row's numbers depend on the rows "
        "next to it: use the model before quantization, or one whose weights alone are quantized"
    )


def refusal_of_tensor(tensor: Tensor) -> str | None:
    """Return why a tensor's values cannot be read, or None."""
    kind = type(tensor)
    try:  # the common case; the tensors that have no storage raise
        is_read = kind in _PLAIN and tensor.untyped_storage().nbytes() >= ops.bytes_reached(tensor) > 0
        if is_read and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor()):
            return None
    except (RuntimeError, NotImplementedError):
        pass
    if tensor.is_meta:
        return "is on the meta device: it was never loaded, or it is offloaded"
    if kind not in _PLAIN and kind.__module__.startswith(("torch.distributed.", "torch._subclasses.")):
        return f"is a {kind.__name__}: one process with plain tensors is needed"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor._is_zerotensor():
        what = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        return f"is not a dense tensor (it is {what if not tensor._is_zerotensor() else 'a zero without memory'})"
    if is_traceable_wrapper_subclass(tensor):
        return None  # computes by itself, from tensors that it holds
    # Sharded parameters are flat while they are elsewhere; [0, n] is a layer of no rows.
    if tensor.numel() == 0 and tensor.dim() == 1 and isinstance(tensor, nn.Parameter):
        return f"is empty, {list(tensor.shape)}: its values are elsewhere (a shard, or offloaded)"
    try:
        missing = tensor.untyped_storage().nbytes() < ops.bytes_reached(tensor)
    except (RuntimeError, NotImplementedError):
        return f"has no memory of its own ({kind.__name__} inside a functorch transform?)"
    return "has lost its memory: its storage was freed (FSDP, offload)" if missing else None


def is_plain_module(module: nn.Module) -> bool:
    """Return True for a module without hooks, parametrizations or a replaced forward."""
    changes = (module._forward_hooks, module._forward_pre_hooks, getattr(module, "parametrizations", None))
    return not any(changes) and "forward" not in module.__dict__


def is_plain_tensor(tensor: Tensor) -> bool:
    """Return True for a tensor whose values are in its memory as they are."""
    return type(tensor) in _PLAIN and not tensor.is_neg() and not tensor.is_conj()


def kernel_obstacle(device: torch.device, weights: Sequence[Tensor], widths: Iterable[int]) -> str:
    """Return why our kernels cannot multiply by these weights on ``device``; empty if they can.

    The ops would run in plain torch then, and a model's own modules are as fast. Attention and recurrences run on our
    kernels either way.

    Args:
        device: where the weights are.
        weights: of one dtype.
        widths: the sizes that the products sum over.
    """
    dtype = weights[0].dtype
    if dtype not in KERNEL_DTYPES.get(device.type, ()):
        return f"our kernels for {device.type} do not multiply in {dtype}"
    if device.type != "cuda":
        return ""
    if reason := ops.cuda_status(device.index):
        return f"our CUDA kernels cannot run: {reason}"
    if any(width % 8 for width in widths) or any(weight.data_ptr() % 16 for weight in weights):
        return "our CUDA kernels need products over multiples of 8, and weights at multiples of 16 bytes"
    return ""


def shard_of(tensor: Tensor) -> Tensor | None:
    """Return this process's part of a tensor that torch.distributed spreads (a DTensor); None for any other."""
    kind = type(tensor)
    if kind in _PLAIN or not kind.__module__.startswith("torch.distributed."):
        return None
    return getattr(tensor, "_local_tensor", None)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return what ``modules()`` does, in another order, in a third of the time."""
    found, seen = [model], {id(model)}
    for module in found:  # grows while it is read
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def repeated_modules(model: nn.Module) -> set[int]:
    """Return the ``id`` of each module that a model holds in more than one place."""
    children = [id(child) for module in modules_of(model) for child in module._modules.values() if child is not None]
    return {child for child, count in Counter(children).items() if count > 1}


def tensors_of(modules: list[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of these modules; a shared one may come twice."""
    tensors: list[Tensor | None] = []
    for module in modules:
        tensors += module._parameters.values()
        tensors += module._buffers.values()
    return [tensor for tensor in tensors if tensor is not None]


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of every module; a shared one may come twice."""
    todo = [("", model)]
    while todo:
        prefix, module = todo.pop()
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    yield prefix + name, tensor
        todo += [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]


def name_of(model: nn.Module, tensor: Tensor) -> str:
    """Return the name of a parameter or buffer of a model."""
    return next(name for name, named in named_tensors(model) if named is tensor)


def plain_tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in other attributes of a model's modules, inside of lists, dicts and objects too."""
    modules = modules_of(model)
    seen, registered = set(map(id, modules)), set(map(id, tensors_of(modules)))
    for module in modules:
        for name, value in module.__dict__.items():
            if name not in _REGISTRIES:
                yield from (tensor for tensor in _tensors_in(value, seen) if id(tensor) not in registered)


_REGISTRIES = frozenset(nn.Module().__dict__)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
        return
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        yield from _tensors_in(part, seen)
