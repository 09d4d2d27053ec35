"""Readers of a transformers model: its config, modules, tensors and generation defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from ..ops import Weight
from ..settings import SETTINGS

PLAIN_TENSORS = frozenset([Tensor, nn.Parameter])  # types whose values are in their memory as they are
KERNEL_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}
"""The dtypes that our kernels multiply in."""


class UnsupportedTargetError(ValueError):
    """The target cannot be run losslessly by this package; the message says why."""


def transformers_version() -> tuple[int, int]:
    """Return the major and minor version of the imported transformers."""
    major, minor, *_ = transformers.__version__.split(".")
    return int(major), int(minor)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile(model)``, or ``model`` itself."""
    return getattr(model, "_orig_mod", model)


def embedding_table(model: nn.Module) -> Tensor:
    """Return the model's input embeddings, ``[vocab, hidden]``, without any scale."""
    return model.get_input_embeddings().weight


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the language model inside ``model``."""
    return model.config.get_text_config(decoder=True)


def logit_scale(model: nn.Module) -> tuple[float, float]:
    """Return what a family does to its head's output: the factor, and the softcap after it (0 for none)."""
    config = text_config(model)
    factors = (getattr(config, name, None) for name in ("logit_scale", "lm_head_multiplier"))
    factor = next((value for value in factors if value is not None), None)
    if factor is None:
        factor = 1 / (getattr(config, "logits_scaling", None) or 1.0)
    return float(factor), float(getattr(config, "final_logit_softcapping", None) or 0.0)


def config_values(config: Any, key: str) -> list[Any]:
    """Return what a config has under a key, without None: one value, or one per layer if layers differ.

    transformers raises if a key that differs from layer to layer (``per_layer_config``) is read of the whole config.
    """
    values: list[Any] = []
    for each in config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]:
        if (value := getattr(each, key, None)) is not None:
            values.append(value)
    return values


def max_positions(model: nn.Module) -> int | None:
    """Return the model's ``max_position_embeddings``, if it has such a limit."""
    return min(config_values(text_config(model), "max_position_embeddings"), default=None)


def cache_argument(model: nn.Module) -> str:
    """Return what the forward pass calls its cache: ``cache`` from transformers 5.24 on, ``past_key_values`` before."""
    theirs, before = ("cache", "past_key_values") if transformers_version() >= (5, 24) else ("past_key_values", "cache")
    names = inspect.signature(model.forward).parameters
    return before if before in names and theirs not in names else theirs


# ---------------------------------------------------------------------------------------------- modules


def weight_of(linear: nn.Module) -> Weight:
    """Return what a linear layer multiplies by."""
    return getattr(linear, "packed", None) or linear.weight


