"""What serving engines read differently from this package, and the command that serves a pair with vLLM."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from typing import Any

from ..drafter import DraftConfig, is_speculators, vllm_causality

__all__ = ["engine_warnings", "speculators_warnings", "vllm_command"]

# Read from vLLM 0.33: model_executor/models/qwen3_dflash.py has none of these keys, qwen3_dflash2.py has all.
_IGNORED_BY_VLLM = {
    "input_embedding_scale": (1.0, "it accepts fewer drafts there"),
    "output_multiplier": (1.0, "drafts are sampled from another distribution there; greedy drafts are the same"),
    "final_logit_softcapping": (0.0, "drafts are sampled from another distribution there; greedy drafts are the same"),
}


def engine_warnings(config: DraftConfig) -> list[str]:
    """Return what serving engines would read differently in this drafter, a sentence per difference."""
    if config.dflash2 is not None:
        if not config.predicts_from_anchor:
            return []
        return ["vLLM refuses DFlash 2 drafters whose anchor's row predicts (sample_from_anchor), as this one's does"]
    return [
        f"vLLM ignores {key} of drafters of the first generation, and this one has {getattr(config, key)}: {effect}"
        for key, (neutral, effect) in _IGNORED_BY_VLLM.items()
        if getattr(config, key) != neutral
    ]


def speculators_warnings(raw: Mapping[str, Any], config: DraftConfig) -> list[str]:
    """Return how vLLM reads the causality of a checkpoint in the speculators layout, where that differs.

    Args:
        raw: the parsed ``config.json`` of the checkpoint.
        config: what this package reads from it, as the speculators library does.
    """
    if not is_speculators(raw):
        return []
    theirs = vllm_causality(raw, config.num_hidden_layers)
    if theirs == config.causal:
        return []
    key = "sliding_window_non_causal"
    if raw["speculators_model_type"] == "dspark":
        reason = f"it does not read {key} of DSpark drafters"
    else:
        given = json.dumps(raw[key]) if key in raw else "missing"
        reason = f"it reads one rule for all layers, and {key} is {given} there"
    return [
        f"vLLM takes the layers of the original checkpoint for causal {list(theirs)}, because {reason}. The "
        f"speculators library and this package read {list(config.causal)}, which the exported folder says"
    ]


def vllm_command(target: str, draft: str | os.PathLike, config: DraftConfig) -> str:
    """Return the command that serves a pair with vLLM. Both are named, so they may be folders or repositories."""
    # A method that is named keeps vLLM from looking at the checkpoint's type.
    is_dspark = config.dflash2 is None and (config.predicts_from_anchor or config.markov_rank)
    method = "dspark" if is_dspark else "dflash"
    drafts = {"method": method, "model": os.fspath(draft), "num_speculative_tokens": max(config.block_size - 1, 1)}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(drafts))}"
