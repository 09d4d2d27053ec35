"""The layouts of a drafter's ``config.json``: the published one, that of the ``speculators`` library, and Muse's.

Muse Glimmer's assistant has every key at the top level, and leaves the multiplier and the softcap of its logits to the
target. Tensors have the same names in the other two. The speculators layout keeps the transformer's own keys in
``transformer_layer_config`` and counts taps from the embedding: ``aux_hidden_state_layer_ids`` is the tapped layer + 1.
It has three types of drafters: dflash, dflash2 and dspark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..limits import MAX_DRAFT_LAYERS, MAX_TAPS, MAX_TARGET_LAYERS
from ..terminal import shortened
from .keys import DFLASH2_KEYS, DSPARK_ARCHITECTURE

if TYPE_CHECKING:
    from .config import DraftConfig

__all__ = [
    "from_muse_assistant",
    "from_speculators",
    "is_muse_assistant",
    "is_speculators",
    "to_speculators",
    "vllm_causality",
]

# A transformer_layer_config may leave out what is the default of a Qwen3 config.
_QWEN3_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
# What transformers' MuseGlimmerAssistantConfig takes where a key is missing.
_MUSE_DEFAULTS = {
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "max_position_embeddings": 131072,
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
_DFLASH_DEFAULTS = {"block_size": 8, "sample_from_anchor": False, "sliding_window_non_causal": False}
# What the speculators library takes where a key is missing, by ``speculators_model_type``.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "dflash": _DFLASH_DEFAULTS,
    "dflash2": _DFLASH_DEFAULTS
    | {"sliding_window_non_causal": True}
    | dict(zip(DFLASH2_KEYS, (2, 16, 256, 16), strict=True)),
    "dspark": _DFLASH_DEFAULTS | {"sample_from_anchor": True, "markov_rank": 256, "markov_head_type": "vanilla"},
}
# Keys of the published layout that are copied into transformer_layer_config.
_LAYER_KEYS = (
    *("attention_bias", "attention_dropout", "head_dim", "hidden_act", "hidden_size", "initializer_range"),
    *("intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "num_target_layers", "original_max_position_embeddings", "rms_norm_eps"),
    *("rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "use_cache", "vocab_size"),
)
# Other top-level keys that are read, or that do not affect the forward pass.
_KNOWN_KEYS = frozenset(
    (
        *(key for defaults in _DEFAULTS.values() for key in defaults),
        *("architectures", "auf", "auto_map", "aux_hidden_state_layer_ids", "base_model_ep_plan", "block_size"),
        *("confidence_head_with_markov", "enable_confidence_head"),
        *("draft_vocab_size", "dtype", "emb_dim", "gru_hidden_dim", "has_no_defaults_at_init"),
        *("lambda_base_decay_ratio", "lambda_base_start", "mask_token_id", "model_type", "projector_type"),
        *("pure_draft_prefix_len", "shift_label"),
        *("speculators_config", "speculators_model_type", "speculators_version", "target_hidden_size"),
        *("tie_word_embeddings", "torch_dtype", "transformer_layer_config", "transformers_version"),
    )
)


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Return True if a parsed ``config.json`` is in the speculators layout."""
    return any(config.get(key) is not None for key in ("speculators_model_type", "transformer_layer_config"))


def is_muse_assistant(config: Mapping[str, Any]) -> bool:
    """Return True if a parsed ``config.json`` is that of a Muse Glimmer assistant of the first generation."""
    return "MuseGlimmerAssistantModel" in (config.get("architectures") or ())


