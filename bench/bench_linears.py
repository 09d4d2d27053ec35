"""``ops.linears`` against ``F.linear``: one a weight and ``cat``, and one of the weights packed into one beforehand."""

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops


def one_by_one(x, weights, packed):
    return torch.cat([F.linear(x, weight) for weight in weights], -1)


def cases(o):
    for name, m in o.models.items():
        parts = {
            "q k v": [m.heads * m.head_dim, m.kv_heads * m.head_dim, m.kv_heads * m.head_dim],
            "gate up": [m.ffn, m.ffn],
        }
        for what, features in parts.items():
            for rows in (1, 16, 32, 64):

                def make(m=m, rows=rows, features=features):
                    packed = o.random(sum(features), m.hidden, scale=m.hidden**-0.5)
                    return o.random(rows, m.hidden), list(packed.split(features)), packed

                yield Case(
                    f"{name} {what} {m.hidden}->{'+'.join(map(str, features))} rows={rows}",
                    make,
                    lambda x, weights, packed: ops.linears(x, weights),
                    {"F.linear, cat": one_by_one, "F.linear, packed": lambda x, weights, packed: F.linear(x, packed)},
                    (sum(features) * m.hidden + rows * (m.hidden + sum(features))) * o.size,
                )


if __name__ == "__main__":
    main(cases)
