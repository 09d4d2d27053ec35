"""``ops.linears`` against ``F.linear``: one call per weight and ``cat``, or one call with the weights packed before."""

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops


def ours(x, weights, _packed):
    return ops.linears(x, weights)


def one_by_one(x, weights, _packed):
    return torch.cat([F.linear(x, weight) for weight in weights], -1)


def packed(x, _weights, weight):
    return F.linear(x, weight)


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
                    ours,
                    {"F.linear, cat": one_by_one, "F.linear, packed": packed},
                    (sum(features) * m.hidden + rows * (m.hidden + sum(features))) * o.size,
                )


if __name__ == "__main__":
    main(cases)
