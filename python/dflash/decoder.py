"""A stack of pre-norm decoder layers on `dflash.ops`, shared by the drafter and the fused target."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from . import ops
from .ops import DecoderLayer, PackedLayers

__all__ = ["DecoderLayer", "DecoderStack", "rotary_table"]


class Cache(Protocol):
    """What a stack reads of a K/V cache."""

    keys: Sequence[Tensor]  # per layer [batch, num_kv_heads, capacity, head_dim]
    values: Sequence[Tensor]
    rotary: tuple[Tensor, Tensor]  # cos and sin, each [positions, rotary / 2]
    capacity: int


def rotary_table(inv_freq: Tensor, scaling: float, positions: int) -> tuple[Tensor, Tensor]:
    """Return ``(cos, sin)``, each ``[positions, len(inv_freq)]`` float32, of positions 0, 1, ..."""
    angles = torch.arange(positions, device=inv_freq.device)[:, None].float() * inv_freq.float()
    return angles.cos() * scaling, angles.sin() * scaling


class DecoderStack:
    """Decoder layers and the final norm: one op on the CPU for few rows, else op by op (9 launches per layer).

    Args:
        layers: the weights, used where they are.
        norm: ``[hidden]``, the final norm.
        eps: of every norm.
        scale: the factor on the attention scores.
        taps: layers whose outputs are returned; the last layer's is read after the final norm.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer], norm: Tensor, *, eps: float, scale: float, taps: Sequence[int] = ()
    ) -> None:
        self.layers, self.norm = tuple(layers), norm
        self.eps, self.scale, self.taps = eps, scale, tuple(taps)
        self._packed = PackedLayers(self.layers, norm, eps=eps, scale=scale, taps=self.taps)

    def __reduce__(self) -> tuple:  # a copy packs its own tensors
        options = {"eps": self.eps, "scale": self.scale, "taps": self.taps}
        return functools.partial(DecoderStack, **options), (self.layers, self.norm)

    def holds(self, layers: Sequence[DecoderLayer], norm: Tensor) -> bool:
        """Return True if these are the very tensors that the stack runs."""
        mine, theirs = (*self.layers, (self.norm,)), (*layers, (norm,))
        pairs = [pair for ours, others in zip(mine, theirs, strict=True) for pair in zip(ours, others, strict=True)]
        return all(a is b or (not isinstance(a, Tensor) and a == b) for a, b in pairs)

    def replace(self, layers: Sequence[DecoderLayer], norm: Tensor) -> None:
        """Use other weights from now on, in steps that are compiled already too."""
        self.layers, self.norm = tuple(layers), norm
        self._packed.replace(self.layers, norm)

    def refresh(self) -> None:
        """Check the weights again if one was replaced, reshaped, freed or negated (`is_neg`). 0.1 us per weight."""
        self._packed.refresh()

    def __call__(
        self, hidden: Tensor, lengths: Tensor, cache: Cache, context: Tensor | None = None,
        num_context: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the layers over a block of rows and append its K/V.

        Args:
            hidden: ``[batch, rows, hidden]``; row i of sequence b is at position ``lengths[b] + i``.
            lengths: ``[batch]`` int64.
            cache: written at the rows' positions.
            context: ``[batch, context_rows, hidden]`` or None: rows that every layer takes K/V from as they are; row i
                is at ``lengths[b] - num_context[b] + i``.
            num_context: ``[batch]`` int64; rows at or past it are off.

        Returns:
            ``(out [batch, rows, hidden], tapped [batch, rows, taps * hidden])``, ``out`` after the final norm.
        """
        rows = hidden.shape[1] + (0 if context is None else context.shape[1])
        if hidden.device.type == "cpu" and ops.skinny(hidden.shape[0] * rows, hidden.dtype):
            indices = range(len(self.layers))
            return ops.decoder_layers(
                hidden, context, num_context, lengths, *cache.rotary, [cache.keys[i] for i in indices],
                [cache.values[i] for i in indices], self._packed.handle,
            )  # fmt: skip
        return self._op_by_op(hidden, lengths, cache, context, num_context)

    def _op_by_op(
        self, hidden: Tensor, lengths: Tensor, cache: Cache, context: Tensor | None, num_context: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        # 1. Positions and angles, one row for each of the context's and the block's
        eps, (batch, rows, size) = self.eps, hidden.shape
        positions = _positions(lengths, rows, context, num_context)
        if context is not None and context.device.type == "cpu":  # rows that are off may hold NaN: see reference.linear
            context = torch.where(positions[:, : context.shape[1], None] < 0, 0, context)
        at = positions.clamp(0, cache.rotary[0].shape[0] - 1)  # rows that are off, or past the end, append nothing
        cos, sin = (table[at] for table in cache.rotary)
        tapped = hidden.new_empty(batch, rows, len(self.taps) * size)
        columns = {tap: tapped[..., i * size : (i + 1) * size] for i, tap in enumerate(self.taps)}
        residual, hidden = hidden, ops.rms_norm(hidden, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            # 2. Attention: q, k and v in one product, the context's rows in front
            rows_in = hidden if context is None else torch.cat([context, hidden], 1)
            qkv = ops.linears(rows_in, (layer.q, layer.k, layer.v), _qkv_biases(layer), prefetch=True)
            head_dim = cache.keys[i].shape[3]
            query = qkv.new_empty(batch, rows, layer.q.shape[0] // head_dim, head_dim)
            ops.qkv_norm_rope_append_(
                qkv, positions, cos, sin, layer.q_norm, layer.k_norm, eps, query, cache.keys[i], cache.values[i]
            )
            attended = ops.block_attention(
                query, cache.keys[i], cache.values[i], lengths, self.scale, layer.causal, layer.window, 0.0,
                layer.sinks, None,
            )  # fmt: skip
            delta = ops.linear(attended.flatten(2), layer.o, layer.o_bias, prefetch=True)
            hidden, residual = ops.add_rms_norm(delta, residual, layer.post_norm, eps)
            # 3. MLP, whose residual sum is also the tap
            gate_up = ops.linears(hidden, (layer.gate, layer.up), prefetch=True)
            delta = ops.linear(ops.silu_mul(gate_up), layer.down, prefetch=True)
            last = i + 1 == len(self.layers)
            following = self.norm if last else self.layers[i + 1].input_norm
            hidden, residual = ops.add_rms_norm(delta, residual, following, eps, None if last else columns.get(i))
        if len(self.layers) - 1 in columns:
            columns[len(self.layers) - 1].copy_(hidden)
        return hidden, tapped


def _positions(lengths: Tensor, rows: int, context: Tensor | None, num_context: Tensor | None) -> Tensor:
    """``[batch, context_rows + rows]``: the position of each row, -1 for context rows that are off."""
    ahead = lengths[:, None] + torch.arange(rows, device=lengths.device)
    if context is None:
        return ahead
    index = torch.arange(context.shape[1], device=lengths.device)
    before = torch.where(index < num_context[:, None], (lengths - num_context)[:, None] + index, -1)
    return torch.cat([before, ahead], 1)


def _qkv_biases(layer: DecoderLayer) -> tuple[Tensor, ...]:
    return () if layer.q_bias is None else (layer.q_bias, layer.k_bias, layer.v_bias)
