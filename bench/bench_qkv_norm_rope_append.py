"""``ops.qkv_norm_rope_append_`` against ``F.rms_norm`` on q and k, RoPE as transformers writes it, ``index_copy_``.

Torch's RoPE gets cos and sin at full width and in the heads' dtype, made beforehand.
"""

import torch
import torch.nn.functional as F
from harness import Case, full_width, main, rotate

from dflash import ops


def plain(qkv, lengths, _rope, norms, q_out, caches, wide):
    (q_norm, k_norm), (k_cache, v_cache) = norms, caches
    heads = qkv.unflatten(-1, (-1, q_norm.shape[0])).transpose(1, 2)
    q, k, v = heads.split([q_out.shape[2], k_cache.shape[1], k_cache.shape[1]], 1)
    q = rotate(F.rms_norm(q, q_norm.shape, q_norm, 1e-6), *wide)
    k = rotate(F.rms_norm(k, k_norm.shape, k_norm, 1e-6), *wide)
    positions = lengths + torch.arange(qkv.shape[1], device=qkv.device)
    k_cache.index_copy_(2, positions, k)
    v_cache.index_copy_(2, positions, v)
    return q


def ours(qkv, lengths, rope, norms, q_out, caches, _wide):
    ops.qkv_norm_rope_append_(qkv, lengths, None, None, *rope, *norms, 1e-6, q_out, *caches, prefetch=True)


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            context, heads = o.contexts[0], m.heads + 2 * m.kv_heads

            def make(m=m, rows=rows, context=context, heads=heads):
                rope = o.rope(context + rows, m.head_dim)
                wide = full_width(*(table[:, context:] for table in rope), o.dtype)
                caches = [o.random(1, m.kv_heads, context + rows, m.head_dim) for _ in range(2)]
                norms = [o.random(m.head_dim) for _ in "qk"]
                qkv, q_out = o.random(1, rows, heads * m.head_dim), o.random(1, rows, m.heads, m.head_dim)
                return qkv, o.integers(context), [table[0] for table in rope], norms, q_out, caches, wide

            yield Case(
                f"{name} heads={m.heads}/{m.kv_heads}x{m.head_dim} rows={rows}",
                make,
                ours,
                {"F.rms_norm, RoPE, index_copy_": plain},
                2 * rows * heads * m.head_dim * o.size + 4 * rows * m.head_dim,
            )


if __name__ == "__main__":
    main(cases)
