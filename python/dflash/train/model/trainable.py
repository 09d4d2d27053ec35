"""The drafter's forward pass in differentiable torch functions, for all blocks of all sequences at once.

The parameters are those of a `dflash.Drafter`. Its own forward pass uses kernels without gradients, a cache, and one
block per row. Here a block sees the context features before its anchor, and itself; blocks never see each other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...drafter import DraftConfig, Drafter
from .attention import ATTENTIONS
from .dflash2 import finish, prepare

__all__ = ["TrainableDrafter", "check_trainable"]


def check_trainable(config: DraftConfig) -> None:
    """Raise ``ValueError`` if a drafter has something that cannot be trained here. The message names it."""
    if config.attention_sinks:
        raise ValueError("a drafter with attention sinks cannot be trained: the differentiable attention has none")
    if config.markov_rank or config.predicts_from_anchor:
        raise ValueError(
            "a DSpark drafter cannot be trained: neither its Markov head nor an anchor's row that predicts "
            "(sample_from_anchor) has training here"
        )
    if own := config.own_parts:
        raise ValueError(f"a drafter with its own {', '.join(own)} cannot be trained: training uses the target's")
    if config.scales_like_target:
        raise ValueError("a Muse Glimmer assistant cannot be trained: training takes no multiplier from the target")
    if config.attention_value_scale != 1.0:
        raise ValueError("a drafter with attention_value_scale cannot be trained: the attention here has none")


class TrainableDrafter(nn.Module):
    """A drafter with gradients. Its parameters stay views of its packed tensors.

    Optimizers work in place, so the drafter's own forward pass uses each step's weights without a copy.

    Args:
        drafter: the drafter, in float32 for training. This module holds its parameters under ``drafter.``.
        attention: ``"flex"``, ``"sdpa"`` or ``"matmul"``, which give the same numbers. None chooses FlexAttention on
            CUDA and matrix products elsewhere.

    Raises:
        ValueError: see `check_trainable`, or ``attention`` is another word.
    """

    def __init__(self, drafter: Drafter, *, attention: str | None = None) -> None:
        super().__init__()
        check_trainable(drafter.config)
        if attention is not None and attention not in ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(ATTENTIONS)} or None, got {attention!r}")
        self.drafter = drafter.requires_grad_(True)
        self.attention = attention

    @property
    def config(self) -> DraftConfig:
        """The drafter's config."""
        return self.drafter.config

    def forward(self, context: Tensor, block_embeds: Tensor, anchors: Tensor) -> Tensor:
        """Return the hidden states of every slot of every block.

        Args:
            context: ``[batch, length, taps * hidden]``, the target's states at positions 0 .. length - 1.
            block_embeds: ``[batch, anchors, block, hidden]``, the target's raw embeddings of the blocks' tokens.
            anchors: ``[batch, anchors]`` int64, each block's first position.

        Returns:
            ``[batch, anchors, block, hidden]`` after the final norm. Slot k > 0 predicts the token at ``anchor + k``.
        """
        # 1. Fuse the target's states, and compute rotations
        drafter, config = self.drafter, self.drafter.config
        (count, block), length = block_embeds.shape[1:3], context.shape[1]
        make_mask, attend = ATTENTIONS[self.attention or ("flex" if context.is_cuda else "matmul")]
        features = _norm(drafter.hidden_norm, drafter.fc(context))
        slots = anchors[..., None] + torch.arange(block, device=anchors.device)
        block_rotation = _rotation(drafter, slots.flatten(1))
        context_rotation = _rotation(drafter, torch.arange(length, device=anchors.device)[None])
        # 2. Make one mask for each kind of layer
        masks = {}
        group = config.num_attention_heads // config.num_kv_heads
        for kind in set(zip(config.causal, config.window, strict=True)):
            masks[kind] = make_mask(anchors, length, block, *kind, group)
        # 3. Run the layers
        residual = drafter.scale_embeddings(block_embeds).flatten(1, 2)
        for layer, *kind in zip(drafter.layers, config.causal, config.window, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            attention_conv, mlp_conv = (getattr(layer, name, None) for name in ("attention_conv", "mlp_conv"))
            hidden, kernels = prepare(attention_conv, _norm(layer.input_layernorm, residual), block)
            q = _project(attention.q_proj, attention.q_norm, hidden, config.head_dim, block_rotation)
            k = _project(attention.k_proj, attention.k_norm, hidden, config.head_dim, block_rotation)
            context_k = _project(attention.k_proj, attention.k_norm, features, config.head_dim, context_rotation)
            v, context_v = (attention.v_proj(x).unflatten(-1, (-1, config.head_dim)) for x in (hidden, features))
            out = attend(q, k, v, context_k, context_v, masks[tuple(kind)], count)
            residual = residual + finish(attention_conv, attention.o_proj(out.flatten(2)), kernels)
            hidden, kernels = prepare(mlp_conv, _norm(layer.post_attention_layernorm, residual), block)
            out = mlp.down_proj(F.silu(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))
            residual = residual + finish(mlp_conv, out, kernels)
        return _norm(drafter.norm, residual).unflatten(1, (count, block))


def _project(linear: nn.Linear, norm: nn.RMSNorm, x: Tensor, head_dim: int, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys, ``[batch, rows, heads, head_dim]``, normalized and rotated."""
    return _rotate(_norm(norm, linear(x).unflatten(-1, (-1, head_dim))), rotation)


def _norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """Return RMSNorm, computed in float32, in the dtype of ``x``."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + module.eps).rsqrt() * module.weight).to(x.dtype)


def _rotation(drafter: Drafter, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``(cos, sin)`` of ``positions [batch, rows]``, each ``[batch, rows, 1, head_dim / 2]`` float32."""
    cos, sin = drafter.rotary(positions)
    return cos[:, :, None], sin[:, :, None]


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply half-split RoPE to ``x [batch, rows, heads, head_dim]``."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
