"""``ops.experts`` against what transformers runs for every family: its ``grouped_mm`` and ``batched_mm``."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from harness import Case, main
from transformers.integrations import moe

from dflash import ops

# hidden, width, experts, experts per row; the last are Qwen3-30B-A3B's
SIZES = {
    "tiny": (64, 32, 8, 2),
    "pair": (192, 128, 16, 4),
    "qwen3-0.6b": (1024, 384, 32, 4),
    "qwen3-8b": (2048, 768, 128, 8),
}


def theirs(function):
    """Return one of transformers' functions with the arguments of ours."""

    def run(x, ids, scores, gate_up, down):
        module = SimpleNamespace(
            gate_up_proj=gate_up, down_proj=down, num_experts=len(gate_up), has_gate=True, has_bias=False,
            is_transposed=False, has_post_expert_norm=False, _is_expert_parallel=False, _apply_gate=gated,
        )  # fmt: skip
        return function(module, x, ids, scores)

    return run


def gated(both):
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def cases(o):
    grouped = {"grouped_mm": theirs(moe.grouped_mm_experts_forward)}
    batched = {"batched_mm": theirs(moe.batched_mm_experts_forward)}  # copies the weights of every pair
    for name in o.models:
        hidden, width, experts, top_k = SIZES[name]
        for rows in (1, 16, 64):
            draws = torch.Generator().manual_seed(rows)
            ids = torch.stack([torch.randperm(experts, generator=draws)[:top_k] for _ in range(rows)]).to(o.device)
            used = len(ids.unique())

            def make(rows=rows, ids=ids, hidden=hidden, width=width, experts=experts, top_k=top_k):
                weights = o.random(experts, 2 * width, hidden, scale=hidden**-0.5), o.random(experts, hidden, width)
                return o.random(rows, hidden), ids, torch.softmax(o.random(rows, top_k), -1), *weights

            moved = (used * 3 * width * hidden + 2 * rows * hidden) * o.size
            shape = f"{hidden}x{width} {top_k}/{experts} rows={rows} used={used}"
            yield Case(shape, make, ops.experts, grouped | (batched if rows <= 16 else {}), moved)


if __name__ == "__main__":
    main(cases)
