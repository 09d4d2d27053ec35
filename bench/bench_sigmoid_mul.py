"""``ops.sigmoid_mul`` against ``x * sigmoid(gate)`` as transformers' attention with an output gate has it."""

import torch
from harness import Case, main

from dflash import ops


def plain(x, gate):
    return x * torch.sigmoid(gate.contiguous())


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:

            def make(m=m, rows=rows):
                gates = o.random(rows, m.heads, 2, m.head_dim)[:, :, 1]  # behind each q head
                return o.random(rows, m.heads, m.head_dim), gates

            moved = 3 * rows * m.heads * m.head_dim * o.size
            yield Case(f"{name} heads={m.heads} rows={rows}", make, ops.sigmoid_mul, {"x * sigmoid": plain}, moved)


if __name__ == "__main__":
    main(cases)
