"""A stack of pre-norm decoder layers on `dflash.ops`, shared by the drafter and the fused target."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import ops
from .cache import KVCache, RecurrentCache
from .ops import BlockConv, DecoderLayer, DeltaNetLayer, PackedLayers, PackedWeight, Weight, reference
from .state import Tree


class AttentionInputs(NamedTuple):
    """Inputs of attention that are the same in every layer of one pass."""

    lengths: Tensor  # [batch], slots
    context: Tensor | None  # [batch, context_rows, hidden]
    num_context: Tensor | None  # [batch]
    cache: KVCache
    tree: Tree | None


def rotation(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Return ``(cos, sin)`` of ``positions [...]``, each ``[..., len(inv_freq)]`` float32."""
    angles = positions[..., None].float() * inv_freq.float()
    return angles.cos() * scaling, angles.sin() * scaling


class DecoderStack:
    """Decoder layers and the final norm: one op on the CPU for few rows, else op by op.

    A layer with attention is 9 launches then (13 with convolutions over the block), one with a Gated DeltaNet 10.
    With experts, or a weight whose columns are in another order, it always goes op by op. Context rows are put in front
    of the block's by whatever makes the input of q, k and v.

    Args:
        layers: the weights, used where they are.
        norm: ``[hidden]``, the final norm.
        eps: of every norm.
        scale: the factor on the attention scores.
        taps: layers whose outputs are returned; the last layer's is read after the final norm.
        zero_centered: the norms over hidden states and heads multiply by ``1 + weight``.
    """

    def __init__(
        self, layers: Sequence[DecoderLayer | DeltaNetLayer], norm: Tensor, *, eps: float, scale: float,
        taps: Sequence[int] = (), zero_centered: bool = False,
    ) -> None:  # fmt: skip
        self.layers, self.norm = tuple(layers), norm
        self.eps, self.scale, self.taps, self.zero_centered = eps, scale, tuple(taps), zero_centered
        self._options = {"eps": eps, "scale": scale, "taps": self.taps, "zero_centered": zero_centered}
        one_op = all(layer.is_plain for layer in self.layers)
        self._packed = PackedLayers(self.layers, norm, **self._options) if one_op else None
        self._attention_layers = [i for i, layer in enumerate(self.layers) if not layer.is_recurrent]

    def __reduce__(self) -> tuple:  # a copy packs its own tensors
        return functools.partial(DecoderStack, **self._options), (self.layers, self.norm)

    def replace(self, layers: Sequence[DecoderLayer], norm: Tensor) -> None:
        """Use other weights from now on, in steps that are compiled already too."""
        self.layers, self.norm = tuple(layers), norm
        if self._packed is not None:
            self._packed.replace(self.layers, norm)

    def refresh(self) -> None:
        """Check the weights again if one was replaced, reshaped, freed or negated (`is_neg`). 0.1 us per weight."""
        if self._packed is not None:
            self._packed.refresh()

    def __call__(
        self, hidden: Tensor, lengths: Tensor, cache: KVCache, context: Tensor | None = None,
        num_context: Tensor | None = None, tree: Tree | None = None, tapped: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run the layers over a block of rows and append its K/V.

        Args:
            hidden: ``[batch, rows, hidden]``; row i of sequence b is at position ``lengths[b] + i``.
            lengths: ``[batch]`` int64. CUDA kernels read it, ``num_context`` and ``tree`` early: see ``prefetch`` of
                `ops.qkv_norm_rope_append_`.
            cache: written at the rows' positions.
            context: ``[batch, context_rows, hidden]`` or None: rows that every layer takes K/V from as they are; row i
                is at ``lengths[b] - num_context[b] + i``.
            num_context: ``[batch]`` int64; rows at or past it are off.
            tree: which row continues which; None for a chain. Every layer must have causal attention.
            tapped: ``[batch, rows, taps * hidden]``, contiguous: where to write the taps; None for a new tensor.

        Returns:
            ``(out [batch, rows, hidden], tapped)``, ``out`` after the final norm.
        """
        rows = hidden.shape[1] + (0 if context is None else context.shape[1])
        lengths = lengths if cache.origin is None else lengths - cache.origin  # slots from here on
        if self.is_one_op(hidden.shape[0] * rows, hidden):
            keys = list(map(cache.keys.__getitem__, self._attention_layers))
            values = list(map(cache.values.__getitem__, self._attention_layers))
            recurrent = self._recurrent(cache) if isinstance(cache, RecurrentCache) else ()
            out, taps = ops.decoder_layers(
                hidden, context, num_context, lengths, *cache.rotary, keys, values, self._packed.handle, *recurrent,
                ancestors=None if tree is None else tree.ancestors, sequences=cache.sequences, origin=cache.origin,
                **dict(zip(("local_cos", "local_sin"), cache.local_rotary or (), strict=False)),
            )  # fmt: skip
            return out, taps if tapped is None else tapped.copy_(taps)
        if context is not None and context.device.type == "cpu":  # rows that are off may hold NaN: see reference.linear
            context = reference.live_rows(context, num_context)
        if tapped is None:
            tapped = hidden.new_empty(*hidden.shape[:2], len(self.taps) * hidden.shape[2])
        return self._op_by_op(hidden, AttentionInputs(lengths, context, num_context, cache, tree), tapped), tapped

    def is_one_op(self, rows: int, like: Tensor) -> bool:
        """Return True if a pass of so many rows ``like`` this tensor, of all sequences and contexts, is one op."""
        return self._packed is not None and like.device.type == "cpu" and ops.skinny(rows, like.dtype)

    def _recurrent(self, cache: RecurrentCache) -> tuple:
        """Return what `ops.decoder_layers` takes for recurrent layers."""
        held = [cache.recurrent[i] for i, layer in enumerate(self.layers) if layer.is_recurrent]
        windows, states = [x.window for x in held], [x.state for x in held]
        saved = [x.saved_k for x in held], [x.saved_d for x in held], [x.saved_a for x in held]
        return windows, states, *saved, cache.pending, cache.keep

    def _op_by_op(self, hidden: Tensor, inputs: AttentionInputs, tapped: Tensor) -> Tensor:
        """Run all layers. Returns ``hidden`` after the final norm."""
        size = hidden.shape[2]
        taps = {tap: tapped[..., i * size : (i + 1) * size] for i, tap in enumerate(self.taps)}
        last_tap = taps.pop(len(self.layers) - 1, None)  # read after the final norm
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        norm = (self.layers[0].input_norm, self.eps, None, self.zero_centered, self._front(0, inputs))
        residual, hidden = hidden, ops.rms_norm(hidden, *norm)
        for i, layer in enumerate(self.layers):
            # 1. The mixer: attention also takes the context's rows, in front
            hidden, kernels = _prepare(layer.attention_conv, hidden, inputs.context)
            if layer.is_recurrent:
                delta = self._delta_net(i, hidden, inputs.cache)
            else:
                delta = product(self._attention(i, hidden, inputs), layer.o, layer.o_bias)
            delta = self._out_norm(layer.attention_out_norm, delta)
            hidden, residual = self._add_norm(layer.attention_conv, delta, kernels, residual, layer.post_norm)
            # 2. MLP, whose residual sum is also the tap
            hidden, kernels = _prepare(layer.mlp_conv, hidden)
            delta = self._out_norm(layer.mlp_out_norm, _mlp(layer, hidden))
            norm = (norms[i], taps.get(i), self._front(i + 1, inputs))
            hidden, residual = self._add_norm(layer.mlp_conv, delta, kernels, residual, *norm)
        if last_tap is not None:
            last_tap.copy_(hidden)
        return hidden

    def _front(self, index: int, inputs: AttentionInputs) -> Tensor | None:
        """Return the rows that the norm before a layer's mixer, or the final norm, puts in front of its own."""
        last = index == len(self.layers)
        return None if last or self.layers[index].attention_conv is not None else inputs.context

    def _out_norm(self, weight: Tensor | None, delta: Tensor) -> Tensor:
        """Return a sublayer's output, after its norm if it has one."""
        return delta if weight is None else ops.rms_norm(delta, weight, self.eps, None, self.zero_centered)

    def _add_norm(
        self, conv: BlockConv | None, delta: Tensor, kernels: Tensor | None, residual: Tensor, weight: Tensor,
        tap: Tensor | None = None, front: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Add a sublayer's output ``delta``, convolved first if it has a convolution. Returns the norm and the sum."""
        norm = (residual, weight, self.eps, tap, self.zero_centered)
        if conv is None:
            return ops.add_rms_norm(delta, *norm, front)
        hidden, residual = ops.conv_add_rms_norm(delta, conv.base[1], kernels[:, :, 1], *norm)
        return hidden if front is None else torch.cat([front, hidden], 1), residual

    def _attention(self, index: int, rows_in: Tensor, inputs: AttentionInputs) -> Tensor:
        """Return ``[batch, rows, num_heads * head_dim]``, what the layer's o projection reads.

        ``rows_in`` is ``[batch, context_rows + rows, hidden]``.
        """
        layer, keys, values = self.layers[index], inputs.cache.keys[index], inputs.cache.values[index]
        context_rows, head_dim = 0 if inputs.context is None else inputs.context.shape[1], keys.shape[3]
        rows = rows_in.shape[1] - context_rows
        biases = () if layer.q_bias is None else (layer.q_bias, layer.k_bias, layer.v_bias)
        qkv = products(rows_in, (layer.q, layer.k, layer.v), biases)
        query = qkv.new_empty(qkv.shape[0], rows, layer.o.shape[1] // head_dim, head_dim)
        norms = (layer.q_norm, layer.k_norm, self.eps)
        rotary = inputs.cache.rotary if not layer.window else inputs.cache.local_rotary or inputs.cache.rotary
        ops.qkv_norm_rope_append_(
            qkv, inputs.lengths, inputs.num_context, None if inputs.tree is None else inputs.tree.depth,
            *rotary, *norms, query, keys, values, self.zero_centered, layer.gated, prefetch=True,
            origin=inputs.cache.origin,
        )  # fmt: skip
        attended = ops.block_attention(
            query, keys, values, inputs.lengths, self.scale, layer.causal, layer.window, 0.0, layer.sinks,
            None if inputs.tree is None else inputs.tree.ancestors, fresh=context_rows,
        )  # fmt: skip
        if layer.gated:
            gates = qkv[:, qkv.shape[1] - rows :, : layer.q.shape[0]].flatten(0, 1).unflatten(-1, (-1, 2, head_dim))
            attended = ops.sigmoid_mul(attended.flatten(0, 1), gates[:, :, 1]).view(attended.shape)
        return attended.flatten(2)

    def _delta_net(self, index: int, hidden: Tensor, cache: RecurrentCache) -> Tensor:
        layer, held, counts = self.layers[index], cache.recurrent[index], (cache.pending, cache.keep)
        key_heads, _, key_dim, _, _ = layer.sizes
        qkv, z, b, a = layer.split(products(hidden, layer.projections))
        qkv = ops.causal_conv_(qkv, layer.conv[:, 0], None, True, held.window, *counts)
        inputs = ops.delta_net_inputs(qkv, b, a, layer.a_log, layer.dt_bias, key_heads, key_dim)
        out = ops.gated_recurrence_(*inputs, held.state, held.saved_k, held.saved_d, held.saved_a, *counts)
        return product(ops.gated_rms_norm(out, z, layer.norm, self.eps), layer.out)


def _prepare(conv: BlockConv | None, hidden: Tensor, front: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return what a sublayer reads in place of ``hidden``, and the kernels of each row.

    Without a convolution ``hidden`` has the rows of ``front`` already. All are ``[batch, rows, hidden]``.
    """
    if conv is None:
        return hidden, None
    kernels = ops.linear(hidden, conv.projection).unflatten(-1, (2, conv.base.shape[1], -1))
    return ops.dynamic_conv(hidden, conv.base[0], kernels[:, :, 0], front), kernels


def _mlp(layer: DecoderLayer | DeltaNetLayer, hidden: Tensor) -> Tensor:
    if layer.experts is not None:
        return layer.experts(hidden)
    if layer.gate_kind != "silu" or not _are_alike(layer.gate, layer.up):
        return product(ops.silu_mul(products(hidden, (layer.gate, layer.up)), layer.gate_kind), layer.down)
    (gate, up), *stored = split_weights(layer.gate, layer.up)
    return product(ops.swiglu(_ordered(hidden, layer.gate), gate, up, True, *stored), layer.down)


def products(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor] = ()) -> Tensor:
    """Return `ops.linears` of weights in any formats, which no kernel writes: ``[rows.., sum of out]``."""
    if not _are_alike(*weights):
        every = zip(weights, biases or [None] * len(weights), strict=True)
        return torch.cat([product(x, weight, bias) for weight, bias in every], -1)
    values, *stored = split_weights(*weights)
    return ops.linears(_ordered(x, weights[0]), values, biases, True, *stored)


def product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return `ops.linear` of a weight in any format, which no kernel writes."""
    (values,), *stored = split_weights(weight)
    return ops.linear(_ordered(x, weight), values, bias, True, *stored)


def _are_alike(*weights: Weight) -> bool:
    """Return True if one op multiplies rows by all weights: they have one format, and share an order of columns."""
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if len(packed) < len(weights):
        return not packed
    return all(weight.format == packed[0].format and weight.order is packed[0].order for weight in packed)


def _ordered(x: Tensor, weight: Weight) -> Tensor:
    """Return the elements of rows ``[rows.., in]`` in the order of a weight's columns."""
    return x if isinstance(weight, Tensor) or weight.order is None else x.gather(-1, weight.order.expand_as(x))


def split_weights(*weights: Weight) -> tuple[list[Tensor], Tensor | None, str]:
    """Return what `linears` takes as ``weights``, ``scales`` and ``format``. All must have the same format."""
    packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
    if not packed:
        return list(weights), None, "dense"
    formats = [weight.format for weight in packed]
    if len(packed) < len(weights) or len(set(formats)) > 1:
        raise TypeError(f"weights of one product must have one format, got {', '.join(formats)} for {len(weights)}")
    scales = [weight.scales for weight in packed if weight.scales is not None]
    joined = None if not scales else scales[0] if len(scales) == 1 else torch.cat(scales)
    return [weight.packed for weight in packed], joined, formats[0]
