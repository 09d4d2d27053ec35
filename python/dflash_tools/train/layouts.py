"""Write a drafter's config as a checkpoint's keys (`key_values`); refuse what a layout cannot say (`check_layout`)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from dflash import DraftConfig
from dflash.internals import drafter_config

KEYS = drafter_config.KEYS
SCALES = ("attention_value_scale", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
NEUTRAL = {key: KEYS[key].default for key in SCALES} | {"attention_sink_bias": False}


def key_values(config: DraftConfig) -> dict[str, Any]:
    """Return the published layout's keys that say what ``config`` says: the inverse of `DraftConfig.from_config`.

    ``is_causal`` is None if it follows from the windows.
    """
    rope, by_window = config.rope, tuple(window > 0 for window in config.window)
    settings = {"rope_type": rope.type, "rope_theta": rope.theta}
    settings |= {key: getattr(rope, key) for key in drafter_config.ROPE_TYPES[rope.type]}
    settings |= {"attention_factor": rope.attention_scaling} if rope.type == "yarn" else {}
    return {
        **{name: getattr(config, name) for name in DraftConfig.__dataclass_fields__ if name in KEYS},
        **(dataclasses.asdict(config.dflash2) if config.dflash2 is not None else {}),
        "model_type": "qwen3",
        "hidden_act": "silu",
        "num_key_value_heads": config.num_kv_heads,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.rows_per_pass,
        "sample_from_anchor": config.predicts_from_anchor,
        "layer_types": [drafter_config.SLIDING if window else drafter_config.FULL for window in config.window],
        "is_causal": None if config.causal == by_window else config.causal[0],
        "sliding_window": max(config.window) or None,
        "use_sliding_window": any(by_window),
        "attention_sink_bias": config.attention_sinks,
        "rope_parameters": settings,
        "rope_theta": rope.theta,
    }


# ---------------------------------------------------------------------------------------------- limits

_REFUSALS = {
    "saved": "a drafter with {} cannot be saved here: use dflash export",
    "published": "the published layout cannot have {}, as this drafter has: keep the speculators layout",
    "speculators": "the speculators layout cannot have {}, as this drafter has: use the published layout",
    "transformers": "transformers' drafter class cannot have {}, as this drafter has: use the published layout",
    "gguf": "llama.cpp's drafters cannot have {}, as this one has",
}


def check_layout(config: DraftConfig, layout: str) -> None:
    """Raise ``ValueError`` if a layout has no place for something that changes the math.

    The layout "saved" is what `published_config` writes.
    """
    rope, own, second, anchor = config.rope, config.own_parts, config.dflash2, config.predicts_from_anchor
    causal, window, windows = config.causal, config.window, {*config.window} - {0}
    is_mixed, hidden, top_k = len({*causal}) > 1, config.hidden_size, second.selector_top_k if second else 0
    scaled = config.output_multiplier != 1 or config.final_logit_softcapping != 0
    usual = 1 + 0.1 * math.log(rope.factor)  # what llama.cpp multiplies by
    is_usual = rope.truncate and math.isclose(rope.attention_scaling, usual, rel_tol=1e-6)
    layers = describe_layers(config)
    # fmt: off
    limits = [  # the layouts without a place for something, whether this drafter has it, and its name
        ("saved", config.scales_like_target, "logits that are scaled as the target's"),
        *(("speculators transformers", (value := getattr(config, key)) != NEUTRAL[key], f"{key} {value}")
          for key in SCALES),
        ("speculators transformers", config.attention_sinks, "attention sinks"),
        ("transformers gguf", config.attention_bias, "biases (attention_bias)"),
        ("saved speculators transformers gguf", "mask_embedding" in own, "a mask embedding"),
        ("saved transformers", "embed_tokens" in own, "its own embed_tokens"),
        ("transformers", "lm_head" in own, "its own lm_head"),
        ("gguf", own == ("embed_tokens",), "an embedding without its own head"),  # it would be the head too
        ("speculators", config.vocab_size is None, "no vocab_size in its config.json"),
        ("transformers", second, "the parts of DFlash 2"),
        ("speculators", second and config.draft_vocab_size, "the parts of DFlash 2 and a draft vocabulary"),
        ("published", second and anchor, "the parts of DFlash 2 and drafts from the anchor's row"),
        ("gguf", top_k * (top_k + 1) > hidden, f"selector_top_k {top_k} at hidden_size {hidden}"),
        ("saved transformers", anchor, "drafts from the anchor's row (DSpark)"),
        ("gguf", anchor and not config.markov_rank, "drafts from the anchor's row without a Markov head"),
        ("transformers", config.markov_rank, "a Markov head"),
        ("gguf", config.markov_rank and scaled, "scaled logits with a Markov head"),
        ("saved speculators transformers gguf", len(windows) > 1, f"several windows ({list(window)})"),
        ("transformers", 1 in windows, "a window of 1"),  # its cache keeps a position less: none
        ("transformers", any(causal), f"causal layers ({list(causal)})"),
        ("gguf", is_mixed, f"some causal layers ({list(causal)})"),
        ("saved", is_mixed and causal != tuple(map(bool, window)), f"several rules of causality ({list(causal)})"),
        ("speculators", (True, 0) in zip(causal, window, strict=True), f"causal full layers: {layers}"),
        ("gguf", rope.type == "llama3", "RoPE of type llama3"),
        ("gguf", rope.type == "yarn" and not is_usual, "RoPE of type yarn with its own truncate or attention_factor"),
    ]
    # fmt: on
    for layouts, applies, what in limits:
        if applies and layout in layouts.split():
            raise ValueError(_REFUSALS[layout].format(what))


def describe_layers(config: DraftConfig) -> str:
    """Say which layers are causal, and their windows."""
    return f"its layers are causal {list(config.causal)} with windows {list(config.window)}"
