"""``ops.block_attention`` against SDPA on the live part of the cache, the faster of two ways:

with ``enable_gqa`` (``SDPA``), and with the queries that share a K/V head packed into rows (``SDPA packed``). Full: no
mask, as the drafter's block sees its context. Causal: a boolean mask that was made beforehand, as the target verifies.
"""

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops


def sdpa(q, k_cache, v_cache, lengths, k, v, mask, packed_mask):
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, enable_gqa=True).transpose(1, 2)


def packed(q, k_cache, v_cache, lengths, k, v, mask, packed_mask):
    heads = q.shape[2] // k.shape[1]
    rows = q.unflatten(2, (-1, heads)).transpose(1, 2).flatten(2, 3)
    out = F.scaled_dot_product_attention(rows, k, v, packed_mask)
    return out.unflatten(2, (-1, heads)).transpose(1, 2).flatten(2, 3)


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            for context in o.contexts:
                for mode in ("full", "causal") if rows <= 64 else ("causal",):
                    keys = context + rows

                    def make(m=m, rows=rows, context=context, keys=keys, mode=mode):
                        q = o.random(1, rows, m.heads, m.head_dim)
                        k_cache, v_cache = (o.random(1, m.kv_heads, keys + 16, m.head_dim) for _ in range(2))
                        mask = packed_mask = None
                        if mode == "causal":
                            mask = torch.ones(rows, keys, dtype=torch.bool, device=o.device).tril(context)
                            packed_mask = mask.repeat_interleave(m.heads // m.kv_heads, 0)
                        live = k_cache[:, :, :keys], v_cache[:, :, :keys]
                        return q, k_cache, v_cache, o.integers(context), *live, mask, packed_mask

                    yield Case(
                        f"{name} {m.heads}/{m.kv_heads}x{m.head_dim} rows={rows} ctx={context} {mode}",
                        make,
                        lambda q, k, v, lengths, *_, scale=m.head_dim**-0.5, mode=mode: ops.block_attention(
                            q, k, v, lengths, scale, mode == "causal"
                        ),
                        {"SDPA": sdpa, "SDPA packed": packed},
                        2 * (rows * m.heads + keys * m.kv_heads) * m.head_dim * o.size,
                    )


if __name__ == "__main__":
    main(cases)
