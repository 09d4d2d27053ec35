"""``ops.block_attention`` against SDPA on the live part of the cache, the faster of two ways.

``SDPA`` uses ``enable_gqa``; ``SDPA packed`` packs the queries that share a K/V head into rows. Full: no mask, as the
drafter's block sees its context. Causal: a boolean mask made beforehand, as the target verifies.
"""

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops


def sdpa(q, _caches, _lengths, live, mask, _packed_mask):
    return F.scaled_dot_product_attention(q.transpose(1, 2), *live, mask, enable_gqa=True).transpose(1, 2)


def packed(q, _caches, _lengths, live, _mask, packed_mask):
    heads = q.shape[2] // live[0].shape[1]
    rows = q.unflatten(2, (-1, heads)).transpose(1, 2).flatten(2, 3)
    out = F.scaled_dot_product_attention(rows, *live, packed_mask)
    return out.unflatten(2, (-1, heads)).transpose(1, 2).flatten(2, 3)


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            for context in o.contexts:
                for mode in ("full", "causal") if rows <= 64 else ("causal",):
                    keys = context + rows

                    def make(m=m, rows=rows, context=context, keys=keys, mode=mode):
                        q = o.random(1, rows, m.heads, m.head_dim)
                        caches = [o.random(1, m.kv_heads, keys + 16, m.head_dim) for _ in range(2)]
                        mask = packed_mask = None
                        if mode == "causal":
                            mask = torch.ones(rows, keys, dtype=torch.bool, device=o.device).tril(context)
                            packed_mask = mask.repeat_interleave(m.heads // m.kv_heads, 0)
                        live = [cache[:, :, :keys] for cache in caches]
                        return q, caches, o.integers(context), live, mask, packed_mask

                    yield Case(
                        f"{name} {m.heads}/{m.kv_heads}x{m.head_dim} rows={rows} ctx={context} {mode}",
                        make,
                        lambda q, caches, lengths, *_, scale=m.head_dim**-0.5, mode=mode: ops.block_attention(
                            q, *caches, lengths, scale, mode == "causal"
                        ),
                        {"SDPA": sdpa, "SDPA packed": packed},
                        2 * (rows * m.heads + keys * m.kv_heads) * m.head_dim * o.size,
                    )


if __name__ == "__main__":
    main(cases)