def modules_of_text(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of the decoder and the head with their names: no vision tower, for example."""
    inside = {module for part in (model.get_decoder(), model.get_output_embeddings()) for module in part.modules()}
    return (named for named in model.named_modules() if named[1] in inside)


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return what ``modules()`` does, in another order, in a third of the time."""
    found, seen = [model], {id(model)}
    for module in found:  # grows while it is read
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def find_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of decoder layers. Raises UnsupportedTargetError if none is as long as the config says."""
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


# Most, nemotron_h, bamba and falcon_h1, lfm2, qwen4_exp
_FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm", "hyper_connection_mixer")


def tapped_modules(model: PreTrainedModel, layer_ids: tuple[int, ...]) -> list[nn.Module]:
    """Return the modules whose outputs are the taps: decoder layers, and the final norm in place of the last layer."""
    if not layer_ids:
        return []
    modules = list(find_layers(model))
    if len(modules) - 1 in layer_ids:
        decoder = model.get_decoder()
        modules[-1] = next((getattr(decoder, name) for name in _FINAL_NORMS if hasattr(decoder, name)), None)
        if modules[-1] is None:
            raise UnsupportedTargetError(f"{type(model).__name__}: the last layer is tapped, but no norm follows it")
    return [modules[layer_id] for layer_id in layer_ids]


def tap_(model: PreTrainedModel, layer_ids: tuple[int, ...]) -> list[Tensor | None]:
    """Return a list into which each forward pass puts the taps; hooks do, which hold no more than this list."""
    modules = tapped_modules(model, layer_ids)
    taps: list[Tensor | None] = [None] * len(modules)
    for index, module in enumerate(modules):
        module.register_forward_hook(_tap_hook(taps, index, text_config(model).hidden_size))
    return taps


def _tap_hook(taps: list[Tensor | None], index: int, hidden_size: int) -> Callable[..., None]:
    """Return a hook that puts the features ``[batch, rows, hidden]`` of a module's output into ``taps[index]``.

    Of hyper-connections these are the mean of the streams, as SGLang takes them (pull request 36708).
    """

    def store(_module: nn.Module, _arguments: tuple, output: Any) -> None:
        tap: Tensor = output[0] if isinstance(output, tuple) else output
        streams = tap.flatten(2).unflatten(-1, (-1, hidden_size))
        taps[index] = tap if tap.shape[2:] == (hidden_size,) else streams.mean(2)

    return store


def library(value: object) -> str:
    """Return the top-level package of a value's class."""
    return type(value).__module__.partition(".")[0]


def has_global_hooks() -> bool:
    """Return True if torch has hooks on the forward pass of every module."""
    return bool(torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


def first_hook(model: nn.Module) -> str:
    """Return the name of the first module with a forward hook of the user's, or an empty string."""
    if has_global_hooks():
        return "all modules (torch.nn.modules.module.register_module_forward_hook)"
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            # transformers' own hooks collect hidden states and attentions; they are idle here.
            if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                return name or type(model).__name__
    return ""


# ---------------------------------------------------------------------------------------------- tensors


def tensors_of(modules: list[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of these modules; a shared one may come twice."""
    tensors: list[Tensor | None] = []
    for module in modules:
        tensors += module._parameters.values()
        tensors += module._buffers.values()
    return [tensor for tensor in tensors if tensor is not None]


def name_of(model: nn.Module, tensor: Tensor) -> str:
    """Return the name of a parameter or buffer of a model."""
    named: Iterator[tuple[str, Tensor]] = chain(model.named_parameters(), model.named_buffers())
    return next(name for name, found in named if found is tensor)


def shard_of(tensor: Tensor) -> Tensor | None:
    """Return this process's part of a tensor that torch.distributed spreads (a DTensor); None for any other."""
    kind = type(tensor)
    if kind in PLAIN_TENSORS or not kind.__module__.startswith("torch.distributed."):
        return None
    return getattr(tensor, "_local_tensor", None)


# ---------------------------------------------------------------------------------------------- generation defaults

# What is read of a generation_config: settings, by our names, and what decides how they count.
_READ = {name: row.config for name, row in SETTINGS.items() if row.config}
_READ |= {name: name for name in ("do_sample", "max_length", "pad_token_id")}
# Settings that would change the text or the output and are not applied here, and the values that turn them off.
_UNSUPPORTED: dict[str, tuple] = {
    **dict.fromkeys(("max_time", "penalty_alpha", "top_h", "dola_layers", "constraints", "force_words_ids"), (None,)),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), (None,)),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p", "guidance_scale"), (None, 1.0)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "encoder_no_repeat_ngram_size"), (None, 0)),
    **dict.fromkeys(("token_healing", "remove_invalid_values"), (None, False)),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), (None, False)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "speculation_type", "prefill_chunk_size"), (None,)),
    **{"num_beams": (None, 1), "num_beam_groups": (None, 1), "diversity_penalty": (None, 0.0)},
    "use_mtp": (None, False),
    "renormalize_logits": (None, False, True),  # a constant added to all logits changes no choice
}


def generation_defaults(model: nn.Module) -> dict[str, Any]:
    """Return what ``model.generation_config`` gives for the settings of a call, by our names; None if unset.

    ``do_sample``, ``max_length`` and ``pad_token_id`` are added. ``unsupported`` maps every setting that is not
    applied here, and that is on, to its value.
    """
    config = model.generation_config
    vocab, eos = embedding_table(model).shape[0], config.eos_token_id
    eos = [] if eos is None else [eos] if isinstance(eos, int) else eos
    found = {name: getattr(config, key, None) for name, key in _READ.items()}
    if (pairs := found["logit_bias"]) is not None:  # a dict of tuples, or a list of pairs
        pairs = pairs.items() if isinstance(pairs, dict) else pairs
        found["logit_bias"] = {tuple(sequence): bias for sequence, bias in pairs}
    unsupported = {
        name: value
        for name, off in _UNSUPPORTED.items()
        if (value := getattr(config, name, None)) not in (*off, [], (), {})
    }
    if getattr(config, "cache_implementation", None) == "quantized":  # all others hold the same numbers
        unsupported["cache_implementation"] = "quantized"
    return {
        **found,
        "stop_token_ids": [token for token in eos if 0 <= token < vocab],  # ids past the vocabulary are never emitted
        "unsupported": unsupported,
    }
