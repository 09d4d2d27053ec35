"""``ops.dynamic_conv`` against sums over shifted copies, as the reference package has them.

Width 2 and groups of 16 channels, as published drafters have.
"""

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops

WIDTH, SIZE = 2, 16  # rows that a row sees, channels per group


def shifted(x, base, dynamic):
    """Add up the rows one after another, each in the dtype of ``x``."""
    out = torch.zeros_like(x)
    for i in range(len(base)):
        weight = (base[i].unflatten(0, (-1, SIZE)) + dynamic[:, :, i, :, None]).flatten(2)
        out = torch.addcmul(out, weight, F.pad(x[:, : x.shape[1] - i], (0, 0, i, 0)))
    return out


def weights(o, rows, hidden):
    """Return ``base`` and ``dynamic``, which lies with the other side's weights in a product's result."""
    return o.random(WIDTH, hidden), o.random(1, rows, 2, WIDTH, hidden // SIZE)[:, :, 0]


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            yield Case(
                f"{name} hidden={m.hidden} rows={rows}",
                lambda m=m, rows=rows: (o.random(1, rows, m.hidden), *weights(o, rows, m.hidden)),
                ops.dynamic_conv,
                {"shifted": shifted},
                (2 * rows + WIDTH + rows * WIDTH // SIZE) * m.hidden * o.size,
            )


if __name__ == "__main__":
    main(cases)
