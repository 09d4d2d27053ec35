"""Which targets can be run losslessly by their structure, and why the others cannot."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .. import ops
from .model import (
    UnsupportedTargetError,
    config_values,
    library,
    modules_of,
    name_of,
    tensors_of,
    text_config,
    transformers_version,
    unwrap,
)
from .packed import PackedEmbedding, PackedExperts, PackedLinear
from .parallel import ranks_in, refusal_of_ranks, shards
from .recurrent import has_recurrent_layers, refusal_of_recurrence
from .sparse import sparse_family

# Families whose states are known to need more than is kept here.
_UNSERVED = {
    **dict.fromkeys(
        ("jamba", "mamba", "falcon_mamba", "zamba"),
        "has Mamba-1 layers, which transformers runs over several rows without the state of the rows before",
    ),
    "recurrent_gemma": "has recurrent blocks whose state is in the module",
    "minimax": "has lightning attention, whose state is in a cache of its own and is masked in several rows at once",
    "zaya": "attends to keys that were convolved with earlier ones and to delayed values, by functions of its own",
    "inkling": "has four convolutions in a layer, with a state each",
}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# What models with recurrent layers call these, and their other ones.
_RECURRENT_LAYER_TYPES = _LAYER_TYPES | {"linear_attention", "mamba", "conv", "hybrid", "attention", "mlp", "moe"}


def check_target(model: nn.Module, *, loaded: bool = True, spread: bool = True) -> nn.Module:
    """Return the unwrapped model, or raise if it cannot be run. Called once, where a model enters the package.

    Args:
        model: the user's, perhaps inside ``torch.compile``.
        loaded: see `refusal`.
        spread: False to refuse a target that is spread over several processes.

    Raises:
        UnsupportedTargetError: the model cannot be run losslessly.
    """
    model = unwrap(model)
    if reason := refusal(model, loaded=loaded):
        raise UnsupportedTargetError(f"this target is not supported: {reason}")
    if not spread and (count := ranks_in(model)) > 1:
        raise UnsupportedTargetError(f"the whole target is needed in each process, this one is spread over {count}")
    return model


def refusal(model: nn.Module, *, loaded: bool = True) -> str | None:
    """Return why this target cannot be run, or None. Looks only at the structure and computes nothing.

    Args:
        model: the unwrapped model.
        loaded: False to ignore the weights, for a model on the meta device that will be loaded later.
    """
    if not isinstance(model, PreTrainedModel):
        advice = ": pass model.get_base_model(), which has the adapters" if hasattr(model, "get_base_model") else ""
        return f"a transformers PreTrainedModel is needed, got {type(model).__name__}{advice}"
    if getattr(model.config, "is_encoder_decoder", False):
        return f"{text_config(model).model_type} is an encoder-decoder"
    if model.get_output_embeddings() is None or not model.can_generate():
        return f"{type(model).__name__} has no language-model head"
    return (
        refusal_of_ranks(model)
        or refusal_of_weights(model, loaded, shards(model))
        or _refusal_of_quantization(model)
        or _refusal_of_storage(model)
        or _refusal_of_family(model)
        or _refusal_of_replacements(model)
    )


# ---------------------------------------------------------------------------------------------- weights


def refusal_of_weights(model: nn.Module, loaded: bool = True, shards: Mapping[int, Tensor] | None = None) -> str | None:
    """Return why a model's modules and tensors cannot be run, or None. Reads sizes and addresses only.

    Args:
        model: the target, or a drafter.
        loaded: False to accept weights on the meta device.
        shards: what to judge in place of tensors spread over processes, by their ``id``; others are refused.
    """
    modules = modules_of(model)
    for kind in dict.fromkeys(map(type, modules)):
        name = f"{kind.__module__}.{kind.__qualname__}"
        # torch's checkpointing wraps modules that are whole
        if name.startswith("torch.distributed.") and not name.startswith("torch.distributed.algorithms._checkpoint."):
            return f"it is sharded by torch.distributed ({name}): one process with all of the weights is needed"
        if name.startswith(("torch.ao.", "torch.nn.quantized")):
            return (
                f"{name} quantizes activations with one scale for all rows, so that a row's numbers depend on the rows "
                "next to it: use the model before quantization, or one whose weights alone are quantized"
            )
    for tensor in tensors_of(modules):
        judged = (shards or {}).get(id(tensor), tensor)
        if not (judged.is_meta and not loaded) and (reason := _refusal_of_tensor(judged)):
            return f"{name_of(model, tensor)} {reason}"
    return None


def _refusal_of_tensor(tensor: Tensor) -> str | None:
    """Return why a tensor's values cannot be read, or None."""
    kind = type(tensor)
    if tensor.is_meta:
        return "is on the meta device: it was never loaded, or it is offloaded"
    if kind.__module__.startswith(("torch.distributed.", "torch._subclasses.")):
        return f"is a {kind.__name__}: one process with plain tensors is needed"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"is not a dense tensor (it is {'quantized' if tensor.is_quantized else tensor.layout})"
    if is_traceable_wrapper_subclass(tensor):
        return None  # computes by itself, from tensors that it holds
    # Sharded parameters are flat while they are elsewhere; [0, n] is a layer of no rows.
    if tensor.numel() == 0 and tensor.dim() == 1 and isinstance(tensor, nn.Parameter):
        return f"is empty, {list(tensor.shape)}: its values are elsewhere (a shard, or offloaded)"
    if tensor.untyped_storage().nbytes() < ops.bytes_reached(tensor):
        return "has lost its memory: its storage was freed (FSDP, offload)"
    return None


