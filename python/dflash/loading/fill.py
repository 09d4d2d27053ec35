"""Give an empty model the weights of its files: packed where kernels read them, else dense."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from .. import ops
from ..ops import PackedWeight
from ..targets import PackedEmbedding, PackedExperts, PackedLinear, experts_layout
from ..targets.model import KERNEL_DTYPES
from ..targets.packed import ExpertWeights

T = TypeVar("T")


class StoredWeight(Protocol):
    """A weight of a file, ``[..., out, in]``, with rows of gate above those of up."""

    @property
    def shape(self) -> torch.Size: ...

    def dense(self) -> Tensor:
        """Return the values in float32."""

    def pack(self) -> PackedWeight | None:
        """Return it packed for CPUs; None if it cannot stay packed."""


def packed_for(dtype: torch.dtype, device: torch.device | str) -> str:
    """Return the type of a device whose kernels multiply rows of this dtype by packed weights; empty if none do."""
    device = torch.device(device)
    if dtype not in KERNEL_DTYPES.get(device.type, ()):
        return ""
    has_kernel = device.type == "cpu" or not (ops.cuda_status(device.index or 0) or "linear" in ops.kernels_off())
    return device.type if has_kernel else ""


def by_module(weights: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return what is given by name, by module and by name in the module."""
    modules: dict[str, dict[str, T]] = {}
    for name, weight in weights.items():
        path, _, key = name.rpartition(".")
        modules.setdefault(path, {})[key] = weight
    return modules


def fill_module(
    model: nn.Module, path: str, weights: Mapping[str, Tensor | StoredWeight], packs: str
) -> list[StoredWeight]:
    """Give a module its weights. Returns the stored ones that became dense.

    Args:
        model: with its parameters on the meta device.
        path: of the module, in whose place a packed one may come.
        weights: by name in the module; a tensor is as the module has it.
        packs: from `packed_for`: leave weights packed where a module and kernels of this device take them.
    """
    module = model.get_submodule(path)
    if packs and (made := _packed_module(module, weights, packs)) is not None:
        model.set_submodule(path, made)
        return []
    for key, weight in weights.items():
        values = weight if isinstance(weight, Tensor) else weight.dense()
        if not isinstance(weight, Tensor) and getattr(module, "is_transposed", False):  # of gpt-oss
            values = gate_by_turns(values) if key.startswith("gate_up") else values
            values = values if key.endswith("bias") else values.mT
        set_values(model, f"{path}.{key}" if path else key, values, copy=isinstance(weight, Tensor))
    return [weight for weight in weights.values() if not isinstance(weight, Tensor)]


def set_values(model: Any, name: str, values: Tensor, *, copy: bool = True) -> None:
    """Give a model a parameter or a buffer, in the dtype that the model has it in.

    ``copy`` values that may be the memory of a file, which must not stay.
    """
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    like = getattr(module, key)
    is_wide = any(re.search(rf"(^|\.){each}(\.|$)", name) for each in model._keep_in_fp32_modules_strict or ())
    values = values.reshape(like.shape).to(torch.float32 if is_wide else like.dtype, copy=copy).contiguous()
    if key in module._buffers:
        module._buffers[key] = values
    else:
        module.register_parameter(key, nn.Parameter(values, requires_grad=False))


def tie_head(model: Any) -> None:
    """Have a head without weights multiply by those of the embeddings, or by their tiles."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, nn.Linear) and head.weight.is_meta:
        if isinstance(embeddings, PackedEmbedding):
            model.set_output_embeddings(PackedLinear(embeddings.packed))
        else:
            head.weight = embeddings.weight


def gate_above_up(values: Tensor) -> Tensor:
    """Return experts ``[experts, out, ...]`` whose rows of gate and up come by turns, with those of gate first."""
    return values.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def gate_by_turns(values: Tensor) -> Tensor:
    """Undo `gate_above_up`."""
    return values.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def _packed_module(module: Any, weights: Mapping[str, Tensor | StoredWeight], device: str) -> nn.Module | None:
    """Return a module like another that keeps its weights packed; None if it cannot. On GPUs embeddings cannot."""
    if {"gate_up_proj", "down_proj"} <= weights.keys():
        return _packed_experts(module, weights, device)
    is_linear = type(module) is nn.Linear or type(module).__name__ == "FalconLinear"
    is_scaled = isinstance(module, nn.Embedding) and "embed_scale" in dict(module.named_buffers())
    is_known = is_linear or (device == "cpu" and (is_scaled or type(module) is nn.Embedding))
    packed = _packed(weights.get("weight"), device, module.weight.dtype) if is_known else None
    if packed is None:
        return None
    if not isinstance(module, nn.Embedding):
        return PackedLinear(packed, _bias(module, "bias", weights))
    scale = module.embed_scale if is_scaled else None
    return None if packed.order is not None else PackedEmbedding(packed, module.weight.dtype, scale)


def _packed_experts(module: Any, weights: Mapping[str, Tensor | StoredWeight], device: str) -> nn.Module | None:
    form = experts_layout(module)
    if form is None or (device == "cuda" and "experts" in ops.kernels_off()):
        return None
    both = []
    for name in ("gate_up_proj", "down_proj"):
        packed = _packed(weights[name], device, getattr(module, name).dtype)
        if packed is None or packed.order is not None:
            return None
        both.append(packed)
    gate_up, down = (_bias(module, f"{name}_proj_bias", weights) for name in ("gate_up", "down"))
    if gate_up is not None and form.transposed and isinstance(weights["gate_up_proj_bias"], Tensor):
        gate_up = gate_above_up(gate_up)
    return PackedExperts(ExpertWeights(*both, gate_up, down, *form[:3]))


def _packed(weight: Tensor | StoredWeight | None, device: str, dtype: torch.dtype) -> PackedWeight | None:
    """Pack a weight for kernels of a device, for rows of a dtype; None if it cannot stay packed there."""
    packed = None if weight is None or isinstance(weight, Tensor) else weight.pack()
    return packed.in_groups(dtype) if packed is not None and device == "cuda" else packed


def _bias(module: Any, name: str, weights: Mapping[str, Tensor | StoredWeight]) -> Tensor | None:
    if (bias := weights.get(name)) is None:
        return None
    return (bias if isinstance(bias, Tensor) else bias.dense()).to(getattr(module, name).dtype, copy=True)
