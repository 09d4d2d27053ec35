"""The layouts of a drafter's ``config.json``: the published one, that of the ``speculators`` library, and Muse's.

Muse Glimmer's assistant has every key at the top level, and leaves the multiplier and the softcap of its logits to the
target. Tensors have the same names in the other two. The speculators layout keeps the transformer's own keys in
``transformer_layer_config`` and counts taps from the embedding: ``aux_hidden_state_layer_ids`` is the tapped layer + 1.
It has three types of drafters: dflash, dflash2 and dspark.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..terminal import shortened
from .keys import KEYS, LAYER, MAX_LAYERS, SLIDING, TOP, DFlash2Config, boolean, layers

_DFLASH2_DEFAULTS = asdict(DFlash2Config())
DFLASH2_KEYS = tuple(_DFLASH2_DEFAULTS)
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"
_DFLASH_DEFAULTS = {"block_size": 8, "sample_from_anchor": False, "sliding_window_non_causal": False}
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
        section["causal"] = False  # else as in the published layout: sliding layers are causal, full ones are not
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
