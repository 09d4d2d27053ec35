"""The drafter's forward pass through differentiable torch functions, all blocks of all sequences at once.

The parameters are those of a :class:`~dflash.Drafter`; its own forward runs on kernels that know no gradient, a cache,
and one block a row. Here a block sees the context features strictly before its anchor, and itself; blocks never meet.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...drafter import DraftConfig, Drafter
from .attention import _ATTENTIONS

__all__ = ["TrainableDrafter"]


class TrainableDrafter(nn.Module):
    """``drafter``, with gradients: its parameters are switched on, and stay views of its packed tensors.

    Optimizers work in place, so the drafter's own forward uses each step's weights without a copy.

    Args:
        drafter: in float32, for training; its parameters are this module's, under ``drafter.``.
        attention: ``"flex"``, ``"sdpa"`` or ``"matmul"``, the same numbers; None for FlexAttention on CUDA and plain
            matrix products elsewhere.

    Raises:
        ValueError: the drafter has attention sinks, which the differentiable functions do not take.
    """

    def __init__(self, drafter: Drafter, *, attention: str | None = None) -> None:
        super().__init__()
        if drafter.config.attention_sinks:
            raise ValueError("a drafter with attention sinks cannot be trained: the differentiable attention has none")
        if attention is not None and attention not in _ATTENTIONS:
            raise ValueError(f"attention must be one of {', '.join(_ATTENTIONS)} or None, got {attention!r}")
        self.drafter = drafter.requires_grad_(True)
        self.attention = attention

    @property
    def config(self) -> DraftConfig:
        return self.drafter.config

    def forward(self, context: Tensor, block_embeds: Tensor, anchors: Tensor) -> Tensor:
        """Hidden states of every slot of every block.

        Args:
            context: ``[batch, length, taps * hidden]``, the target's states at positions 0 .. length - 1.
            block_embeds: ``[batch, anchors, block, hidden]``, the target's raw embeddings of the blocks' tokens.
            anchors: ``[batch, anchors]`` int64, each block's first position.

        Returns:
            ``[batch, anchors, block, hidden]`` past the final norm; slot k > 0 predicts the token at ``anchor + k``.
        """
        drafter, config = self.drafter, self.drafter.config
        (count, block), length = block_embeds.shape[1:3], context.shape[1]
        heads, kv_heads, dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
        mask, attend = _ATTENTIONS[self.attention or ("flex" if context.is_cuda else "matmul")]
        features = _norm(drafter.hidden_norm, drafter.fc(context))
        slots = anchors[..., None] + torch.arange(block, device=anchors.device)
        ahead = _rotation(drafter, slots.flatten(1))
        behind = _rotation(drafter, torch.arange(length, device=anchors.device)[None])
        masks = {}
        for kind in set(zip(config.causal, config.window, strict=True)):
            masks[kind] = mask(anchors, length, block, *kind, heads // kv_heads)
        residual = drafter.scale_embeddings(block_embeds).flatten(1, 2)
        for i, layer in enumerate(drafter.layers):
            own, mlp = layer.self_attn, layer.mlp
            hidden = _norm(layer.input_layernorm, residual)
            q, k, v = own.q_proj(hidden), own.k_proj(hidden), own.v_proj(hidden)
            before_k, before_v = own.k_proj(features), own.v_proj(features)
            q = _rotate(_norm(own.q_norm, q.unflatten(-1, (heads, dim))), ahead)
            k = _rotate(_norm(own.k_norm, k.unflatten(-1, (kv_heads, dim))), ahead)
            before_k = _rotate(_norm(own.k_norm, before_k.unflatten(-1, (kv_heads, dim))), behind)
            v, before_v = v.unflatten(-1, (kv_heads, dim)), before_v.unflatten(-1, (kv_heads, dim))
            out = attend(q, k, v, before_k, before_v, masks[config.causal[i], config.window[i]], count)
            residual = residual + own.o_proj(out.flatten(2))
            hidden = _norm(layer.post_attention_layernorm, residual)
            residual = residual + mlp.down_proj(F.silu(mlp.gate_proj(hidden)) * mlp.up_proj(hidden))
        return _norm(drafter.norm, residual).unflatten(1, (count, block))


def _norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """RMSNorm in float32, in the dtype of ``x``."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + module.eps).rsqrt() * module.weight).to(x.dtype)


def _rotation(drafter: Drafter, positions: Tensor) -> tuple[Tensor, Tensor]:
    """``(cos, sin)`` of ``positions [batch, rows]``, each ``[batch, rows, 1, head_dim / 2]`` float32."""
    cos, sin = drafter.rotary(positions)
    return cos[:, :, None], sin[:, :, None]


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of the half-split kind on ``x [batch, rows, heads, head_dim]``."""
    cos, sin = rotation
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
