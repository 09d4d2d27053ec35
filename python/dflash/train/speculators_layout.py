"""Write a drafter's config in the layout of the ``speculators`` library; `dflash.drafter.layouts` reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..drafter import FULL, SLIDING, DraftConfig
from ..drafter.keys import KEYS, LAYER

SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping", "attention_value_scale")
_LAYER_METADATA = ("attention_dropout", "initializer_range", "tie_word_embeddings", "use_cache")


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
    config.expect_defaults("the speculators layout", *SCALES, "attention_sinks")
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
