"""``ops.delta_net_inputs`` against the operations with which transformers prepares a gated delta rule."""

import torch
import torch.nn.functional as F
from harness import Case, main

from dflash import ops

DIM = 128


def plain(qkv, b, a, a_log, dt_bias, key_heads, key_dim):
    keys = key_heads * key_dim
    q, k, v = qkv.split([keys, keys, qkv.shape[-1] - 2 * keys], -1)
    q, k = (x.unflatten(-1, (-1, key_dim)).float() for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay = -a_log.float().exp() * F.softplus(a.float() + dt_bias)
    return q * key_dim**-0.5, k, v.unflatten(-1, (-1, DIM)).float(), decay, b.sigmoid().float()


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            heads = max(m.hidden // DIM, 1)
            key_heads = max(heads // 2, 1)  # as in Qwen3.5-9B

            def make(rows=rows, heads=heads, key_heads=key_heads):
                qkv = o.random(1, rows, (2 * key_heads + heads) * DIM)
                gates = [o.random(1, rows, heads) for _ in range(2)]
                return qkv, *gates, o.random(heads), o.random(heads), key_heads, DIM

            moved = rows * (2 * key_heads + heads) * DIM * (o.size + 4)
            shape = f"{name} heads={heads} rows={rows}"
            yield Case(shape, make, ops.delta_net_inputs, {"op by op": plain}, moved)


if __name__ == "__main__":
    main(cases)
