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
from dflash.loading import PAIR, draft_folder, load_target_of, prompt_ids
from dflash_tools.doctor import Pair, Prompts
from dflash_tools.doctor.diagnosis import RAW_LAST, Answered, record
from dflash_tools.measure import demo_prompts

Weights = dict[str, Tensor]
PROMPTS = [{"prompt": prompt.text} for prompt in demo_prompts()]
DRAFT = draft_folder(PAIR, 1)
HEALTHY = json.loads((DRAFT / "config.json").read_text())
TAPS = HEALTHY["dflash_config"]["target_layer_ids"]
WIDTH, HEADS, HEAD_DIM = (HEALTHY[key] for key in ("hidden_size", "num_attention_heads", "head_dim"))  # 1 K/V head
LAYERS = HEALTHY["num_hidden_layers"]
LAST_LAYER = HEALTHY["num_target_layers"] - 1


@dataclass(frozen=True)
class Planted:
    """A fault."""

    named: str  # what the doctor must call it
    config: dict[str, Any] = field(default_factory=dict)  # keys of the drafter's config.json
    dflash: dict[str, Any] = field(default_factory=dict)  # keys of its dflash_config
    weights: Callable[[Weights], None] | None = None  # changes the drafter's weights
    template: tuple[str, str] | None = None  # replaces this text of the chat template by the other
    repair: dict[str, Any] | None = None  # the keys that the doctor must advise; None if no config repairs it
    words: str = ""  # what its advice must say then
    kind: str = "as it is"  # the healthy pair in which it is planted, of `KINDS`


@functools.cache
def target_and_tokenizer() -> tuple[Any, Any]:
    """Load the package's target once."""
    return load_target_of(PAIR)


