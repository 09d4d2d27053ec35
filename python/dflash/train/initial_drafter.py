"""Create a new drafter for a target: shape, taps, mask token and initial weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..drafter import DraftConfig, Drafter
from ..drafter.config import ROPE_TYPES, Rope, build_target_layer_ids, read_rope
from ..targets import text_config, unwrap
from .model import add_dflash2


def choose_mask_id(target: nn.Module, tokenizer: Any = None, mask_token_id: int | None = None) -> int:
    """Return the mask token: ``mask_token_id``, else the tokenizer's, else an embedding row past the tokenizer's ids.

    Raises:
        ValueError: no mask token can be found, or ``mask_token_id`` has no embedding.
    """
    rows = unwrap(target).get_input_embeddings().weight.shape[0]
    if mask_token_id is not None:
        if not 0 <= mask_token_id < rows:
            raise ValueError(
                f"mask_token_id must be one of the target's embedding rows, 0 .. {rows - 1}, got {mask_token_id}"
            )
        return mask_token_id
    if tokenizer is not None:
        own, unused = getattr(tokenizer, "mask_token_id", None), max(tokenizer.get_vocab().values(), default=-1) + 1
        for found in (own, unused):
            if found is not None and found < rows:
                return found
    raise ValueError(
        "no mask token: the tokenizer has none and every embedding row is in use; name a token that the target "
        "never emits (--mask-token-id)"
    )


def _rope(config: Any) -> Rope:
    """Return the target's RoPE if drafters support it, else default RoPE with the target's theta."""
    given = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in given.values()):
        given = given.get("full_attention") or next(value for value in given.values() if isinstance(value, dict))
    theta = given.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    partial = given.get("partial_rotary_factor") not in (None, 1.0)
    if given.get("rope_type", "default") in ROPE_TYPES.keys() - {"default"} and not partial:
        longest = getattr(config, "max_position_embeddings", None)
        given = {"rope_parameters": given, "rope_theta": theta, "max_position_embeddings": longest}
        return read_rope(given, {}, 2)  # what it keeps does not depend on the width of a head
    return Rope(theta=float(theta))


def draft_config(
    target: nn.Module,
    *,
    mask_token_id: int,
    num_layers: int = 5,
    block_size: int = 16,
    target_layer_ids: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    sliding_window: int = 0,
) -> DraftConfig:
    """Return the config of a drafter as wide as ``target``, with the same heads, RoPE and scales.

    Args:
        target: a causal language model of transformers.
        mask_token_id: see `choose_mask_id`.
        num_layers: number of draft layers.
        block_size: tokens per block, the anchor included; at least 2.
        target_layer_ids: tapped layers; None for the published rule (`dflash.drafter.build_target_layer_ids`).
        intermediate_size: width of the MLP; None for the target's.
        sliding_window: window of all layers but the last, which are then causal inside the block; 0 for none.

    Raises:
        ValueError: a number is out of range. The message names it.
    """
    # 1. Check the numbers
    model = unwrap(target)
    config = text_config(model)
    total = config.num_hidden_layers
    limits = [("layers", num_layers, 1), ("block size", block_size, 2), ("sliding window", sliding_window, 0)]
    for name, value, least in [*limits, ("intermediate size", intermediate_size, 1)]:
        if value is not None and value < least:
            raise ValueError(f"the drafter's {name} must be at least {least}, got {value}")
    taps = tuple(build_target_layer_ids(total, num_layers) if target_layer_ids is None else target_layer_ids)
    if not taps or min(taps) < 0 or max(taps) >= total:
        raise ValueError(f"target_layer_ids must be layers of the target, 0 .. {total - 1}, got {list(taps)}")
    # 2. Copy everything else from the target
    first = (getattr(config, "per_layer_config", None) or [config])[0]  # Gemma 4's layers have a config each
    width = intermediate_size or getattr(first, "intermediate_size", None) or 3 * config.hidden_size
    heads = first.num_attention_heads
    kv_heads = getattr(first, "num_key_value_heads", None) or heads
    # The factor on the embeddings is in the module (Gemma) or in the forward pass (Granite)
    embedding = model.get_input_embeddings()
    factors = (embedding, "scalar_embed_scale"), (embedding, "embed_scale"), (config, "embedding_multiplier")
    scale, multiplier = _first_of(*factors), _first_of((config, "logit_scale"), (config, "lm_head_multiplier"))
    if multiplier is None:
        multiplier = 1 / (getattr(config, "logits_scaling", None) or 1.0)
    windowed = [sliding_window > 0 and i < num_layers - 1 for i in range(num_layers)]
    return DraftConfig(
        hidden_size=config.hidden_size,
        intermediate_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=getattr(first, "head_dim", None) or config.hidden_size // heads,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        causal=tuple(windowed),
        window=tuple(sliding_window if one else 0 for one in windowed),
        rope=_rope(config),
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        input_embedding_scale=1.0 if scale is None else float(scale),
        output_multiplier=float(multiplier),
        final_logit_softcapping=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        vocab_size=config.vocab_size,
        num_target_layers=total,
        max_position_embeddings=getattr(config, "max_position_embeddings", None),
    )


def _first_of(*places: tuple[Any, str]) -> Any:
    """Return the first of these attributes that is there and not None."""
    return next((value for owner, name in places if (value := getattr(owner, name, None)) is not None), None)


@torch.no_grad()
def new_drafter(config: DraftConfig, *, seed: int = 0, device: torch.device | str = "cpu") -> Drafter:
    """Return a float32 drafter with random weights; the same seed gives the same ones.

    Norms are 1 and biases 0. Matrices are normal with deviation ``1 / sqrt(inputs)``; those that write to the residual
    stream are smaller by ``sqrt(2 * layers)``. What DFlash 2 adds starts as in `add_dflash2`.
    """
    if config.dflash2 is not None:
        first = new_drafter(dataclasses.replace(config, dflash2=None), seed=seed, device=device)
        return add_dflash2(first, config.dflash2, seed=seed)
    drafter = Drafter(config, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = parameter.shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= (2 * config.num_hidden_layers) ** 0.5
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32, device="cpu") * std)
    return drafter
