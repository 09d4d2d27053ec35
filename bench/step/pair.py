"""The pair whose steps are measured, and the bytes that a step of it must read."""

import harness
import torch
from random_pair import Pair, make_pair
from torch import nn

import dflash

PUBLISHED = 4.3e12  # bytes per second that reads reach on an H200 at best
TARGET_LAYERS = {"qwen3-8b": 36, "qwen3-0.6b": 28, "tiny": 6}


def named_pair(name: str, dtype: torch.dtype, device: torch.device) -> Pair:
    """Make the pair of random weights called ``name``."""
    size = (harness.MODELS | harness.TINY)[name]
    return make_pair(size, TARGET_LAYERS[name], dtype, device, tied=name == "qwen3-0.6b")


def floor_bytes(target: nn.Module, drafter: dflash.Drafter, context: int, batch: int) -> int:
    """Return the bytes a step must read: each layer's weights once, the head twice, the context's K/V once."""
    weights = [*target.model.layers.parameters(), *drafter.parameters(), *2 * [target.lm_head.weight]]
    ours, theirs = drafter.config, target.config
    kv = 2 * theirs.num_hidden_layers * theirs.num_key_value_heads * theirs.head_dim
    kv += 2 * ours.num_hidden_layers * ours.num_kv_heads * ours.head_dim
    return sum(w.nbytes for w in weights) + batch * context * kv * drafter.dtype.itemsize
