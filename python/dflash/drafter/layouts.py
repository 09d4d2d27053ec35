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

from ..terminal import shortened
from .keys import FULL, KEYS, LAYER, MAX_LAYERS, SLIDING, TOP, boolean, layers

if TYPE_CHECKING:
    from .config import DraftConfig

DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"
_DFLASH_DEFAULTS = {"block_size": 8, "sample_from_anchor": False, "sliding_window_non_causal": False}
_DFLASH2_DEFAULTS = dict(zip(DFLASH2_KEYS, (2, 16, 256, 16), strict=True))
# What the speculators library takes where a key is missing, by ``speculators_model_type``.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "dflash": _DFLASH_DEFAULTS,
    "dflash2": _DFLASH_DEFAULTS | {"sliding_window_non_causal": True} | _DFLASH2_DEFAULTS,
    "dspark": _DFLASH_DEFAULTS | {"sample_from_anchor": True, "markov_rank": 256, "markov_head_type": "vanilla"},
}
# Top-level keys of the speculators layout that change nothing, or have another name in the published one.
# fmt: off
_DROPPED = frozenset("""
    architectures auf auto_map aux_hidden_state_layer_ids base_model_ep_plan confidence_head_with_markov dtype emb_dim
    enable_confidence_head gru_hidden_dim has_no_defaults_at_init lambda_base_decay_ratio lambda_base_start model_type
    pure_draft_prefix_len shift_label sliding_window_non_causal speculators_config speculators_model_type
    speculators_version tie_word_embeddings torch_dtype transformer_layer_config transformers_version
""".split())  # noqa: SIM905
# fmt: on
_LAYER_METADATA = ("attention_dropout", "initializer_range", "tie_word_embeddings", "use_cache")


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Return True if a parsed ``config.json`` is in the speculators layout."""
    return any(config.get(key) is not None for key in ("speculators_model_type", LAYER))


def is_muse_assistant(config: Mapping[str, Any]) -> bool:
    """Return True if a parsed ``config.json`` is that of a Muse Glimmer assistant of the first generation."""
    return "MuseGlimmerAssistantModel" in (config.get("architectures") or ())


def from_muse_assistant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published form of a Muse Glimmer assistant's config. No layer of it is causal."""
    out = {name: key.muse for name, key in KEYS.items() if key.muse is not None}
    out |= {key: value for key, value in config.items() if value is not None}
    out |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "is_causal": False}
    if type(out["sliding_window"]) is int:
        out["sliding_window"] += 1  # transformers' bidirectional windows do not count the query's own position
    if type(out["num_hidden_layers"]) is int:
        out.setdefault("layer_types", [SLIDING] * min(out["num_hidden_layers"], MAX_LAYERS))
    return out


