"""`dflash.ops.decoder_layers` in plain torch: the oracle of its tests, op by op on `dflash.ops.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash.decoder import split_weights
from dflash.ops import Weight, reference


def _product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """``linear`` with a weight in any format."""
    (values,), *stored = split_weights(weight)
    return reference.linear(x, values, bias, False, *stored)


def decoder_layers(
    hidden: Tensor, context: Tensor | None, num_context: Tensor | None, lengths: Tensor, cos: Tensor, sin: Tensor,
    k_caches: list[Tensor], v_caches: list[Tensor], layers: list | tuple, norm: Tensor, eps: float, scale: float,
    taps: list[int] | tuple[int, ...], windows: list[Tensor] | tuple = (), states: list[Tensor] | tuple = (),
    saved_k: list[Tensor] | tuple = (), saved_d: list[Tensor] | tuple = (), saved_a: list[Tensor] | tuple = (),
    pending: Tensor | None = None, keep: Tensor | None = None, ancestors: Tensor | None = None,
    zero_centered: bool = False, origin: Tensor | None = None, local_cos: Tensor | None = None,
    local_sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Pre-norm decoder layers (``DecoderLayer`` and ``DeltaNetLayer`` of weights.py) and the final norm."""
    batch, rows, _ = hidden.shape
    capacity, head_dim = k_caches[0].shape[2:]
    lengths = lengths.clamp(-rows, 2 * capacity + rows)
    context = context if context is None else reference.live_rows(context, num_context)
    depth = None
    if ancestors is not None:
        depth = reference.visible(torch.zeros_like(lengths), rows, rows, ancestors=ancestors).sum(-1) - 1
    residual, tapped = hidden, {}
    attention = zip(k_caches, v_caches, strict=True)
    recurrent = zip(windows, states, saved_k, saved_d, saved_a, strict=True)
    for i, layer in enumerate(layers):
        normed = reference.rms_norm(residual, layer.input_norm, eps, None, zero_centered)
        normed, kernels = _convolve_input(normed, layer.attention_conv)
        if layer.is_recurrent:
            delta = _delta_net(normed, layer, eps, *next(recurrent), pending, keep)
        else:
            k_cache, v_cache = next(attention)
            x = normed if context is None else torch.cat([context, normed], 1)
            projections = ((layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias))
            qkv = torch.cat([_product(x, weight, bias) for weight, bias in projections], -1)
            queries = hidden.new_empty(batch, rows, layer.o.shape[1] // head_dim, head_dim)
            norms, written = (layer.q_norm, layer.k_norm, eps), (queries, k_cache, v_cache)
            rotary = (cos, sin) if local_cos is None or not layer.window else (local_cos, local_sin)
            places = (lengths, num_context, depth, *rotary)
            options = {"zero_centered": zero_centered, "gated": layer.gated, "origin": origin}
            reference.qkv_norm_rope_append_(qkv, *places, *norms, *written, **options)
            out = reference.block_attention(
                queries, k_cache, v_cache, lengths, scale, layer.causal, layer.window, 0.0, layer.sinks, ancestors
            )
            if layer.gated:
                gates = qkv[:, -rows:, : layer.q.shape[0]].unflatten(-1, (-1, 2, head_dim))[..., 1, :]
                out = reference.sigmoid_mul(out, gates)
            delta = _product(out.flatten(2), layer.o, layer.o_bias)
        if layer.attention_out_norm is not None:
            delta = reference.rms_norm(delta, layer.attention_out_norm, eps, None, zero_centered)
        delta = _convolve_output(delta, layer.attention_conv, kernels)
        normed, residual = reference.add_rms_norm(delta, residual, layer.post_norm, eps, None, zero_centered)
        normed, kernels = _convolve_input(normed, layer.mlp_conv)
        gate_up = torch.cat([_product(normed, layer.gate), _product(normed, layer.up)], -1)
        delta = _product(reference.silu_mul(gate_up, layer.gate_kind), layer.down)
        if layer.mlp_out_norm is not None:
            delta = reference.rms_norm(delta, layer.mlp_out_norm, eps, None, zero_centered)
        tapped[i] = residual = residual + _convolve_output(delta, layer.mlp_conv, kernels)
    out = tapped[len(layers) - 1] = reference.rms_norm(residual, norm, eps, None, zero_centered)
    empty = hidden.new_empty(batch, rows, 0)
    return out.clone(), torch.cat([empty, *(tapped[tap] for tap in taps)], -1)


def _convolve_input(x: Tensor, conv: object) -> tuple[Tensor, Tensor | None]:
    if conv is None:
        return x, None
    kernels = reference.linear(x, conv.projection).unflatten(-1, (2, conv.base.shape[1], -1))
    return reference.dynamic_conv(x, conv.base[0], kernels[:, :, 0]), kernels


def _convolve_output(x: Tensor, conv: object, kernels: Tensor | None) -> Tensor:
    return x if conv is None else reference.dynamic_conv(x, conv.base[1], kernels[:, :, 1])


def _delta_net(
    x: Tensor, layer: object, eps: float, window: Tensor, state: Tensor, saved_k: Tensor, saved_d: Tensor,
    saved_a: Tensor, pending: Tensor, keep: Tensor,
) -> Tensor:  # fmt: skip
    """A Gated DeltaNet (``DeltaNetLayer`` of weights.py)."""
    key_heads, key_dim = saved_k.shape[2:]
    qkv, z, b, a = layer.split(torch.cat([_product(x, weight) for weight in layer.projections], -1))
    qkv = reference.causal_conv_(qkv, layer.conv[:, 0], None, True, window, pending, keep)
    q, k, v, log_decay, beta = reference.delta_net_inputs(qkv, b, a, layer.a_log, layer.dt_bias, key_heads, key_dim)
    saved = (state, saved_k, saved_d, saved_a)
    out = reference.gated_recurrence_(q, k, v, log_decay, beta, *saved, pending, keep)
    return _product(reference.gated_rms_norm(out, z, layer.norm, eps), layer.out)
