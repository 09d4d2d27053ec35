"""``ops.top_candidates`` against ``topk``: 15 rows, 16 candidates.

Noisy candidates: ``topk`` after noise that is not keyed, by `exponential_`.
"""

import math

import torch
from harness import Case, main

from dflash import ops

ROWS, COUNT = 15, 16


def plain(logits, *_):
    values, ids = logits.topk(COUNT, -1)
    return ids, values.float()


def noisy(logits, *_):
    z = logits.float()
    ids = (z - torch.empty_like(z).exponential_(1).log()).topk(COUNT, -1).indices
    return ids, logits.gather(-1, ids)


def cases(o):
    for m in o.models.values():
        for sharpness, peer in ((math.inf, plain), (1.0, noisy)):

            def make(m=m, sharpness=sharpness):
                settings = o.integers(7), torch.ones(1, device=o.device), torch.full((1,), sharpness, device=o.device)
                return o.random(1, ROWS, m.vocab, scale=3.0), o.positions(100, ROWS), *settings, COUNT

            moved = ROWS * (m.vocab * o.size + COUNT * 12)
            yield Case(f"vocab={m.vocab} sharpness={sharpness:g}", make, ops.top_candidates, {"topk": peer}, moved)


if __name__ == "__main__":
    main(cases)