def from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published form of a config in the speculators layout.

    Raises:
        ValueError: its type is another, or something that a drafter needs is missing.
    """
    # 1. Check what only this layout has
    kind, layer, taps = (config.get(key) for key in ("speculators_model_type", LAYER, "aux_hidden_state_layer_ids"))
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise ValueError(f"speculators_model_type must be dflash, dflash2 or dspark, got {shortened(kind)}")
    if not isinstance(layer, Mapping):
        raise ValueError(f"{LAYER} must be an object, got {shortened(layer)}")
    given = {key: value for key, value in config.items() if value is not None}
    for key in given.keys() & {"sample_from_anchor", "shift_label", "sliding_window_non_causal"}:
        boolean(key, given[key])
    if given.get("shift_label"):
        raise ValueError("shift_label = True is not supported: other block layouts are not implemented")
    layers(1)("aux_hidden_state_layer_ids (counted from 1)", taps)
    # 2. Take its keys, or what the library takes where they are missing
    settings = {key: given.get(key, default) for key, default in _DEFAULTS[kind].items()}
    section: dict[str, Any] = {"target_layer_ids": [tap - 1 for tap in taps]}
    section |= {key: settings.pop(key) for key in DFLASH2_KEYS if key in settings}
    section |= {key: given[key] for key in ("mask_token_id", "projector_type") if key in given}
    if settings.pop("sliding_window_non_causal"):
        section["causal"] = (
            False  # otherwise the rule of the published layout: sliding layers are causal, full ones not
        )
    # 3. Name the class that drafts so
    architecture = "DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"
    if kind != "dflash2" and settings["sample_from_anchor"]:
        architecture = DSPARK_ARCHITECTURE  # with a Markov head or without
        settings |= {key: section[key] for key in ("mask_token_id", "target_layer_ids") if key in section}
    elif kind == "dflash":
        settings.pop("sample_from_anchor")  # the published layout has no such key
    # 4. Keys that the layout does not have are judged as in the published one
    known = _DROPPED.union(name for name, key in KEYS.items() if key.speculators == TOP)
    out = {name: key.qwen3 for name, key in KEYS.items() if key.qwen3 is not None}
    out |= {key: value for key, value in config.items() if key not in known}
    out |= {**layer, "architectures": [architecture], "model_type": "qwen3", **settings, "dflash_config": section}
    return out | {key: given[key] for key in ("draft_vocab_size", "target_hidden_size", "dtype") if key in given}


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
    # 1. The type, and the keys that only it has
    kind, architecture, settings = "dflash", "DFlashDraftModel", {}
    from_anchor = {"sample_from_anchor": config.predicts_from_anchor}
    if config.dflash2 is not None:
        kind, architecture = "dflash2", "DFlash2DraftModel"
        settings = dataclasses.asdict(config.dflash2) | from_anchor
    elif config.markov_rank or config.predicts_from_anchor:
        kind, architecture = "dspark", "DSparkSpeculator"
        settings = {"markov_rank": config.markov_rank, "markov_head_type": "vanilla", **from_anchor}
        settings |= {"enable_confidence_head": False, "confidence_head_with_markov": False}  # that head is not read
    # 2. The transformer's keys
    window = max(config.window)
    names = [*_LAYER_METADATA, *(name for name, key in KEYS.items() if key.speculators == LAYER)]
    layer = {name: published[name] for name in names if published.get(name) is not None and name != "is_causal"}
    layer |= {
        "model_type": "qwen3",
        "head_dim": config.head_dim,
        "layer_types": [SLIDING if size else FULL for size in config.window],
        "sliding_window": window or None,
        "use_sliding_window": window > 0,
    }
    if config.num_target_layers is not None:
        layer["num_target_layers"] = config.num_target_layers
    if len(set(config.causal)) == 1:
        layer["is_causal"] = config.causal[0]  # vLLM looks here first
    # 3. All of it
    method = {"proposal_type": "greedy", "speculative_tokens": max(config.block_size - 1, 1)}
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
            "proposal_methods": [method | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"architectures": list(target_architectures), "name_or_path": target},
        },
        "speculators_model_type": kind,
        "tie_word_embeddings": False,
        LAYER: layer,
    } | settings
    _expect_same_causality(out, config)
    return out


def vllm_causality(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return which layers of a checkpoint in the speculators layout vLLM 0.33 runs causally.

    Its order: ``is_causal`` of ``transformer_layer_config``; ``sliding_window_non_causal``, which it does not read for
    the type dspark; else sliding layers are causal.
    """
    layer = config[LAYER]
    rule = layer.get("is_causal")
    if rule is None and config["speculators_model_type"] != "dspark":
        rule = not config.get("sliding_window_non_causal", True)  # so a key that is null means causal
    if rule is not None:
        return (bool(rule),) * num_layers
    return tuple(kind == SLIDING for kind in layer.get("layer_types") or [FULL] * num_layers)


def _expect_expressible(config: DraftConfig) -> None:
    """Raise unless the speculators layout can express everything that changes the math."""
    if config.dflash2 is not None and config.draft_vocab_size is not None:
        raise ValueError("a DFlash 2 drafter of the speculators layout has the whole vocabulary, and this one a part")
    if "mask_embedding" in config.own_parts:
        raise ValueError("the speculators layout has no mask embedding, and this drafter has its own")
    scales = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "attention_value_scale")
    config.expect_defaults("the speculators layout", *scales, "attention_sinks")
    if config.vocab_size is None:
        raise ValueError("the speculators layout needs vocab_size, which is missing in this drafter's config.json")
    if len(set(config.window) - {0}) > 1:
        raise ValueError(f"the speculators layout has one window, and this drafter has {list(config.window)}")


def _expect_same_causality(written: Mapping[str, Any], config: DraftConfig) -> None:
    """Raise unless the speculators library and vLLM read from a config which layers are causal."""
    given = f"this drafter's layers are causal {list(config.causal)} with windows {list(config.window)}"
    if any(causal and not window for causal, window in zip(config.causal, config.window, strict=True)):
        raise ValueError(
            f"full layers of the speculators layout are never causal, and {given}: serve it in the published layout"
        )
    if vllm_causality(written, config.num_hidden_layers) != config.causal:
        raise ValueError(
            "vLLM reads one rule of causality for all layers from the speculators layout, and "
            f"{given}: serve it in the published layout"
        )
