"""``ops.linear`` against ``F.linear``: the down and up projections at a few rows, and the LM head at 16."""

import torch.nn.functional as F
from harness import Case, main

from dflash import ops


def cases(o):
    for name, m in o.models.items():
        for width, out, all_rows in (
            (m.ffn, m.hidden, (1, 16, 26, 40, 64)),
            (m.hidden, m.ffn, (16,)),
            (m.hidden, m.vocab, (16,)),
        ):
            for rows in all_rows:
                yield Case(
                    f"{name} {width}->{out} rows={rows}",
                    lambda rows=rows, width=width, out=out: (
                        o.random(rows, width),
                        o.random(out, width, scale=width**-0.5),
                    ),
                    ops.linear,
                    {"F.linear": F.linear},
                    (out * width + rows * (width + out)) * o.size,
                )


if __name__ == "__main__":
    main(cases)
