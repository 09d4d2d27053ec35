"""Which targets can be run losslessly by their structure, and why the others cannot."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
import types
import typing
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .generation_config import transformers_version
from .parallel import ranks_in, refusal_of_ranks, shards
from .quantized import refusal_of_quantization
from .recurrent import has_recurrent_layers, refusal_of_recurrence
from .weights import modules_of, refusal_of_weights, tensors_of

__all__ = [
    "UnsupportedTargetError",
    "check_target",
    "find_layers",
    "first_hook",
    "global_hooks",
    "refusal",
    "replaced_function",
    "tapped_modules",
    "text_config",
    "unwrap",
]

# Families that are recurrent by their class, and may be configured with attention only.
TESTED_FAMILIES = frozenset(
    [
        *("deepseek_v3", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_oss", "kimi_k25", "llama"),
        *("minimax_m2", "mistral", "qwen2", "qwen3", "qwen3_moe"),
        *("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear"),
        *("bailing_hybrid", "nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "lfm2", "lfm2_moe"),
    ]
)
# Families whose states are known to need more than is kept here.
_UNSERVED = {
    "jamba": "has Mamba-1 layers, which transformers runs over several rows without the state of the rows before",
    "minimax": "has lightning attention, whose state is in a cache of its own and is masked in several rows at once",
    "zaya": "attends to keys that were convolved with earlier ones and to delayed values, by functions of its own",
    "inkling": "has four convolutions in a layer, with a state each",
    "qwen4_exp": "selects keys with an indexer",
    "glm5_next": "selects keys with an indexer",
    "deepseek_v4": "attends to compressed blocks of keys, which a rejected row would be part of",
}
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_RECURRENT_LAYER_TYPES = {
    *("linear_attention", "mamba", "conv", "hybrid"),
    *("attention", "mlp", "moe"),  # what models with these call their other layers
}


class UnsupportedTargetError(ValueError):
    """The target cannot be run losslessly by this package; the message says why."""


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile(model)``, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)


def embedding_table(model: nn.Module) -> Tensor:
    """Return the model's input embeddings, ``[vocab, hidden]``, without any scale."""
    return model.get_input_embeddings().weight


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the language model inside ``model``."""
    return model.config.get_text_config(decoder=True)


def max_positions(model: nn.Module) -> int | None:
    """Return the model's ``max_position_embeddings``, if it has such a limit."""
    return getattr(text_config(model), "max_position_embeddings", None)


def cache_argument(model: nn.Module) -> str:
    """Return what the forward pass calls its cache: ``cache`` from transformers 5.24 on, ``past_key_values`` before."""
    theirs, before = ("cache", "past_key_values") if transformers_version() >= (5, 24) else ("past_key_values", "cache")
    names = inspect.signature(model.forward).parameters
    return before if before in names and theirs not in names else theirs


# ---------------------------------------------------------------------------------------------- judging by structure


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
        return f"a transformers PreTrainedModel is needed, got {type(model).__name__}"
    if getattr(model.config, "is_encoder_decoder", False):
        return f"{text_config(model).model_type} is an encoder-decoder"
    if model.get_output_embeddings() is None or not model.can_generate():
        return f"{type(model).__name__} has no language-model head"
    reason = refusal_of_ranks(model) or _refusal_of_weights(model, loaded)
    return reason or _refusal_of_family(model) or _refusal_of_attention(model) or _refusal_of_loop(model)


def _refusal_of_weights(model: PreTrainedModel, loaded: bool) -> str | None:
    if reason := refusal_of_weights(model, loaded, shards(model)) or refusal_of_quantization(model):
        return reason
    devices = {tensor.device for tensor in tensors_of(modules_of(model)) if isinstance(tensor, nn.Parameter)}
    if len(devices) > 1:
        return (
            f"its weights are spread over {', '.join(sorted(map(str, devices)))}: one device is needed, or one process "
            "per device (DistributedConfig(tp_size=N))"
        )
    embedding = model.get_input_embeddings().weight
    if embedding.device.type == "cpu" and embedding.dtype not in (torch.float32, torch.bfloat16):
        return f"its dtype is {embedding.dtype}, the CPU kernels take float32 and bfloat16"
    return None


