"""``ops.gated_rms_norm`` against transformers' gated RMSNorm."""

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops

DIM, EPS = 128, 1e-6


def ours(x, z, weight):
    return ops.gated_rms_norm(x, z, weight, EPS)


def plain(x, z, weight):
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    gated = weight * normed.to(z.dtype) * F.silu(z.view(x.shape).float())
    return gated.to(z.dtype).flatten(2)


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            heads = max(m.hidden // DIM, 1)

            def make(rows=rows, heads=heads):
                return o.random(1, rows, heads, DIM).float(), o.random(1, rows, heads * DIM), o.random(DIM)

            moved = rows * heads * DIM * (2 * o.size + 4)
            yield Case(f"{name} heads={heads} rows={rows}", make, ours, {"op by op": plain}, moved)


if __name__ == "__main__":
    main(cases)