def from_muse_assistant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published form of a Muse Glimmer assistant's config. No layer of it is causal."""
    given = {key: value for key, value in config.items() if value is not None}
    out = {**_MUSE_DEFAULTS, **given, "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "is_causal": False}
    if type(out["sliding_window"]) is int:
        out["sliding_window"] += 1  # transformers' bidirectional windows do not count the query's own position
    if type(out["num_hidden_layers"]) is int:
        out.setdefault("layer_types", ["sliding_attention"] * min(out["num_hidden_layers"], MAX_DRAFT_LAYERS))
    return out


def from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published form of a config in the speculators layout.

    Raises:
        ValueError: its type is another, or something that a drafter needs is missing.
    """
    kind, layer, taps = _read_type(config)
    settings = {key: value if config.get(key) is None else config[key] for key, value in _DEFAULTS[kind].items()}
    dflash: dict[str, Any] = {"target_layer_ids": [tap - 1 for tap in taps]}
    dflash |= {key: settings.pop(key) for key in DFLASH2_KEYS if key in settings}
    for key in ("mask_token_id", "projector_type"):
        if config.get(key) is not None:
            dflash[key] = config[key]
    if settings.pop("sliding_window_non_causal"):
        dflash["causal"] = False  # otherwise the rule of the published layout: sliding layers are causal, full ones not
    architecture = "DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"
    if kind != "dflash2" and settings["sample_from_anchor"]:
        architecture = DSPARK_ARCHITECTURE  # the class that does so, with a Markov head or without
        settings |= {key: dflash[key] for key in ("mask_token_id", "target_layer_ids") if key in dflash}
    elif kind == "dflash":
        settings.pop("sample_from_anchor")  # the published layout has no such key
    unknown = {key: value for key, value in config.items() if key not in _KNOWN_KEYS}  # DraftConfig judges these
    out = {**_QWEN3_DEFAULTS, **unknown, **layer, "architectures": [architecture], "model_type": "qwen3"}
    out |= settings | {"dflash_config": dflash}
    for key in ("draft_vocab_size", "target_hidden_size", "dtype"):
        if config.get(key) is not None:
            out[key] = config[key]
    return out


def _read_type(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], Sequence[int]]:
    """Return the type, the transformer's keys and the taps, counted from 1. Raise if one of them cannot be read."""
    kind, layer = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise ValueError(f"speculators_model_type must be dflash, dflash2 or dspark, got {shortened(kind)}")
    if not isinstance(layer, Mapping):
        raise ValueError(f"transformer_layer_config must be an object, got {shortened(layer)}")
    for key in ("sample_from_anchor", "shift_label", "sliding_window_non_causal"):
        if config.get(key) is not None and not isinstance(config[key], bool):
            raise ValueError(f"{key} must be true or false, got {shortened(config[key])}")
    if config.get("shift_label"):
        raise ValueError("shift_label = True is not supported: other block layouts are not implemented")
    taps = config.get("aux_hidden_state_layer_ids")
    if not isinstance(taps, (list, tuple)) or not taps or not all(type(tap) is int and tap > 0 for tap in taps):
        raise ValueError(f"aux_hidden_state_layer_ids must be a list of layers, counted from 1, got {shortened(taps)}")
    if max(taps) > MAX_TARGET_LAYERS or len(taps) > MAX_TAPS:
        raise ValueError(
            f"aux_hidden_state_layer_ids must name at most {MAX_TAPS} layers up to {MAX_TARGET_LAYERS}, "
            f"got {shortened(taps)}"
        )
    return kind, layer, taps


def to_speculators(
    published: Mapping[str, Any], config: DraftConfig, target: str, target_architectures: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the speculators form of a published config.

    Args:
        published: the parsed ``config.json``.
        config: the `dflash.DraftConfig` read from it.
        target: name of the target, for engines that are started with the drafter only.
        target_architectures: ``architectures`` of the target's config.

    Raises:
        ValueError: the layout, or vLLM's reader of it, cannot express something that changes the math.
    """
    _expect_expressible(config)
    kind, architecture, settings = _type_of(config)
    method = {"proposal_type": "greedy", "speculative_tokens": max(config.block_size - 1, 1)}
    method |= {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    out = {
        "architectures": [architecture],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.rows_per_pass,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not any(config.causal),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": list(target_architectures), "name_or_path": target},
        },
        "speculators_model_type": kind,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(published, config),
    } | settings
    _expect_same_causality(out, config)
    return out


def vllm_causality(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return which layers of a checkpoint in the speculators layout vLLM 0.33 runs causally.

    Its order: ``is_causal`` of ``transformer_layer_config``; ``sliding_window_non_causal``, which it does not read for
    the type dspark; else sliding layers are causal.
    """
    layer = config["transformer_layer_config"]
    rule = layer.get("is_causal")
    if rule is None and config["speculators_model_type"] != "dspark":
        rule = not config.get("sliding_window_non_causal", True)  # so a key that is null means causal
    if rule is not None:
        return (bool(rule),) * num_layers
    kinds = layer.get("layer_types") or ["full_attention"] * num_layers
    return tuple(kind == "sliding_attention" for kind in kinds)


def _type_of(config: DraftConfig) -> tuple[str, str, dict[str, Any]]:
    """Return the ``speculators_model_type`` of a drafter, the name of its class there, and the keys of that type."""
    from_anchor = {"sample_from_anchor": config.predicts_from_anchor}
    if config.dflash2 is not None:
        return "dflash2", "DFlash2DraftModel", dataclasses.asdict(config.dflash2) | from_anchor
    if not config.markov_rank and not config.predicts_from_anchor:
        return "dflash", "DFlashDraftModel", {}
    head = {"markov_rank": config.markov_rank, "markov_head_type": "vanilla"}
    head |= {"enable_confidence_head": False, "confidence_head_with_markov": False}  # that head is not read
    return "dspark", "DSparkSpeculator", head | from_anchor


def _layer_config(published: Mapping[str, Any], config: DraftConfig) -> dict[str, Any]:
    window = max(config.window)
    layer = {key: published[key] for key in _LAYER_KEYS if published.get(key) is not None}
    layer |= {
        "model_type": "qwen3",
        "head_dim": config.head_dim,
        "layer_types": ["sliding_attention" if size else "full_attention" for size in config.window],
        "sliding_window": window or None,
        "use_sliding_window": window > 0,
    }
    if config.num_target_layers is not None:
        layer["num_target_layers"] = config.num_target_layers
    if len(set(config.causal)) == 1:
        layer["is_causal"] = config.causal[0]  # vLLM looks here first
    return layer


def _expect_expressible(config: DraftConfig) -> None:
    """Raise unless the speculators layout can express everything that changes the math."""
    if config.dflash2 is not None and config.draft_vocab_size is not None:
        raise ValueError("a DFlash 2 drafter of the speculators layout has the whole vocabulary, and this one a part")
    if "mask_embedding" in config.own_parts:
        raise ValueError("the speculators layout has no mask embedding, and this drafter has its own")
    for key, neutral in (
        ("input_embedding_scale", 1.0),
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", 0.0),
        ("attention_sinks", False),
        ("attention_value_scale", 1.0),
    ):
        if getattr(config, key) != neutral:
            raise ValueError(f"the speculators layout has no {key}, and this drafter has {getattr(config, key)}")
    if config.vocab_size is None:
        raise ValueError("the speculators layout needs vocab_size, which is missing in this drafter's config.json")
    if len(set(config.window) - {0}) > 1:
        raise ValueError(f"the speculators layout has one window, and this drafter has {list(config.window)}")


def _expect_same_causality(written: Mapping[str, Any], config: DraftConfig) -> None:
    """Raise unless the speculators library and vLLM read from a config which layers are causal."""
    layers = f"this drafter's layers are causal {list(config.causal)} with windows {list(config.window)}"
    if any(causal and not window for causal, window in zip(config.causal, config.window, strict=True)):
        raise ValueError(
            f"full layers of the speculators layout are never causal, and {layers}: serve it in the published layout"
        )
    if vllm_causality(written, config.num_hidden_layers) != config.causal:
        raise ValueError(
            "vLLM reads one rule of causality for all layers from the speculators layout, and "
            f"{layers}: serve it in the published layout"
        )
