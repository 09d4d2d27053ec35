"""``ops.rms_norm`` against ``F.rms_norm``; with counts (half the rows live) against it and ``torch.where``."""

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops


def counted(x, weight, counts):
    live = torch.arange(x.shape[1], device=x.device) < counts[:, None]
    return torch.where(live[..., None], F.rms_norm(x, weight.shape, weight, 1e-6), 0.0)


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            yield Case(
                f"{name} hidden={m.hidden} rows={rows}",
                lambda m=m, rows=rows: (o.random(1, rows, m.hidden), o.random(m.hidden)),
                lambda x, weight: ops.rms_norm(x, weight, 1e-6),
                {"F.rms_norm": lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6)},
                (2 * rows + 1) * m.hidden * o.size,
            )
            yield Case(
                f"{name} hidden={m.hidden} rows={rows} counts",
                lambda m=m, rows=rows: (o.random(1, rows, m.hidden), o.random(m.hidden), o.integers(rows // 2)),
                lambda x, weight, counts: ops.rms_norm(x, weight, 1e-6, counts),
                {"F.rms_norm, where": counted},
                (rows + rows // 2 + 1) * m.hidden * o.size,
            )


if __name__ == "__main__":
    main(cases)