def _refusal_of_storage(model: PreTrainedModel) -> str | None:
    """Judge devices and the dtype."""
    devices = {tensor.device for tensor in tensors_of(modules_of(model)) if isinstance(tensor, nn.Parameter)}
    if len(devices) > 1:
        return (
            f"its weights are spread over {', '.join(sorted(map(str, devices)))}: one device is needed, or one process "
            "per device (DistributedConfig(tp_size=N))"
        )
    packed = [x for x in modules_of(model) if isinstance(x, (PackedLinear, PackedEmbedding, PackedExperts))]
    for_cpu = [x for x in packed if ops.FORMATS[x.format].device == "cpu"]
    if places := {str(buffer.device) for x in for_cpu for buffer in x.buffers()} - {"cpu"}:
        return f"its packed weights are on {', '.join(sorted(places))}, and only CPUs read these: load it there"
    embedding = model.get_input_embeddings().weight
    if embedding.device.type == "cpu" and embedding.dtype not in (torch.float32, torch.bfloat16):
        return (
            f"its dtype is {embedding.dtype}, the CPU kernels take float32 and bfloat16: load it with "
            "dtype=torch.float32 (on the command line --dtype float32)"
        )
    return None


# ---------------------------------------------------------------------------------------------- quantized layers

# Layers of bitsandbytes, torchao, compressed-tensors and GPTQModel are recognized by names and attributes; none of them
# is imported. docs/quantized.md lists what runs.
_LIBRARIES = {"bitsandbytes", "compressed_tensors", "gptqmodel", "optimum", "torchao"}
# Of weights, and of masks and tables of ids
_UNQUANTIZED = {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool}


def is_quantized(model: nn.Module) -> bool:
    """Return True if a library has quantized weights of a model.

    Its modules and tensors tell. The config may still say so of weights that transformers has unpacked (GGUF).
    """
    modules = modules_of(model)
    if any(library(part) in _LIBRARIES for module in modules for part in (module, *module._parameters.values())):
        return True
    others = [module for module in modules if type(module) not in (PackedLinear, PackedExperts, PackedEmbedding)]
    has_scheme = any("quantization_scheme" in module.__dict__ for module in others)  # of compressed-tensors
    return has_scheme or any(x.dim() > 1 and x.dtype not in _UNQUANTIZED for x in tensors_of(others))


def _refusal_of_quantization(model: nn.Module) -> str | None:
    """Return why a model's quantized layers cannot be run losslessly, or None. Reads settings only."""
    for module in modules_of(model):
        if reason := _refusal_of_layer(module):
            return f"{next(name for name, part in model.named_modules() if part is module)} {reason}"
    return None


def _refusal_of_layer(module: nn.Module) -> str | None:
    if library(module) == "bitsandbytes":
        threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
        if not threshold:
            return None
        return (
            f"is an int8 layer of bitsandbytes with an outlier threshold of {threshold}: all rows decide together "
            "which columns are outliers, so that a row's numbers depend on the rows next to it: load the model with "
            "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)"
        )
    if library(module) == "compressed_tensors":
        return (
            "quantizes keys and values in a cache of compressed-tensors (kv_cache_scheme), which dflash replaces with "
            "its own: use the checkpoint without kv_cache_scheme"
        )
    setting = next(filter(None, map(_scale_for_all_rows, _activation_settings(module))), None)
    return setting and (
        f"quantizes activations with one scale for all rows ({setting}), so that a row's numbers depend on the rows "
        "next to it: use one scale per row, or a model whose weights alone are quantized"
    )


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
        is_packed = isinstance(module, (PackedLinear, PackedExperts)) and ops.FORMATS[module.format].row_group
        if is_packed or library(module) == "bitsandbytes" or next(_activation_settings(module), None) is not None:
            return True
    return False


# ---------------------------------------------------------------------------------------------- family


