"""``ops.link_candidates`` against the same scores in plain torch: 15 slots of 16 candidates, rank 256, one sequence."""

import torch
from harness import Case, main

from dflash import ops

SLOTS, COUNT, RANK = 15, 16, 256


def plain(hidden, predecessors, successors, anchor, ids, scores):
    before = torch.cat([anchor[:, None, None].expand(-1, 1, COUNT), ids[:, :-1]], 1)
    product = predecessors[before].float() * hidden[:, :, None].float()
    score = scores[:, :, None] + product @ successors[ids].float().transpose(-1, -2)  # [batch, slots, before, count]
    rest = torch.log1p(-scores.exp().sum(-1).clamp(max=1))[:, :, None]
    total = torch.logaddexp(score.logsumexp(-1), rest)
    return (score - total[..., None]).sort(-1, descending=True)


def cases(o):
    for m in o.models.values():

        def make(m=m):
            ids = torch.rand(SLOTS, m.vocab, generator=torch.Generator().manual_seed(1)).topk(COUNT, -1).indices
            scores = o.random(1, SLOTS, 4 * COUNT, dtype=torch.float32).log_softmax(-1)[..., :COUNT].contiguous()
            codebooks = (o.random(m.vocab, RANK, scale=0.1) for _ in range(2))
            return o.random(1, SLOTS, RANK), *codebooks, o.integers(5), ids.to(o.device)[None], scores

        moved = SLOTS * RANK * (1 + 2 * COUNT) * o.size + SLOTS * COUNT * (12 + COUNT * 5)
        yield Case(f"vocab={m.vocab}", make, ops.link_candidates, {"plain": plain}, moved)


if __name__ == "__main__":
    main(cases)
