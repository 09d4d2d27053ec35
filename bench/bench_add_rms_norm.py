"""``ops.add_rms_norm`` against an addition and ``F.rms_norm``."""

import torch.nn.functional as F
from harness import Case, main

from dflash import ops


def plain(x, residual, weight):
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, 1e-6), total


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            yield Case(
                f"{name} hidden={m.hidden} rows={rows}",
                lambda m=m, rows=rows: (*(o.random(1, rows, m.hidden) for _ in range(2)), o.random(m.hidden)),
                lambda x, residual, weight: ops.add_rms_norm(x, residual, weight, 1e-6),
                {"add, F.rms_norm": plain},
                (4 * rows + 1) * m.hidden * o.size,
            )


if __name__ == "__main__":
    main(cases)