def _refusal_of_family(model: PreTrainedModel) -> str | None:
    config = text_config(model)
    family, layer_types = config.model_type, set(getattr(config, "layer_types", None) or ())
    if reason := _UNSERVED.get(family.removesuffix("_text")):
        return f"{family} {reason}"
    is_recurrent = has_recurrent_layers(model)
    if is_recurrent and (reason := refusal_of_recurrence(model)):
        return f"{family} has stateful layers: {reason}"
    may_be_recurrent = is_recurrent or getattr(model, "_is_stateful", False)
    # A Qwen3.5, say, may be configured with attention only.
    is_known = family in TESTED_FAMILIES and getattr(type(model), "_is_stateful", False)
    has_attention_only = is_known and layer_types and layer_types <= _LAYER_TYPES
    if may_be_recurrent and not is_recurrent and not has_attention_only:
        return f"{family} has stateful layers that dflash does not know, and cannot roll back"
    if getattr(config, "index_topk", None) is not None:
        return f"{family} selects keys with a sparse-attention indexer"
    if unknown := layer_types - (_LAYER_TYPES | _RECURRENT_LAYER_TYPES if is_recurrent else _LAYER_TYPES):
        return f"{family} has layers of type {', '.join(sorted(unknown))}"
    if dynamic := _rope_types(config) & {"dynamic", "longrope"}:
        return f"its RoPE is {dynamic.pop()!r}: its frequencies depend on the longest position in the batch"
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return f"{family} attends in both directions"
    # Most recurrent families do not say that they take one, and do.
    if not may_be_recurrent and not getattr(model.get_decoder(), "_supports_attention_backend", False):
        return f"{type(model).__name__} does not take an attention function by name (_supports_attention_backend)"
    return None


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {entry.get("rope_type", "default") for entry in (nested or [parameters])}


# ---------------------------------------------------------------------------------------------- patches and hooks

_ACCELERATE = importlib.util.find_spec("accelerate")  # modeling files import functions of it
_TRUSTED = (
    *(os.path.dirname(path) + os.sep for path in (torch.__file__, transformers.__file__)),
    *(os.path.dirname(spec.origin) + os.sep for spec in (_ACCELERATE,) if spec is not None),
    *(module.__file__ for module in (contextlib, dataclasses, functools, typing)),
)
_LOOP = ("prepare_inputs_for_generation", "_sample")


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


def _refusal_of_attention(model: PreTrainedModel) -> str | None:
    """Judge the attention function, which ours replaces. A trial run has too few rows to see what it does far back."""
    name = getattr(text_config(model), "_attn_implementation", None)
    if name in ALL_ATTENTION_FUNCTIONS and _is_foreign(ALL_ATTENTION_FUNCTIONS[name]):
        return (
            f"its attention function {name!r} is not transformers' own, and dflash would run its own instead: choose "
            'one of transformers (set_attn_implementation("sdpa"))'
        )
    return None


def _refusal_of_loop(model: PreTrainedModel) -> str | None:
    """Judge the methods of transformers' generation loop, whose work dflash does itself and no trial run sees."""
    for name in _LOOP:
        own = model.__dict__.get(name)
        bases = [base for base in type(model).__mro__ if base.__module__.startswith("transformers.")]
        is_replaced = any(_is_foreign(vars(base).get(name)) for base in bases)
        # peft leaves the class's own method in the instance; that is no replacement.
        if is_replaced or (own is not None and getattr(own, "__func__", own) is not getattr(type(model), name)):
            return f"{type(model).__name__}.{name} was replaced, which dflash would not run: undo the replacement"
    return None


def global_hooks() -> tuple:
    """Return torch's hooks on the forward pass of every module."""
    hooks = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return tuple(hook for registered in hooks for hook in registered.values())


def first_hook(model: nn.Module) -> str:
    """Return the name of the first module with a forward hook of the user's, or an empty string."""
    if global_hooks():
        return "all modules (torch.nn.modules.module.register_module_forward_hook)"
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            # transformers' own hooks collect hidden states and attentions; they are idle here.
            if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                return name or type(model).__name__
    return ""


# ---------------------------------------------------------------------------------------------- finding modules


def find_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of decoder layers.

    Raises:
        UnsupportedTargetError: there is none with as many layers as the config says.
    """
    num_layers = text_config(model).num_hidden_layers
    decoder = model.get_decoder()
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    # A config may ask for fewer layers than there are; transformers then runs the first ones.
    layers = getattr(decoder, "layers", None)
    if isinstance(layers, nn.ModuleList) and 0 < num_layers < len(layers):
        return layers[:num_layers]
    raise UnsupportedTargetError(f"{type(model).__name__}: no list of {num_layers} decoder layers was found")


_FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm")  # most, nemotron_h, bamba and falcon_h1, lfm2


def tapped_modules(model: PreTrainedModel, layer_ids: tuple[int, ...]) -> list[nn.Module]:
    """Return the modules whose outputs are the taps: decoder layers, and the final norm in place of the last layer.

    Raises:
        UnsupportedTargetError: a module was not found.
    """
    if not layer_ids:
        return []
    modules = list(find_layers(model))
    if len(modules) - 1 in layer_ids:
        decoder = model.get_decoder()
        modules[-1] = next((getattr(decoder, name) for name in _FINAL_NORMS if hasattr(decoder, name)), None)
        if modules[-1] is None:
            raise UnsupportedTargetError(
                f"{type(model).__name__}: the last layer is tapped, but no final norm was found"
            )
    return [modules[layer_id] for layer_id in layer_ids]
