"""``ops.conv_add_rms_norm`` against sums over shifted copies, an addition and ``F.rms_norm``.

Width 2 and groups of 16 channels, as published drafters have.
"""

import torch.nn.functional as F
from bench_dynamic_conv import SIZE, WIDTH, shifted, weights
from harness import Case, main

from dflash import ops


def plain(x, base, dynamic, residual, weight):
    total = shifted(x, base, dynamic) + residual
    return F.rms_norm(total, weight.shape, weight, 1e-6), total


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:

            def make(m=m, rows=rows):
                x, residual = (o.random(1, rows, m.hidden) for _ in range(2))
                return x, *weights(o, rows, m.hidden), residual, o.random(m.hidden)

            yield Case(
                f"{name} hidden={m.hidden} rows={rows}",
                make,
                lambda *tensors: ops.conv_add_rms_norm(*tensors, 1e-6),
                {"shifted, add, F.rms_norm": plain},
                (4 * rows + WIDTH + 1 + rows * WIDTH // SIZE) * m.hidden * o.size,
            )


if __name__ == "__main__":
    main(cases)
