"""``ops.gated_recurrence_`` against the same rows in plain torch, which rolls nothing back.

``loop`` takes one row after another by matrix products; ``chunked`` is transformers' form for prompts, for the gated
delta rule. A block's rows are verified (none kept, a quarter of the last block applied first), a prompt's are kept.
Gated delta rule, KDA (a decay per channel) and Mamba-2 (no correction), with two heads per key head.
"""

import torch
from harness import Case, main
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from dflash import ops

KINDS = {"gdn": (True, False), "kda": (True, True), "mamba-2": (False, False)}  # has a correction, decay per channel


def ours(*operands):
    return ops.gated_recurrence_(*operands)


def loop(q, k, v, log_decay, beta, state, *_):
    groups, (batch, rows, heads, value_dim) = v.shape[2] // k.shape[2], v.shape
    q, k = (x.repeat_interleave(groups, 2).transpose(0, 1).flatten(1, 2)[:, :, None] for x in (q, k))
    v, decay = (x.transpose(0, 1).flatten(1, 2) for x in (v, log_decay.exp()))
    decay = decay[..., None] if decay.dim() == 3 else decay[..., None, None]
    beta = None if beta is None else beta.transpose(0, 1).flatten(1)[..., None]
    s, out = state.flatten(0, 1).clone(), torch.empty_like(v)
    for t in range(rows):
        s.mul_(decay[t])
        d = v[t] if beta is None else (v[t] - torch.bmm(k[t], s)[:, 0]) * beta[t]
        s.baddbmm_(k[t].mT, d[:, None])
        out[t] = torch.bmm(q[t], s)[:, 0]
    return out.view(rows, batch, heads, value_dim).transpose(0, 1)


def chunked(q, k, v, log_decay, beta, state, *_):
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    return torch_chunk_gated_delta_rule(q, k, v, log_decay, beta, initial_state=state, output_final_state=True)[0]


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:
            for kind in KINDS:
                yield case(o, name, m, rows, kind)


def case(o, name, m, rows, kind):
    (corrected, per_channel), keys, dim = KINDS[kind], max(m.heads // 2, 1), m.head_dim
    heads, block = m.heads // keys * keys, rows if rows <= 64 else 16

    def make():
        random = lambda *shape: o.random(1, *shape, dtype=torch.float32)  # noqa: E731
        normal = lambda *shape: torch.nn.functional.normalize(random(*shape), dim=-1)  # noqa: E731
        decays = (heads, dim) if per_channel else (heads,)
        counts = (-(-rows // 4), 0) if rows <= 64 else (0, rows)
        return (
            normal(rows, keys, dim), normal(rows, keys, dim), random(rows, heads, dim), -random(rows, *decays).abs(),
            random(rows, heads).sigmoid() if corrected else None, random(heads, dim, dim), normal(block, keys, dim),
            random(block, heads, dim), random(block, *decays).sigmoid(), *(o.integers(count) for count in counts),
        )  # fmt: skip

    peers = {"loop": loop} | ({"chunked": chunked} if kind == "gdn" else {})
    moved = 4 * (rows * (2 * keys + 2 * heads) * dim + heads * dim * dim + block * (keys + heads) * dim)
    return Case(f"{name} {kind} {keys}/{heads}x{dim} rows={rows}", make, ours, peers, moved, "float32")


if __name__ == "__main__":
    main(cases)
