"""A Qwen3 or Qwen3.5 target and a DFlash drafter for it, with random weights."""

import copy
from typing import NamedTuple

import torch
from harness import Model
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM

import dflash

BLOCK, MASK = 16, 1  # rows per step; any token


class Pair(NamedTuple):
    """A target, a drafter for it, and the drafter's ``config.json``."""

    target: nn.Module
    drafter: dflash.Drafter
    draft_config: dict


def make_pair(
    size: Model,
    target_layers: int,
    dtype: torch.dtype,
    device: torch.device,
    tied: bool = False,
    pattern: str = "full",
) -> Pair:
    """Make a pair on ``device``.

    Args:
        size: hidden sizes of both; layers and taps of the drafter.
        target_layers: layers of the target.
        dtype: of both.
        device: of both.
        tied: whether the target's head is its embedding.
        pattern: "full" for a Qwen3; "qwen3_5" for a Qwen3.5, three layers with a Gated DeltaNet to one with attention,
            whose heads are as in the 9B: of 128, values as wide as the hidden states, keys half as wide;
            "qwen3_5_full" for a Qwen3.5 with attention, whose output has a gate, in every layer.
    """
    torch.manual_seed(0)
    # 1. The shape that both share
    shape = {
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    # 2. The target
    with torch.device(device):
        target = _target(size, target_layers, dtype, {"tie_word_embeddings": tied, **shape}, pattern)
    # 3. The drafter, with its taps spread evenly over the target's layers
    apart = (target_layers - 4) / (size.taps - 1) if size.taps > 1 else 0
    first = min(1, target_layers - 1)
    draft_config = {
        **shape,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": size.layers,
        "num_target_layers": target_layers,
        "layer_types": ["full_attention"] * size.layers,
        "block_size": BLOCK,
        "attention_bias": False,
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [first + round(i * apart) for i in range(size.taps)],
        },
    }
    drafter = dflash.Drafter(dflash.DraftConfig.from_config(draft_config), dtype=dtype, device=device).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    return Pair(target.requires_grad_(False), drafter, draft_config)


def _target(size: Model, layers: int, dtype: torch.dtype, shape: dict, pattern: str) -> nn.Module:
    options = {"num_hidden_layers": layers, "eos_token_id": None, "pad_token_id": 0, **copy.deepcopy(shape)}
    if pattern == "full":
        return Qwen3ForCausalLM._from_config(Qwen3Config(**options), dtype=dtype).eval()
    if pattern == "qwen3_5_full":
        options["layer_types"] = ["full_attention"] * layers
    options["linear_num_value_heads"], options["linear_num_key_heads"] = size.hidden // 128, max(size.hidden // 256, 1)
    return Qwen3_5ForCausalLM._from_config(Qwen3_5TextConfig(**options), dtype=dtype).eval()
