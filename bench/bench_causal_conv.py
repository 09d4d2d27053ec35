"""``ops.causal_conv_`` against ``conv1d`` and SiLU as transformers calls them, on channels that lie in front of rows.

Width 4, as many channels as q, k and v of a recurrent layer have. The peer gets its inputs transposed and keeps no
rows that may be rolled back.
"""

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops

WIDTH = 4


def ours(x, weight, window, pending, keep, _transposed, _context):
    return ops.causal_conv_(x, weight, None, True, window, pending, keep)


def conv1d(_x, weight, _window, _pending, _keep, transposed, context):
    inputs = torch.cat([context, transposed], -1)
    context.copy_(inputs[..., -(WIDTH - 1) :])
    return F.silu(F.conv1d(inputs, weight[:, None], groups=len(weight)))


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            channels, block = 2 * m.heads * m.head_dim, rows if rows <= 64 else 16

            def make(rows=rows, channels=channels, block=block):
                x, context = o.random(1, rows, channels), o.random(1, channels, WIDTH - 1)
                window, counts = o.random(1, WIDTH - 1 + block, channels), (o.integers(0), o.integers(0))
                return x, o.random(channels, WIDTH), window, *counts, x.mT.contiguous(), context

            moved = (2 * rows + min(rows, block) + 2 * WIDTH) * channels * o.size
            yield Case(f"{name} channels={channels} rows={rows}", make, ours, {"conv1d": conv1d}, moved)


if __name__ == "__main__":
    main(cases)
