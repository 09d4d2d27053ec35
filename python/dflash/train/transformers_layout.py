"""The layout of the DFlash drafter in transformers, which ``generate(speculation_type="dflash")`` takes.

transformers has one drafter class, `MuseGlimmerAssistantModel`. Every key is at the top level and two tensors have
other names.
"""

from __future__ import annotations

from typing import Any

from ..drafter import FULL, SLIDING, DraftConfig
from ..terminal import listed
from .checkpoint import rope_section

__all__ = ["TENSOR_NAMES", "to_transformers"]

TENSOR_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
# Written where no layer has a window: transformers wants an integer, and does not use it then.
_UNUSED_WINDOW = 2048
# Its cache keeps sliding_window - 1 positions, which must not be negative.
_SMALLEST_WINDOW = 2


def to_transformers(config: DraftConfig) -> dict[str, Any]:
    """Return the ``config.json`` that transformers reads as this drafter.

    Raises:
        ValueError: transformers' class cannot express something that changes the math.
    """
    _expect_expressible(config)
    # Its windows do not count the query's own position.
    window = max(config.window) - 1 if any(config.window) else _UNUSED_WINDOW
    out = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": [SLIDING if size else FULL for size in config.window],
        "mask_token_id": config.mask_token_id,
        "model_type": "muse_glimmer_assistant",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pad_token_id": None,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope_section(config.rope),
        "sliding_window": window,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.max_position_embeddings is not None:
        out["max_position_embeddings"] = config.max_position_embeddings
    return out


def _expect_expressible(config: DraftConfig) -> None:
    """Raise unless transformers' class can express everything that changes the math."""
    what = "transformers' drafter class"
    if config.scales_like_target:
        raise ValueError("a Muse Glimmer assistant is in transformers' layout already: use its folder as it is")
    if config.dflash2 is not None:
        raise ValueError(f"{what} is of the first generation, and this is a DFlash 2 drafter: use the published layout")
    if config.markov_rank or config.predicts_from_anchor:
        raise ValueError(f"{what} is of the first generation, and this is a DSpark drafter: use the published layout")
    if config.own_parts:
        raise ValueError(f"{what} uses the target's head and embedding, not this drafter's {listed(config.own_parts)}")
    for key, neutral in (
        ("attention_bias", False),
        ("attention_sinks", False),
        ("attention_value_scale", 1.0),
        ("input_embedding_scale", 1.0),
        ("output_multiplier", 1.0),
        ("final_logit_softcapping", 0.0),
    ):
        if getattr(config, key) != neutral:
            raise ValueError(f"{what} has no {key}, and this drafter has {getattr(config, key)}")
    if any(config.causal):
        raise ValueError(f"{what} is not causal inside a block, and this drafter's layers are {list(config.causal)}")
    if len(windows := set(config.window) - {0}) > 1:
        raise ValueError(f"{what} has one window, and this drafter has {list(config.window)}")
    if windows and min(windows) < _SMALLEST_WINDOW:
        raise ValueError(f"{what} needs a window of at least {_SMALLEST_WINDOW}, and this drafter has {min(windows)}")