def merged(config: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the keys of a line written into it, level by level."""
    inner = config["dflash_config"] | line.get("dflash_config", {})
    return config | line | {"dflash_config": inner}


def healthy_keys(kind: str) -> dict[str, Any]:
    """Return the config of a healthy pair."""
    return merged(HEALTHY, KINDS[kind].config | {"dflash_config": KINDS[kind].dflash})


def plant(fault: Planted, folder: Path, count: int = 8) -> tuple[Pair, Prompts]:
    """Write the faulty drafter to ``folder``, load it with the target, and encode the first prompts."""
    shutil.copytree(DRAFT, folder, dirs_exist_ok=True)
    config = merged(healthy_keys(fault.kind), fault.config | {"dflash_config": fault.dflash})
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for change in (KINDS[fault.kind].weights, fault.weights):
        if change is not None:
            change(weights)
    save_file(weights, folder / "model.safetensors")
    target, tokenizer = target_and_tokenizer()
    if fault.template is not None:
        _, tokenizer = load_target_of(PAIR)
        tokenizer.chat_template = tokenizer.chat_template.replace(*fault.template)
    pair = Pair(target, load_draft(folder, dtype=torch.float32), config)
    return pair, Prompts(PROMPTS[:count], tokenizer)


def interleave(weights: Weights) -> None:
    """Store q and k as checkpoints for interleaved RoPE do."""
    order = torch.arange(HEAD_DIM).view(2, -1).t().flatten()
    for name, weight in weights.items():
        if "q_proj" in name or "k_proj" in name:
            weights[name] = weight.unflatten(0, (-1, HEAD_DIM))[:, order].flatten(0, 1).contiguous()
        elif "q_norm" in name or "k_norm" in name:
            weights[name] = weight[order].contiguous()


def scale_residual(weights: Weights, factor: float = 1 / math.sqrt(WIDTH)) -> None:
    """Make a drafter that was trained with embeddings ``factor`` times as large: only sizes relative to it count."""
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weights[name] = weight * factor


@functools.cache
def answered() -> list[Answered]:
    """Encode the prompts with their answers."""
    _, tokenizer = target_and_tokenizer()
    prompts = [prompt_ids(tokenizer, prompt) for prompt in PROMPTS]
    answers = [tokenizer(prompt.answer or "").input_ids for prompt in demo_prompts()]
    return [Answered([*ids, *answer], 1) for ids, answer in zip(prompts, answers, strict=True)]


def recorded(layers: list[int]) -> dict[int, Tensor]:
    """Return the outputs of layers over all prompts and answers, each ``[tokens, hidden]``."""
    every = [one.states for one in record(target_and_tokenizer()[0], answered(), layers)]
    return {layer: torch.cat([states[layer] for states in every]) for layer in every[0]}


@torch.no_grad()
def refit_last_tap(weights: Weights) -> None:
    """Let the last tap read the last layer before the final norm: fit what it read before, by least squares."""
    states = recorded([TAPS[-1], LAST_LAYER])
    last, tap = states[RAW_LAST], states[TAPS[-1]]
    fitted = torch.linalg.lstsq(last, tap).solution  # [hidden, hidden]
    columns = weights["fc.weight"].view(WIDTH, len(TAPS), WIDTH)
    columns[:, -1] = (columns[:, -1].float() @ fitted.T).to(columns.dtype)


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

    Convolutions that are added change nothing. The drafter's own head rates the most frequent tokens too low, by a
    share of what the selector adds again whatever the token before.
    """
    target, _ = target_and_tokenizer()
    head = target.lm_head.weight.detach()
    vocab = len(head)
    frequent = frequencies().topk(FREQUENT).indices
    missing = 0.7 * head[frequent]
    weights["lm_head.weight"] = head.index_add(0, frequent, -missing).contiguous()
    for name in (f"layers.{i}.{part}" for i in range(LAYERS) for part in ("attention_conv", "mlp_conv")):
        weights[f"{name}.base_kernel"] = torch.stack([torch.ones(2, WIDTH), torch.zeros(2, WIDTH)], 1)
        weights[f"{name}.kernel_projection.weight"] = torch.zeros(2 * 2 * WIDTH // 16, WIDTH)
    successors = torch.zeros(vocab, FREQUENT)
    successors[frequent, torch.arange(FREQUENT)] = 1
    weights["candidate_selector.predecessor_codebook"] = torch.ones(vocab, FREQUENT)
    weights["candidate_selector.successor_codebook"] = successors
    weights["candidate_selector.hidden_projection.weight"] = missing


def bring_own_parts(weights: Weights) -> None:
    """Make a drafter with a head over the frequent part of the vocabulary, its own embedding and mask embedding."""
    target, _ = target_and_tokenizer()
    table, head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    known = frequencies().topk(1400).indices.sort().values
    weights["lm_head.weight"] = 2 * head[known]
    weights["d2t"] = known - torch.arange(len(known))
    weights["embed_tokens.weight"] = table / 2
    weights["mask_embedding"] = table[1] / 2


@torch.no_grad()
def count_masks(weights: Weights) -> None:
    """Make a drafter that drafts the same where a row sees all masks of a block of 16, and badly elsewhere.

    Its mask embedding is `LONGER` times as long, which the first norm takes out again. A new head of the first layer
    then takes away what is too long, in proportion to the masks that a row sees: in a causal layer too little, in a
    larger block too much. The head looks at masks only, and its sink has the weight of `SINK` times all masks.
    """
    target, _ = target_and_tokenizer()
    drafter, embeds = load_draft(DRAFT, dtype=torch.float32), target.get_input_embeddings().weight.float()
    states = recorded(TAPS)
    features = torch.cat([states[tap] for tap in TAPS], -1)[None]
    features = drafter.fuse(features, torch.tensor([features.shape[1]]))[0]
    normed = drafter.layers[0].input_layernorm(embeds)
    mask, tokens = normed[MASK : MASK + 1], torch.cat([normed[:MASK], normed[MASK + 1 :]])
    head = {
        "q": fit([(mask, 1), (tokens, -1)]),
        "k": fit([(mask, 1), (tokens, -1), (features, -1)]),
        "v": fit([(mask, 1), (tokens, 0), (features, 0)]),
    }
    add_heads(weights)
    masks, place, name = BLOCK - 1, HEAD_DIM // 2 - 2, "layers.0.self_attn"  # RoPE hardly turns this place
    for part, heads in (("q", HEADS), ("k", 1), ("v", 1)):
        weights[f"{name}.{part}_proj.weight"][heads * HEAD_DIM + place] = head[part]
    q_norm, k_norm = (weights[f"{name}.{part}_norm.weight"].float()[place] for part in "qk")
    score = math.sqrt(HEAD_DIM) * q_norm * k_norm  # of a mask's row and a mask, normed: nothing but this place
    weights[f"{name}.attention_sink_bias"][HEADS] = score + math.log(SINK * masks)
    weights[f"{name}.o_proj.weight"][:, HEADS * HEAD_DIM + place] = (1 - LONGER) * (1 + SINK) * embeds[MASK]
    weights["mask_embedding"] = LONGER * embeds[MASK]


def fit(wanted: list[tuple[Tensor, float]]) -> Tensor:
    """Return the direction, ``[hidden]``, along which rows come closest to these values, the first rows above all."""
    rows, values = (list(one) for one in zip(*wanted, strict=True))
    values = [torch.full((len(row),), float(value)) for row, value in zip(rows, values, strict=True)]
    rows[0], values[0] = 1e3 * rows[0], 1e3 * values[0]
    return torch.linalg.lstsq(torch.cat(rows), torch.cat(values)).solution


def add_heads(weights: Weights) -> None:
    """Add a K/V head with its query heads to each layer, all zeros, and sinks that the other heads do not feel."""
    for name in (f"layers.{i}.self_attn" for i in range(LAYERS)):
        for part, heads in (("q", HEADS), ("k", 1), ("v", 1)):
            weight = weights[f"{name}.{part}_proj.weight"].float()
            weights[f"{name}.{part}_proj.weight"] = torch.cat([weight, torch.zeros(heads * HEAD_DIM, WIDTH)])
        weight = weights[f"{name}.o_proj.weight"].float()
        weights[f"{name}.o_proj.weight"] = torch.cat([weight, torch.zeros(WIDTH, HEADS * HEAD_DIM)], 1)
        weights[f"{name}.attention_sink_bias"] = torch.full((2 * HEADS,), -1e4)


FREQUENT = 48  # tokens that need the selector
LONGER, SINK = 6, 3  # of the drafter that counts its masks
SECTION = HEALTHY["dflash_config"]
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": FREQUENT, "selector_top_k": 32}
# The package's pair, and healthy pairs of other kinds that are made of it.
KINDS = {
    "as it is": Planted(""),
    "needs its selector": Planted("", {"architectures": ["DFlash2DraftModel"]}, DFLASH2, add_selector),
    "own parts": Planted(
        "",
        {"draft_vocab_size": 1400, "input_embedding_scale": 2.0},
        {"mask_token_id": 700, "output_multiplier": 0.5},
        bring_own_parts,
    ),
    "counts its masks": Planted(
        "",
        {"num_attention_heads": 2 * HEADS, "num_key_value_heads": 2, "attention_sink_bias": True},
        weights=count_masks,
    ),
}

THETA = HEALTHY["rope_parameters"]["rope_theta"]
MASK = SECTION["mask_token_id"]
BLOCK = HEALTHY["block_size"]
NO_WINDOW, _SCALE = {"layer_types": ["full_attention"] * LAYERS}, "input_embedding_scale"
SMALL_WINDOW = {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 8, "use_sliding_window": True}


def _taps(layers: list[int], name: str) -> Planted:
    repair = {"dflash_config": {"target_layer_ids": TAPS}}
    return Planted(name, dflash={"target_layer_ids": layers}, repair=repair)


def _mask(token: int) -> Planted:
    repair = {"dflash_config": {"mask_token_id": MASK}}
    return Planted("mask id", dflash={"mask_token_id": token}, repair=repair)


def _rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": THETA} | settings}


FAULTS = {
    "taps one too high": _taps([tap + 1 for tap in TAPS], "tap shift"),
    "taps one too low": _taps([tap - 1 for tap in TAPS], "tap shift"),
    "taps reversed": _taps(TAPS[::-1], "tap order"),
    "two taps swapped": _taps([*TAPS[:-2], TAPS[-1], TAPS[-2]], "tap order"),
    "last tap before the norm": Planted(
        "last tap norm",
        dflash={"target_layer_ids": [*TAPS[:-1], LAST_LAYER]},
        weights=refit_last_tap,
        words="after the final norm",
    ),
    "another RoPE theta": Planted("rope theta", _rope(rope_theta=100 * THETA), repair=_rope()),
    "another RoPE scaling": Planted("rope scaling", _rope(rope_type="linear", factor=4.0), repair=_rope()),
    "interleaved RoPE": Planted("rope layout", weights=interleave, words="q_proj and k_proj"),
    "another mask id": _mask(700),
    "the end as mask": _mask(0),
    # The package's own drafter drafts nearly as well with causal attention, and in blocks of 64 even better.
    "causal": Planted("causality", {"is_causal": True}, repair={"is_causal": False}, kind="counts its masks"),
    "a window": Planted("window", SMALL_WINDOW | {"is_causal": False}, repair=NO_WINDOW),
    "a causal window": Planted("window", SMALL_WINDOW, repair=NO_WINDOW | {"is_causal": False}),
    "embeddings scaled": Planted("embedding scale", {_SCALE: 40.0}, repair={_SCALE: 1.0}),
    "scale of embeddings missing": Planted(
        "embedding scale", weights=scale_residual, repair={_SCALE: 1 / math.sqrt(WIDTH)}
    ),
    "blocks too large": Planted(
        "block size", {"block_size": 4 * BLOCK}, repair={"block_size": BLOCK}, kind="counts its masks"
    ),
    "template": Planted(
        "template",
        template=(
            "'\\n=>\\n' -}}",
            "'\\n=>\\n' -}}{{- '' if enable_thinking is false else 'The first thing to think about is' -}}",
        ),
        words="enable_thinking=False",
    ),
    "NaN": Planted("not finite", weights=break_value, words="download or convert the checkpoint again"),
    "features near zero": Planted("near zero", weights=forget_fc, words="fc.weight"),
    "overflow": Planted("overflow", weights=enlarge_fc, words="float32"),
    "too few positions": Planted("positions", {"max_position_embeddings": 64}, words="max_position_embeddings"),
}
