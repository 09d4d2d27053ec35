"""``ops.block_attention`` against SDPA on the live part of the cache, the faster of two ways.

``SDPA`` uses ``enable_gqa``; ``SDPA packed`` packs the queries that share a K/V head into rows. Full: no mask, as the
drafter's block sees its context. Causal: a boolean mask made beforehand, as the target verifies. Tree: the same for a
draft tree in which each row continues one of the four rows before it; ``--rows 32 64`` has chains of these sizes.
"""

import random

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops

TREE_ROWS = (32, 64)


def sdpa(q, _caches, _lengths, live, mask, _packed_mask, _ancestors=None):
    return F.scaled_dot_product_attention(q.transpose(1, 2), *live, mask, enable_gqa=True).transpose(1, 2)


def packed(q, _caches, _lengths, live, _mask, packed_mask, _ancestors=None):
    heads = q.shape[2] // live[0].shape[1]
    rows = q.unflatten(2, (-1, heads)).transpose(1, 2).flatten(2, 3)
    out = F.scaled_dot_product_attention(rows, *live, packed_mask)
    return out.unflatten(2, (-1, heads)).transpose(1, 2).flatten(2, 3)


def random_ancestors(rows):
    """``[1, rows, ceil(rows / 64)]``: the bits of a random tree."""
    draw, bits = random.Random(0), [1]
    for i in range(1, rows):
        bits.append(1 << i | bits[max(0, i - draw.randint(1, 4))])
    words = [[(row >> 64 * word) & (1 << 64) - 1 for word in range(-(-rows // 64))] for row in bits]
    return torch.tensor([[word - (1 << 64 if word >> 63 else 0) for word in row] for row in words])[None]


def make_arguments(o, m, rows, context, mode):
    """What a case's functions take."""
    q, keys, column = o.random(1, rows, m.heads, m.head_dim), context + rows, torch.arange(rows)
    caches = [o.random(1, m.kv_heads, keys + 16, m.head_dim) for _ in range(2)]
    live = [cache[:, :, :keys] for cache in caches]
    if mode == "full":
        return q, caches, o.integers(context), live, None, None
    mask, ancestors = torch.ones(rows, keys, dtype=torch.bool).tril(context), ()
    if mode == "tree":
        ancestors = (random_ancestors(rows),)
        mask[:, context:] = (ancestors[0][0, :, column // 64] >> column % 64 & 1).bool()
    mask, ancestors = mask.to(o.device), [bits.to(o.device) for bits in ancestors]
    return q, caches, o.integers(context), live, mask, mask.repeat_interleave(m.heads // m.kv_heads, 0), *ancestors


def make_case(o, name, m, rows, context, mode):
    def attend(q, caches, lengths, *rest):
        ancestors = rest[-1] if mode == "tree" else None
        return ops.block_attention(q, *caches, lengths, m.head_dim**-0.5, mode != "full", ancestors=ancestors)

    return Case(
        f"{name} {m.heads}/{m.kv_heads}x{m.head_dim} rows={rows} ctx={context} {mode}",
        lambda: make_arguments(o, m, rows, context, mode),
        attend,
        {"SDPA": sdpa, "SDPA packed": packed},
        2 * (rows * m.heads + (context + rows) * m.kv_heads) * m.head_dim * o.size,
    )


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            for context in o.contexts:
                for mode in ("full", "causal") if rows <= 64 else ("causal",):
                    yield make_case(o, name, m, rows, context, mode)
        for rows in TREE_ROWS:
            for context in o.contexts:
                yield make_case(o, name, m, rows, context, "tree")


if __name__ == "__main__":
    main(cases)
