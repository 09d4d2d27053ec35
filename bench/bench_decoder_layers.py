"""``ops.decoder_layers``, one layer and the final norm, against the same layer in plain torch functions.

The plain layer is what transformers' Qwen3 runs with a static cache and SDPA, without its modules: ``F.rms_norm``,
``F.linear``, RoPE, ``index_copy_``, SDPA under a mask made beforehand. With the convolutions of a DFlash 2 drafter, the
sums over shifted copies of bench_dynamic_conv.py.
"""

import torch
import torch.nn.functional as F
from bench_dynamic_conv import SIZE, WIDTH, shifted
from harness import Case, full_width, main, rotate

from dflash import ops
from dflash.ops import BlockConv, DecoderLayer, PackedLayers


def prepare(conv, x):
    """Return what a sublayer reads, and a function of its output."""
    if conv is None:
        return x, lambda delta: delta
    kernels = F.linear(x, conv.projection).unflatten(-1, (2, WIDTH, -1))
    return shifted(x, conv.base[0], kernels[:, :, 0]), lambda delta: shifted(delta, conv.base[1], kernels[:, :, 1])


def plain(hidden, lengths, cos, sin, packed, k_cache, v_cache, positions, wide, mask):
    layer, norm = packed.layers[0], packed.norm
    head_dim, keys = k_cache.shape[-1], mask.shape[-1]

    def heads(x, weight, head_norm=None):
        x = F.linear(x, weight).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        return x if head_norm is None else rotate(F.rms_norm(x, head_norm.shape, head_norm, 1e-6), *wide)

    normed, finish = prepare(layer.attention_conv, F.rms_norm(hidden, layer.input_norm.shape, layer.input_norm, 1e-6))
    queries = heads(normed, layer.q, layer.q_norm)
    k_cache.index_copy_(2, positions[0], heads(normed, layer.k, layer.k_norm))
    v_cache.index_copy_(2, positions[0], heads(normed, layer.v))
    live = k_cache[:, :, :keys], v_cache[:, :, :keys]
    attended = F.scaled_dot_product_attention(queries, *live, mask, enable_gqa=True).transpose(1, 2).flatten(2)
    hidden = hidden + finish(F.linear(attended, layer.o))
    normed, finish = prepare(layer.mlp_conv, F.rms_norm(hidden, layer.post_norm.shape, layer.post_norm, 1e-6))
    hidden = hidden + finish(F.linear(F.silu(F.linear(normed, layer.gate)) * F.linear(normed, layer.up), layer.down))
    return F.rms_norm(hidden, norm.shape, norm, 1e-6)


def ours(hidden, lengths, cos, sin, packed, k_cache, v_cache, positions, wide, mask):
    return ops.decoder_layers(hidden, None, None, lengths, cos, sin, [k_cache], [v_cache], packed.handle)


def cases(o):
    for name, m in o.models.items():
        rows = min(o.rows)
        for context, has_convs in [*((context, False) for context in o.contexts[:2]), (o.contexts[0], True)]:
            q, kv, keys = m.heads * m.head_dim, m.kv_heads * m.head_dim, context + rows

            def make(m=m, rows=rows, context=context, q=q, kv=kv, keys=keys, has_convs=has_convs):
                shapes = [(m.hidden,), (q, m.hidden), (kv, m.hidden), (kv, m.hidden), (m.hidden, q), (m.hidden,)]
                shapes += [(m.ffn, m.hidden), (m.ffn, m.hidden), (m.hidden, m.ffn)]
                weights = [o.random(*shape, scale=shape[-1] ** -0.5) for shape in shapes]
                layer = DecoderLayer(*weights, *(o.random(m.head_dim) for _ in range(2)))
                if has_convs:
                    shape = 2 * WIDTH * m.hidden // SIZE, m.hidden
                    convs = [BlockConv(o.random(2, WIDTH, m.hidden), o.random(*shape, scale=0.01)) for _ in range(2)]
                    layer = layer._replace(attention_conv=convs[0], mlp_conv=convs[1])
                packed = PackedLayers([layer], o.random(m.hidden), eps=1e-6, scale=m.head_dim**-0.5)
                cos, sin = (table[0] for table in o.rope(keys, m.head_dim))
                caches = [o.random(1, m.kv_heads, keys, m.head_dim) for _ in range(2)]
                return (
                    o.random(1, rows, m.hidden), o.integers(context), cos, sin, packed, *caches,
                    o.positions(context, rows), full_width(cos[None, context:], sin[None, context:], o.dtype),
                    torch.ones(rows, keys, dtype=torch.bool, device=o.device).tril(context),
                )  # fmt: skip

            weights = m.hidden * (2 * q + 2 * kv + 3 * m.ffn + has_convs * 2 * (2 * WIDTH * (1 + m.hidden // SIZE)))
            yield Case(
                f"{name} 1 layer rows={rows} ctx={context}{' convolutions' * has_convs}",
                make,
                ours,
                {"torch functions": plain},
                (weights + 2 * kv * keys + 2 * rows * m.hidden) * o.size,
            )


if __name__ == "__main__":
    main(cases)
