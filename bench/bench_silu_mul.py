"""``ops.silu_mul`` against ``F.silu(gate) * up`` on the halves of the packed product."""

import torch.nn.functional as F
from harness import Case, main

from dflash import ops


def plain(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            yield Case(
                f"{name} ffn={m.ffn} rows={rows}",
                lambda m=m, rows=rows: (o.random(1, rows, 2 * m.ffn),),
                ops.silu_mul,
                {"F.silu * up": plain},
                3 * rows * m.ffn * o.size,
            )


if __name__ == "__main__":
    main(cases)
