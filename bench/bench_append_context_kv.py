"""``ops.append_context_kv_`` (all layers of the drafter) against a loop of ``F.rms_norm``, RoPE and ``index_copy_``."""

import torch.nn.functional as F
from harness import Case, full_width, main, rotate

from dflash import ops


def plain(kv, positions, _rope, weight, k_caches, v_caches, wide):
    for layer, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
        k, v = kv[layer].unflatten(-1, (-1, k_cache.shape[-1])).transpose(1, 2).chunk(2, 1)
        k = F.rms_norm(k, k.shape[-1:], weight[layer], 1e-6)
        k_cache.index_copy_(2, positions[0], rotate(k, *wide))
        v_cache.index_copy_(2, positions[0], v)


def ours(kv, positions, rope, weight, k_caches, v_caches, _wide):
    ops.append_context_kv_(kv, positions, *rope, weight, 1e-6, k_caches, v_caches)


def cases(o):
    for m in o.models.values():
        for rows in o.rows:
            context = o.contexts[0]

            def make(m=m, rows=rows, context=context):
                caches = [[o.random(1, m.kv_heads, context + rows, m.head_dim) for _ in range(m.layers)] for _ in "kv"]
                kv = o.random(m.layers, 1, rows, 2 * m.kv_heads * m.head_dim)
                rope = o.rope(rows, m.head_dim)
                weight = o.random(m.layers, m.head_dim)
                return kv, o.positions(context, rows), rope, weight, *caches, full_width(*rope, o.dtype)

            yield Case(
                f"layers={m.layers} heads={m.kv_heads}x{m.head_dim} rows={rows}",
                make,
                ours,
                {"F.rms_norm, RoPE, index_copy_": plain},
                m.layers * 4 * rows * m.kv_heads * m.head_dim * o.size + 4 * rows * m.head_dim,
            )


if __name__ == "__main__":
    main(cases)
