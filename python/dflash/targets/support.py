"""Which targets can be run losslessly by their structure, and why the others cannot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .functions import functions_of, own_loop_method
from .parallel import ranks_in, refusal_of_ranks, shards
from .quantized import refusal_of_quantization
from .recurrent import has_recurrent_layers, refusal_of_recurrence
from .weights import modules_of, refusal_of_weights, repeated_modules, tensors_of

__all__ = [
    "TESTED_FAMILIES",
    "UnsupportedTargetError",
    "check_target",
    "find_layers",
    "refusal",
    "tapped_modules",
    "text_config",
    "unwrap",
]

# Families tested token for token against `generate`. Any other is tried once, see `dflash.targets.trial`.
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
    return reason or _refusal_of_family(model) or _refusal_of_parts(model)


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


def _refusal_of_parts(model: PreTrainedModel) -> str | None:
    """Judge what this package replaces with its own: attention, masks, the cache and the loop around them."""
    if replaced := functions_of(model).bypassed or own_loop_method(model):
        return (
            f"{replaced} is not transformers' own function, and dflash runs its own attention, masks, cache and loop "
            'instead: undo the replacement, or choose a function of transformers (set_attn_implementation("sdpa"))'
        )
    decoder, indices = model.get_decoder(), set()
    layers = getattr(decoder, "layers", ())
    if len(set(map(id, layers))) < len(layers):
        return "one of its layers is in the list of layers twice: both would share their keys and values"
    repeated = repeated_modules(decoder)
    for module in modules_of(decoder):
        attributes = module.__dict__
        index = attributes.get("layer_idx")
        if index is None or "is_causal" not in attributes:  # not attention
            continue
        reason = _refusal_of_attention(module, decoder.config, index, is_repeated=id(module) in repeated)
        if (type(module), index) in indices:
            reason = f"has the layer_idx of another layer, {index}: they would share their keys and values"
        if reason:
            return f"{next(name for name, part in decoder.named_modules() if part is module)} {reason}"
        indices.add((type(module), index))
    return None


def _refusal_of_attention(module: nn.Module, config: Any, index: int, *, is_repeated: bool) -> str | None:
    if module.is_causal is False:
        return "does not attend causally (is_causal is False)"
    if config.model_type not in TESTED_FAMILIES or index >= config.num_hidden_layers or not hasattr(module, "config"):
        return None  # the trial run judges it
    if is_repeated:
        return "is in several layers: they would share their keys and values"
    # transformers masks by the model's config; our attention takes the window that a module was made with.
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    masked = window if not types or types[index] == "sliding_attention" else None
    own = module.__dict__.get("sliding_window", getattr(module.config, "sliding_window", None))
    if masked != own:
        return (
            f"attends over a window of {own}, its model's config masks by a window of {masked}: "
            "make a new model from the config"
        )
    return None


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {entry.get("rope_type", "default") for entry in (nested or [parameters])}


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
