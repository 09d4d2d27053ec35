"""Read a drafter's ``config.json`` into the fields of `dflash.DraftConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..limits import MAX_HEAD_DIM, MAX_POSITIONS
from ..terminal import shortened
from .dflash2 import read_dflash2
from .dspark import read_dspark
from .keys import Keys, refuse_unsupported, warn_about_unknown
from .rope import read_rope

__all__ = ["FULL", "SLIDING", "build_target_layer_ids", "read_fields"]

FULL, SLIDING = "full_attention", "sliding_attention"


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Return the tapped target layers of a drafter that does not name them.

    They are evenly spaced from layer 1 to the fourth from last. A drafter of one layer taps the middle one. Halves are
    rounded to even, as Python does.

    Raises:
        ValueError: the target has too few layers for the rule.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    if num_target_layers < 4:
        raise ValueError(
            f"target_layer_ids is missing and can be derived only for 4 target layers or more, got {num_target_layers}"
        )
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def read_fields(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the fields of a `dflash.DraftConfig` from a parsed config in the published layout.

    Raises:
        ValueError: a key is missing, has an impossible value, or asks for something not implemented.
    """
    keys = Keys(config, source)
    refuse_unsupported(keys)
    fields = _read_shape(keys)
    layers = fields["num_hidden_layers"]
    fields |= _read_vocabulary(keys)
    fields["dflash2"] = read_dflash2(keys, fields["hidden_size"], fields["vocab_size"])
    fields |= read_dspark(keys, fields["vocab_size"], fields["dflash2"])
    fields["block_size"] += fields["predicts_from_anchor"]
    _expect_equal(keys, "target_hidden_size", "hidden_size", fields["hidden_size"], "both models must be equally wide")
    target_layers, max_positions = keys.value("num_target_layers"), keys.top.get("max_position_embeddings")
    fields |= {"num_target_layers": target_layers, "max_position_embeddings": max_positions}
    fields["causal"], fields["window"] = _read_attention(keys, layers)
    fields["target_layer_ids"] = _read_taps(keys, target_layers, layers)
    fields["rope"] = read_rope(keys, max_positions)
    fields |= _read_options(keys)
    warn_about_unknown(keys)
    return fields


def _read_shape(keys: Keys) -> dict[str, int]:
    layers, hidden = keys.required_integer("num_hidden_layers"), keys.required_integer("hidden_size")
    heads = keys.required_integer("num_attention_heads")
    kv_heads = keys.top.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise keys.error(f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}")
    head_dim = keys.top.get("head_dim")
    if head_dim is None and hidden % heads:
        raise keys.error(
            f"head_dim is missing, and hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    head_dim = keys.integer("head_dim", hidden // heads if head_dim is None else head_dim, 1, MAX_HEAD_DIM)
    if head_dim % 2:
        raise keys.error(f"head_dim must be even for RoPE, got {head_dim}")
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": keys.required_integer("intermediate_size"),
        "num_attention_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "block_size": keys.value("block_size", 16),
    }


def _read_vocabulary(keys: Keys) -> dict[str, Any]:
    vocab = keys.top.get("vocab_size")
    drafts = keys.top.get("draft_vocab_size")
    if drafts is not None and (vocab is None or drafts > vocab):
        raise keys.error(f"draft_vocab_size must be at most vocab_size = {vocab}, got {drafts}")
    mask = keys.value("mask_token_id")
    if mask is None:
        raise keys.error("mask_token_id is missing")
    if vocab is not None and mask >= vocab:
        raise keys.error(f"mask_token_id must be below vocab_size {vocab}, got {mask}")
    own = {"embed_tokens": "has_embed_tokens", "lm_head": "has_lm_head", "mask_embedding": "mask_embedding"}
    return {
        "vocab_size": vocab,
        "mask_token_id": mask,
        "own_parts": tuple(part for part, key in own.items() if keys.top.get(key)),
        "draft_vocab_size": None if drafts == vocab else drafts,
    }


