"""Quantized layers of other libraries: which ones let rows meet, what they make late, and what a copy shares with them.

bitsandbytes, torchao, compressed-tensors and GPTQModel are recognized by names and attributes and never imported.
docs/quantized.md lists what runs.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .model import modules_of

_LIBRARIES = {"bitsandbytes", "compressed_tensors", "gptqmodel", "optimum", "torchao"}


def is_quantized(model: nn.Module) -> bool:
    """Return True if a library has quantized weights of a model."""
    if getattr(model.config, "quantization_config", None) is not None:
        return True
    modules = modules_of(model)
    return any(_library(part) in _LIBRARIES for module in modules for part in (module, *module._parameters.values()))


def refusal_of_quantization(model: nn.Module) -> str | None:
    """Return why a model's quantized layers cannot be run losslessly, or None. Reads settings only."""
    for module in modules_of(model):
        if reason := _refusal_of_layer(module):
            return f"{next(name for name, part in model.named_modules() if part is module)} {reason}"
    return None


def _refusal_of_layer(module: nn.Module) -> str | None:
    if _library(module) == "bitsandbytes":
        threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
        return _OUTLIERS.format(threshold=threshold) if threshold else None
    if _library(module) == "compressed_tensors":
        return (
            "quantizes keys and values in a cache of compressed-tensors (kv_cache_scheme), which dflash replaces with "
            "its own: use the checkpoint without kv_cache_scheme"
        )
    setting = next(filter(None, map(_scale_for_all_rows, _activation_settings(module))), None)
    return setting and _ONE_SCALE.format(setting=setting)


_OUTLIERS = (
    "is an int8 layer of bitsandbytes with an outlier threshold of {threshold}: all rows decide together which columns "
    "are outliers, so that a row's numbers depend on the rows next to it: load the model with "
    "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
)
_ONE_SCALE = (
    "quantizes activations with one scale for all rows ({setting}), so that a row's numbers depend on the rows next to "
    "it: use one scale per row, or a model whose weights alone are quantized"
)


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _activation_settings(module: nn.Module) -> Iterator[Any]:
    """Yield how a layer quantizes activations. compressed-tensors keeps it in the module, torchao in the weight."""
    scheme = module.__dict__.get("quantization_scheme")
    for name in ("input_activations", "output_activations"):
        if (arguments := getattr(scheme, name, None)) is not None:
            yield arguments
    for parameter in module._parameters.values():
        is_static = any(getattr(parameter, name, None) is not None for name in _STATIC_SCALES)
        for name in ("act_quant_kwargs", "activation_quantization"):
            if not is_static and (arguments := getattr(parameter, name, None)) is not None:
                yield arguments


_STATIC_SCALES = ("act_quant_scale", "act_per_tensor_scale")  # from calibration: the same for every input


def _scale_for_all_rows(arguments: Any) -> str:
    """Return the setting that asks for one scale for all rows of a pass, or an empty string."""
    if type(getattr(arguments, "granularity", None)).__name__ == "PerTensor":
        return "torchao, PerTensor()"
    if getattr(arguments, "use_dynamic_per_tensor_scale", False):
        return "torchao, use_dynamic_per_tensor_scale"
    if getattr(arguments, "dynamic", None) is True and getattr(arguments, "strategy", None) == "tensor":
        return 'compressed-tensors, strategy "tensor", dynamic'
    return ""


def rounds_activations(model: nn.Module) -> bool:
    """Return True if layers round their inputs to few bits, which turns a last-bit difference into a visible one."""
    for module in modules_of(model):
        if _library(module) == "bitsandbytes" or next(_activation_settings(module), None) is not None:
            return True
    return False


def shared_states(model: nn.Module) -> Iterator[Any]:
    """Yield the objects of bitsandbytes that a copy must share with the model, because it shares the parameters.

    A layer's first pass moves tensors from the parameter into the state of the layer (``CB``), or replaces both the
    parameter's values and tensors of its ``quant_state``. With states of their own, the layer that runs second would
    have lost its scales.
    """
    for module in modules_of(model):
        if _library(module) == "bitsandbytes":
            yield from (value for value in module.__dict__.values() if _library(value) == "bitsandbytes")


@torch.no_grad()
def finish_loading(model: nn.Module) -> None:
    """Have compressed-tensors decompress and GPTQModel pack now, not at the first pass, so that a copy shares it."""
    with torch.inference_mode(False):
        handle = model.__dict__.get("ct_decompress_hook")
        hook = model._forward_pre_hooks.get(getattr(handle, "id", None))
        if hook is not None:
            hook(model, ())
        for module in modules_of(model):
            is_pending = _library(module) == "gptqmodel" and getattr(module, "linear_mode", "") is None
            if is_pending and not module.training:
                row = torch.zeros(1, module.in_features, dtype=model.dtype, device=module.scales.device)
                type(module).forward(module, row)


def forward_before_dispatch(module: nn.Module) -> types.MethodType | None:
    """Return the class's forward below one of compressed-tensors that only moves inputs; None for other forwards."""
    inside = module.__dict__.get("_original_forward_func")
    is_own = inside is not None and inside is getattr(type(module), "forward", None)
    return types.MethodType(inside, module) if is_own else None
