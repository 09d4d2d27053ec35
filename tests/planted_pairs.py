"""The package's pair with one fault planted: a changed config, changed weights or a changed template on disk."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash import load_draft
from dflash.doctor import Patient
from dflash.doctor.recording import RAW_LAST, Answered, record
from dflash.evaluate import PAIR, demo_prompts, load_target, prompt_ids

Weights = dict[str, Tensor]
PROMPTS = [{"prompt": prompt.text} for prompt in demo_prompts()]


@dataclass(frozen=True)
class Planted:
    """A fault.

    Attributes:
        named: what the doctor must call it.
        config: keys of the drafter's config.json.
        dflash: keys of its dflash_config.
        weights: changes the drafter's weights.
        template: replaces this text of the chat template by the other.
        fix: keys that its advice must hold.
    """

    named: str
    config: dict[str, Any] = field(default_factory=dict)
    dflash: dict[str, Any] = field(default_factory=dict)
    weights: Callable[[Weights], None] | None = None
    template: tuple[str, str] | None = None
    fix: str = ""


@functools.cache
def target_and_tokenizer() -> tuple[Any, Any]:
    """Load the package's target once."""
    return load_target(PAIR)


def plant(fault: Planted, folder: Path) -> Patient:
    """Write the faulty drafter to ``folder``, and load it with the target."""
    shutil.copytree(PAIR / "draft", folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= fault.config
    config["dflash_config"] |= fault.dflash
    (folder / "config.json").write_text(json.dumps(config))
    if fault.weights is not None:
        weights = load_file(folder / "model.safetensors")
        fault.weights(weights)
        save_file(weights, folder / "model.safetensors")
    target, tokenizer = target_and_tokenizer()
    if fault.template is not None:
        _, tokenizer = load_target(PAIR)
        tokenizer.chat_template = tokenizer.chat_template.replace(*fault.template)
    return Patient(target, load_draft(folder, dtype=torch.float32), config, tokenizer)


# ---------------------------------------------------------------------------------------------- changes of weights


def interleave(weights: Weights) -> None:
    """Store q and k as checkpoints for interleaved RoPE do."""
    order = torch.stack([torch.arange(32), torch.arange(32, 64)], 1).flatten()
    for name, weight in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weights[name] = weight.unflatten(0, (-1, 64))[:, order].flatten(0, 1).contiguous()
        elif "q_norm" in name or "k_norm" in name:
            weights[name] = weight[order].contiguous()


def scale_residual(weights: Weights, factor: float = 1 / math.sqrt(192)) -> None:
    """Make a drafter that was trained with embeddings ``factor`` times as large: only sizes relative to it count."""
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weights[name] = weight * factor


@torch.no_grad()
def refit_last_tap(weights: Weights) -> None:
    """Let the last tap read the last layer before the final norm: fit what it read before, by least squares."""
    target, tokenizer = target_and_tokenizer()
    sequences = [prompt_ids(tokenizer, prompt) for prompt in PROMPTS]
    answers = [prompt.answer or "" for prompt in demo_prompts()]
    sequences = [[*ids, *tokenizer(text).input_ids] for ids, text in zip(sequences, answers, strict=True)]
    recorded = record(target, [Answered(ids, 1) for ids in sequences], [4, 5])
    inside = torch.arange(recorded.ids.shape[1]) < recorded.lengths[:, None]
    last, tap = recorded.states[RAW_LAST][inside], recorded.states[4][inside]
    fitted = torch.linalg.lstsq(last, tap).solution  # [hidden, hidden]
    columns = weights["fc.weight"].view(192, 4, 192)
    columns[:, 3] = (columns[:, 3].float() @ fitted.T).to(columns.dtype)


def break_value(weights: Weights) -> None:
    """Put a NaN into one weight."""
    weights["layers.1.mlp.up_proj.weight"][3, 5] = float("nan")


def forget_fc(weights: Weights) -> None:
    """Make the drafter deaf to the target."""
    weights["fc.weight"].zero_()


def enlarge_fc(weights: Weights) -> None:
    """Make products that no dtype holds, of weights that are finite."""
    weights["fc.weight"] *= 2.0**126


def frequencies() -> Tensor:
    """Count each token in the prompts and their answers, ``[vocab]``."""
    target, tokenizer = target_and_tokenizer()
    texts = [text for prompt in demo_prompts() for text in (prompt.text, prompt.answer or "")]
    ids = [i for row in tokenizer(texts).input_ids for i in row]
    return torch.tensor(ids).bincount(minlength=target.config.vocab_size)


def add_selector(weights: Weights) -> None:
    """Make a DFlash 2 drafter that drafts the same, and badly without its selector.

    The convolutions change nothing. The drafter's own head rates the most frequent tokens too low, by a share of what
    the selector adds again whatever the token before.
    """
    target, _ = target_and_tokenizer()
    head = target.lm_head.weight.detach()
    vocab, hidden = head.shape
    frequent = frequencies().topk(48).indices
    missing = 0.7 * head[frequent]
    weights["lm_head.weight"] = head.index_add(0, frequent, -missing).contiguous()
    layers = sum(name.endswith("input_layernorm.weight") for name in weights)
    for name in (f"layers.{i}.{part}" for i in range(layers) for part in ("attention_conv", "mlp_conv")):
        weights[f"{name}.base_kernel"] = torch.stack([torch.ones(2, hidden), torch.zeros(2, hidden)], 1)
        weights[f"{name}.kernel_projection.weight"] = torch.zeros(2 * 2 * hidden // 16, hidden)
    weights["candidate_selector.hidden_projection.weight"] = missing
    weights["candidate_selector.predecessor_codebook"] = torch.ones(vocab, len(frequent))
    successors = torch.zeros(vocab, len(frequent))
    successors[frequent, torch.arange(len(frequent))] = 1
    weights["candidate_selector.successor_codebook"] = successors


def bring_own_parts(weights: Weights) -> None:
    """Make a drafter with a head over the frequent part of the vocabulary, its own embedding and mask embedding."""
    target, _ = target_and_tokenizer()
    table, head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    known = frequencies().topk(1400).indices.sort().values
    weights["lm_head.weight"] = 2 * head[known]
    weights["d2t"] = known - torch.arange(len(known))
    weights["embed_tokens.weight"] = table / 2
    weights["mask_embedding"] = table[1] / 2


CONV = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 48, "selector_top_k": 32}
# Healthy pairs of other kinds, made of the package's.
KINDS = {
    "first generation": Planted(""),
    "DFlash 2": Planted("", {"architectures": ["DFlash2DraftModel"]}, CONV, add_selector),
    "own parts": Planted(
        "",
        {"draft_vocab_size": 1400, "input_embedding_scale": 2.0},
        {"mask_token_id": 700, "output_multiplier": 0.5},
        bring_own_parts,
    ),
}

FAULTS = {
    "taps one too high": Planted("tap shift", dflash={"target_layer_ids": [2, 3, 4, 5]}, fix="[1, 2, 3, 4]"),
    "taps one too low": Planted("tap shift", dflash={"target_layer_ids": [0, 1, 2, 3]}, fix="[1, 2, 3, 4]"),
    "taps reversed": Planted("tap order", dflash={"target_layer_ids": [4, 3, 2, 1]}, fix="[1, 2, 3, 4]"),
    "two taps swapped": Planted("tap order", dflash={"target_layer_ids": [1, 2, 4, 3]}, fix="[1, 2, 3, 4]"),
    "last tap before the norm": Planted(
        "last tap norm", dflash={"target_layer_ids": [1, 2, 3, 5]}, weights=refit_last_tap, fix="after the final norm"
    ),
    "another RoPE theta": Planted(
        "rope theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, fix='"rope_theta": 10000.0'
    ),
    "another RoPE scaling": Planted(
        "rope scaling",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        fix='"rope_type": "default"',
    ),
    "interleaved RoPE": Planted("rope layout", weights=interleave, fix="q_proj and k_proj"),
    "another mask id": Planted("mask id", dflash={"mask_token_id": 700}, fix='"mask_token_id": 1'),
    "the end as mask": Planted("mask id", dflash={"mask_token_id": 0}, fix='"mask_token_id": 1'),
    "causal": Planted("causality", {"is_causal": True}, fix='"is_causal": false'),
    "a window": Planted(
        "window",
        {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8, "use_sliding_window": True, "is_causal": False},
        fix="full_attention",
    ),
    "a causal window": Planted(
        "window",
        {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8, "use_sliding_window": True},
        fix="full_attention",
    ),
    "embeddings scaled": Planted(
        "embedding scale", {"input_embedding_scale": 40.0}, fix='"input_embedding_scale": 1.0'
    ),
    "scale of embeddings missing": Planted(
        "embedding scale", weights=scale_residual, fix='"input_embedding_scale": 0.072'
    ),
    "blocks too large": Planted("block size", {"block_size": 64}, fix='"block_size": 16'),
    "template": Planted(
        "template",
        template=(
            "'\\n=>\\n' -}}",
            "'\\n=>\\n' -}}{{- '' if enable_thinking is false else 'The first thing to think about is' -}}",
        ),
        fix="enable_thinking=False",
    ),
    "NaN": Planted("not finite", weights=break_value, fix="again"),
    "features near zero": Planted("near zero", weights=forget_fc, fix="fc.weight"),
    "overflow": Planted("overflow", weights=enlarge_fc, fix="float32"),
    "too few positions": Planted("positions", {"max_position_embeddings": 64}, fix="max_position_embeddings"),
}
