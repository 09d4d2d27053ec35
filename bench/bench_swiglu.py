"""``ops.swiglu`` against ``ops.linears`` and ``ops.silu_mul``, and against torch with the weights packed before."""

import torch.nn.functional as F
from harness import Case, main

from dflash import ops


def ours(x, gate, up, _packed):
    return ops.swiglu(x, gate, up)


def two_ops(x, gate, up, _packed):
    return ops.silu_mul(ops.linears(x, [gate, up]))


def packed(x, _gate, _up, weight):
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.silu(gate) * up


def cases(o):
    for name, m in o.models.items():
        for rows in (1, 16, 64, 128):

            def make(m=m, rows=rows):
                weight = o.random(2 * m.ffn, m.hidden, scale=m.hidden**-0.5)
                return o.random(rows, m.hidden), *weight.chunk(2), weight

            moved = (2 * m.ffn * m.hidden + rows * (m.hidden + m.ffn)) * o.size
            plain = {"linears, silu_mul": two_ops, "F.linear, packed": packed}
            yield Case(f"{name} {m.hidden}->{m.ffn} rows={rows}", make, ours, plain, moved)


if __name__ == "__main__":
    main(cases)