def _expect_equal(keys: Keys, key: str, other: str, value: int | None, reason: str) -> None:
    given = keys.top.get(key)
    if given is not None and given != value:
        raise keys.error(f"{key} = {shortened(given)} differs from {other} = {value}: {reason}")


def _read_taps(keys: Keys, target_layers: int | None, layers: int) -> tuple[int, ...]:
    taps = keys.value("target_layer_ids")
    if taps is None:
        return _derive_taps(keys, target_layers, layers)
    for tap in taps:
        if target_layers is not None and tap >= target_layers:
            raise keys.error(f"target_layer_ids must be below num_target_layers {target_layers}, got {tap}")
    return tuple(taps)


def _derive_taps(keys: Keys, target_layers: int | None, layers: int) -> tuple[int, ...]:
    for key in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        if keys.top.get(key) is not None:
            raise keys.error(
                f"{key} without target_layer_ids is not supported: the two count layers differently, "
                "so state target_layer_ids"
            )
    if target_layers is None:
        raise keys.error("target_layer_ids is missing, and without num_target_layers it cannot be derived")
    try:
        return build_target_layer_ids(target_layers, layers)
    except ValueError as error:
        raise keys.error(str(error)) from None


def _read_attention(keys: Keys, layers: int) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Return the causality and the window of every layer."""
    use_sliding = keys.top.get("use_sliding_window")
    types = _read_layer_types(keys, layers, use_sliding)
    causal = keys.top.get("is_causal")
    causal = keys.dflash.get("causal") if causal is None else causal
    # use_swa gives a window to layers that are full by name.
    everywhere = SLIDING not in types and keys.dflash.get("use_swa")
    window = 0
    if everywhere or SLIDING in types:
        window = keys.dflash.get("swa_window_size")
        if window is None:
            if use_sliding is False:
                raise keys.error("layer_types has sliding_attention, but use_sliding_window is false")
            window = keys.top.get("sliding_window")
        cause = "use_swa" if everywhere else f"{SLIDING} in layer_types"
        window = keys.integer(f"{cause} needs a window: sliding_window", window, 1, MAX_POSITIONS)
    return (
        tuple(kind == SLIDING if causal is None else causal for kind in types),
        tuple(window if everywhere or kind == SLIDING else 0 for kind in types),
    )


def _read_layer_types(keys: Keys, layers: int, use_sliding: bool | None) -> list[str]:
    """Return ``layer_types``, or what Qwen3's own config derives where it is missing."""
    types = keys.top.get("layer_types")
    if types is None:
        num_full = layers
        if use_sliding and keys.top.get("sliding_window") is not None:
            num_full = keys.value("max_window_layers", 28)
        types = [FULL if i < num_full else SLIDING for i in range(layers)]
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        given = f"got {shortened(types)} with num_hidden_layers {layers}"
        raise keys.error(f"layer_types must name each of the {layers} layers, {given}")
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise keys.error(f"layer_types must be {FULL} or {SLIDING}, got {shortened(kind)}")
    return list(types)


def _read_options(keys: Keys) -> dict[str, Any]:
    """Return norms, biases, sinks and scales, each with its default."""
    eps = keys.top.get("rms_norm_eps")
    sinks = keys.value("attention_sink_bias", keys.top.get("add_swa_attention_sink_bias"))
    return {
        "rms_norm_eps": 1e-6 if eps is None else float(eps),
        "attention_bias": bool(keys.top.get("attention_bias")),
        "attention_sinks": bool(sinks),
        "attention_value_scale": float(keys.value("attention_value_scale", 1.0)),
        "input_embedding_scale": float(keys.value("input_embedding_scale", 1.0)),
        "output_multiplier": float(keys.value("output_multiplier", 1.0)),
        "final_logit_softcapping": max(float(keys.value("final_logit_softcapping", 0.0)), 0.0),
    }
