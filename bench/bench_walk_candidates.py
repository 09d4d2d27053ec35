"""``ops.walk_candidates`` against the same walk in plain torch, which forms the scores of all pairs first.

15 slots of 16 candidates, rank 256 (the published drafters), one sequence: the best path, and a drawn one. The plain
walk takes the best.
"""

import math

import torch
from harness import Case, main

from dflash import ops

SLOTS, COUNT, RANK = 15, 16, 256


def plain(hidden, predecessors, successors, anchor, ids, logits, *_):
    own = ids[0]
    before = torch.cat([anchor.expand(1, COUNT), own[:-1]])  # [slots, count]
    product = predecessors[before].float() * hidden[0, :, None].float()
    scores = logits[0, :, None] + product @ successors[own].float().transpose(1, 2)  # [slots, before, count]
    place, path = torch.zeros((), dtype=torch.int64, device=ids.device), []
    for slot in range(SLOTS):
        place = scores[slot].index_select(0, place.view(1))[0].argmax()
        path.append(own[slot].index_select(0, place.view(1)))
    return torch.cat(path)


def cases(o):
    for m in o.models.values():
        for sharpness in (math.inf, 1.0):

            def make(m=m, sharpness=sharpness):
                on = {"device": o.device}
                ids = torch.rand(SLOTS, m.vocab, generator=torch.Generator().manual_seed(1)).topk(COUNT, -1).indices
                logits = o.random(1, SLOTS, COUNT, dtype=torch.float32)
                one = torch.ones(1, **on)
                settings = o.integers(7), one, o.integers(0), one, one * 0, torch.tensor([sharpness], **on)
                codebooks = (o.random(m.vocab, RANK, scale=0.1) for _ in range(2))
                hidden, positions = o.random(1, SLOTS, RANK), o.positions(100, SLOTS)
                return hidden, *codebooks, o.integers(5), ids.to(o.device)[None], logits, positions, *settings

            shape = f"vocab={m.vocab} sharpness={sharpness:g}"
            moved = SLOTS * RANK * (1 + (COUNT + 1)) * o.size + SLOTS * COUNT * 16
            yield Case(shape, make, ops.walk_candidates, {"plain": plain}, moved)


if __name__ == "__main__":
    main(cases)
