"""Which targets can be run, and why the others cannot."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

# Families whose twin is tested token for token against `generate`; any other is probed once, see `Target`.
TESTED_FAMILIES = frozenset(
    [
        *("deepseek_v3", "gemma3_text", "gemma4_text", "glm4_moe", "gpt_oss", "kimi_k25", "llama"),
        *("minimax_m2", "mistral", "qwen2", "qwen3", "qwen3_moe"),
    ]
)


class UnsupportedTargetError(ValueError):
    """The target cannot be run losslessly by this package; the message says why. A ``ValueError``."""


def text_config(model: nn.Module):
    """The configuration of the language model inside ``model``."""
    return model.config.get_text_config(decoder=True)


def _rope_types(config) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {entry.get("rope_type", "default") for entry in (nested or [parameters])}


def refusal(model: nn.Module, *, loaded: bool = True) -> str | None:
    """Why this target cannot be run, or None. Looks at the structure alone and computes nothing.

    ``loaded=False`` leaves out what is about the weights, so that a model built on the meta device can be asked before
    it is loaded.
    """
    if not isinstance(model, PreTrainedModel):
        return f"a transformers PreTrainedModel is needed, got {type(model).__name__}"
    config = text_config(model)
    family = config.model_type
    if getattr(model.config, "is_encoder_decoder", False):
        return f"{family} is an encoder-decoder"
    if model.get_output_embeddings() is None or not model.can_generate():
        return f"{type(model).__name__} has no language-model head"
    devices = {parameter.device for parameter in model.parameters()}
    if loaded and any(device.type == "meta" for device in devices):
        return "some of its weights are on the meta device: they were never loaded"
    if len(devices) > 1:
        return f"its weights are spread over {', '.join(sorted(map(str, devices)))}: one device is needed"
    embedding = model.get_input_embeddings().weight
    if embedding.device.type == "cpu" and embedding.dtype not in (torch.float32, torch.bfloat16):
        return f"its dtype is {embedding.dtype}, the CPU kernels take float32 and bfloat16"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if getattr(model, "_is_stateful", False) or any("linear" in kind or "mamba" in kind for kind in layer_types):
        return f"{family} has stateful layers (linear attention, convolution): no counter can roll them back"
    if getattr(config, "index_topk", None) is not None:
        return f"{family} selects keys with a sparse-attention indexer"
    if unknown := layer_types - {"full_attention", "sliding_attention"}:
        return f"{family} has layers of type {', '.join(sorted(unknown))}"
    if bad := _rope_types(config) & {"dynamic", "longrope"}:
        return f"its RoPE is {bad.pop()!r}: its frequencies depend on the longest position in the batch"
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return f"{family} attends in both directions"
    if not getattr(model.get_decoder(), "_supports_attention_backend", False):
        return f"{type(model).__name__} does not take an attention function by name (_supports_attention_backend)"
    return None


def decoder_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise UnsupportedTargetError(f"{type(model).__name__}: no list of {num_layers} decoder layers was found")
