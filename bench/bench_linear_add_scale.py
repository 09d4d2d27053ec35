"""A product, the norm after it and the next products: the norm folded into them, in a kernel of its own, and in torch.

Only CUDA kernels can fold: on CPU nothing calls the op, and there is nothing to time.
"""

import torch.nn.functional as F
from harness import Case, main

from dflash import ops

EPS = 1e-6


def folded(x, o, residual, norm, gate, up):
    scaled, _, squares = ops.linear_add_scale(x, o, residual, norm)
    return ops.swiglu(scaled, gate, up, squares=squares, eps=EPS)


def apart(x, o, residual, norm, gate, up):
    normed, _ = ops.add_rms_norm(ops.linear(x, o), residual, norm, EPS)
    return ops.swiglu(normed, gate, up)


def plain(x, o, residual, norm, gate, up):
    normed = F.rms_norm(F.linear(x, o) + residual, norm.shape, norm, EPS)
    return F.silu(F.linear(normed, gate)) * F.linear(normed, up)


def cases(o):
    for name, m in o.models.items() if o.device.type == "cuda" else ():
        for rows in (1, 16, 64, 128):

            def make(m=m, rows=rows):
                gate, up = (o.random(m.ffn, m.hidden, scale=m.hidden**-0.5) for _ in range(2))
                o_proj = o.random(m.hidden, m.heads * m.head_dim, scale=m.hidden**-0.5)
                x, residual = o.random(rows, m.heads * m.head_dim), o.random(rows, m.hidden)
                return x, o_proj, residual, o.random(m.hidden), gate, up

            weights = m.hidden * (m.heads * m.head_dim + 2 * m.ffn)
            moved = (weights + rows * (m.heads * m.head_dim + 4 * m.hidden + m.ffn)) * o.size
            ways = {"add_rms_norm": apart, "torch": plain}
            yield Case(f"{name} o, gate up {m.hidden} rows={rows}", make, folded, ways, moved)


if __name__ == "__main__":
    main(cases)
