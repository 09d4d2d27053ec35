"""The pair."""

import harness
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import dflash

BLOCK, MASK, PUBLISHED = 16, 7, 4.3e12  # rows a step; any token; bytes a second
SIZES = harness.MODELS | harness.TINY
TARGET_LAYERS = {"qwen3-8b": 36, "qwen3-0.6b": 28, "tiny": 6}


def pair(name: str, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, dflash.Drafter, dict]:
    """A random target, a random drafter for it, and the drafter's ``config.json``."""
    torch.manual_seed(0)
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
    tied = name == "qwen3-0.6b"
    config = Qwen3Config(num_hidden_layers=layers, eos_token_id=None, pad_token_id=0, tie_word_embeddings=tied, **shape)
    with torch.device(device):
        target = Qwen3ForCausalLM._from_config(config, dtype=dtype).eval()
    apart = (layers - 4) / (size.taps - 1)
    draft = {
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
    drafter = dflash.Drafter(dflash.DraftConfig.from_config(draft), dtype=dtype, device=device).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    return target.requires_grad_(False), drafter, draft


def floor_bytes(target: nn.Module, drafter: dflash.Drafter, context: int, batch: int) -> int:
    """What a step cannot but read: every layer's weights once, the head twice, the K/V of the context once."""
    weights = [*target.model.layers.parameters(), *drafter.parameters(), *2 * [target.lm_head.weight]]
    c = target.config
    kv = sum(
        2 * layers * heads * width
        for layers, heads, width in (
            (c.num_hidden_layers, c.num_key_value_heads, c.head_dim),
            (drafter.config.num_hidden_layers, drafter.config.num_kv_heads, drafter.config.head_dim),
        )
    )
    return sum(w.nbytes for w in weights) + batch * context * kv * drafter.dtype.itemsize