def _refusal_of_family(model: PreTrainedModel) -> str | None:
    config = text_config(model)
    family, layer_types = config.model_type, set().union(*config_values(config, "layer_types"))
    if reason := _UNSERVED.get(family.removesuffix("_text")):
        return f"{family} {reason}"
    # 1. Recurrent layers; a Qwen3.5, say, may be configured with attention only
    is_recurrent, is_stateful = has_recurrent_layers(model), getattr(model, "_is_stateful", False)
    if is_recurrent and (reason := refusal_of_recurrence(model)):
        return f"{family} has stateful layers: {reason}"
    may_have_attention_only = getattr(type(model), "_is_stateful", False) and layer_types
    sparse = sparse_family(model)
    is_known = is_recurrent or sparse is not None
    if is_stateful and not is_known and not (may_have_attention_only and layer_types <= _LAYER_TYPES):
        return f"{family} has stateful layers that dflash does not know, and cannot roll back"
    # 2. Attention
    known = _RECURRENT_LAYER_TYPES if is_recurrent else _LAYER_TYPES
    if sparse is not None:
        if transformers_version() < sparse.tried:
            least = ".".join(map(str, sparse.tried))
            return f"{family} was tried with transformers >= {least} only"
        known = sparse.layer_types
    elif config_values(config, "index_topk"):
        return f"{family} selects keys with an indexer: those of transformers >= 5.18 run"
    if unknown := layer_types - known:
        return f"{family} has layers of type {', '.join(sorted(unknown))}"
    if dynamic := _rope_types(config) & {"dynamic", "longrope"}:
        return f"its RoPE is {dynamic.pop()!r}: its frequencies depend on the longest position in the batch"
    if any(value not in (False, "vision") for value in config_values(config, "use_bidirectional_attention")):
        return f"{family} attends in both directions"
    # Most recurrent families do not say that they take one, and do.
    has_backend = getattr(model.get_decoder(), "_supports_attention_backend", False)
    if not (has_backend or is_recurrent or is_stateful):
        return f"{type(model).__name__} does not take an attention function by name (_supports_attention_backend)"
    return None


def _rope_types(config: Any) -> set[str]:
    given = config_values(config, "rope_parameters")
    nested = [value for parameters in given for value in parameters.values() if isinstance(value, dict)]
    return {entry.get("rope_type", "default") for entry in (nested or given)}


# ---------------------------------------------------------------------------------------------- replaced functions

_ACCELERATE = importlib.util.find_spec("accelerate")  # modeling files import functions of it
_TRUSTED = (
    *(os.path.dirname(path) + os.sep for path in (torch.__file__, transformers.__file__)),
    *(os.path.dirname(spec.origin) + os.sep for spec in (_ACCELERATE,) if spec is not None),
    *(module.__file__ for module in (contextlib, dataclasses, functools, typing)),
)


def _is_foreign(value: Any) -> bool:
    """Return True for a function that was not compiled from a file of torch or transformers, or a wrapper of one."""
    while value is not None:
        value = value.__func__ if isinstance(value, types.MethodType | staticmethod | classmethod) else value
        if not isinstance(value, types.FunctionType):
            return False
        if not value.__code__.co_filename.startswith(_TRUSTED):
            return True
        value = getattr(value, "__wrapped__", None)
    return False


def replaced_function(model: nn.Module) -> str:
    """Name a method or a function of a model's family that a library has replaced; an empty string if there is none.

    The trial run compares a few short rows. It would not see a patch that matters at long positions only, or that
    differs by less than 16-bit roundings; the layers run by the model's own modules then.
    """
    for kind in dict.fromkeys(map(type, modules_of(model))):
        for base in kind.__mro__:
            if base.__module__.startswith(("torch.nn.", "transformers.")) and base is not GenerationMixin:
                for name, value in vars(base).items():
                    if _is_foreign(value):
                        return f"{base.__name__}.{name}"
        if kind.__module__.startswith("transformers.models."):
            for name, value in vars(sys.modules[kind.__module__]).items():
                if _is_foreign(value):
                    return f"{kind.__module__}.{name}"
    return ""


def _refusal_of_replacements(model: PreTrainedModel) -> str | None:
    """Judge the attention function and the generation loop, whose work dflash does itself.

    A trial run has too few rows to see what an attention function does far back, and does not run the loop.
    """
    name = getattr(text_config(model), "_attn_implementation", None)
    functions = [ALL_ATTENTION_FUNCTIONS.get(name)]
    if name == "eager":  # each family has its own
        files = {type(module).__module__ for module in modules_of(model)}
        family = [sys.modules[file] for file in files if file.startswith("transformers.models.")]
        functions = [getattr(module, "eager_attention_forward", None) for module in family]
    if any(map(_is_foreign, functions)):
        return (
            f"its attention function {name!r} is not transformers' own, and dflash would run its own instead: choose "
            'one of transformers (set_attn_implementation("sdpa"))'
        )
    for name in ("prepare_inputs_for_generation", "_sample"):
        own = model.__dict__.get(name)
        bases = [base for base in type(model).__mro__ if base.__module__.startswith("transformers.")]
        is_replaced = any(_is_foreign(vars(base).get(name)) for base in bases)
        # peft leaves the class's own method in the instance; that is no replacement.
        if is_replaced or (own is not None and getattr(own, "__func__", own) is not getattr(type(model), name)):
            return f"{type(model).__name__}.{name} was replaced, which dflash would not run: undo the replacement"
    return None
