"""The random target and drafter, and the least that a step of theirs reads."""

from typing import NamedTuple

import harness
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import dflash

BLOCK, MASK = 16, 7  # rows per step; any token
PUBLISHED = 4.3e12  # bytes per second, an H200's bandwidth as published measurements have it
SIZES = harness.MODELS | harness.TINY
TARGET_LAYERS = {"qwen3-8b": 36, "qwen3-0.6b": 28, "tiny": 6}


class Pair(NamedTuple):
    """A target, a drafter for it, and the drafter's ``config.json``."""

    target: nn.Module
    drafter: dflash.Drafter
    draft_config: dict


def make_pair(name: str, dtype: torch.dtype, device: torch.device) -> Pair:
    """Make a pair of random weights on ``device``."""
    torch.manual_seed(0)
    # 1. The shape that both share
    size, layers = SIZES[name], TARGET_LAYERS[name]
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
    tied = name == "qwen3-0.6b"
    config = Qwen3Config(num_hidden_layers=layers, eos_token_id=None, pad_token_id=0, tie_word_embeddings=tied, **shape)
    with torch.device(device):
        target = Qwen3ForCausalLM._from_config(config, dtype=dtype).eval()
    # 3. The drafter, with its taps spread evenly over the target's layers
    apart = (layers - 4) / (size.taps - 1)
    draft_config = {
        **shape,
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": size.layers,
        "num_target_layers": layers,
        "layer_types": ["full_attention"] * size.layers,
        "block_size": BLOCK,
        "attention_bias": False,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1 + round(i * apart) for i in range(size.taps)]},
    }
    drafter = dflash.Drafter(dflash.DraftConfig.from_config(draft_config), dtype=dtype, device=device).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    return Pair(target.requires_grad_(False), drafter, draft_config)


def floor_bytes(target: nn.Module, drafter: dflash.Drafter, context: int, batch: int) -> int:
    """Return the bytes a step must read: each layer's weights once, the head twice, the context's K/V once."""
    weights = [*target.model.layers.parameters(), *drafter.parameters(), *2 * [target.lm_head.weight]]
    ours, theirs = drafter.config, target.config
    kv = 2 * theirs.num_hidden_layers * theirs.num_key_value_heads * theirs.head_dim
    kv += 2 * ours.num_hidden_layers * ours.num_kv_heads * ours.head_dim
    return sum(w.nbytes for w in weights) + batch * context * kv * drafter.dtype.itemsize
