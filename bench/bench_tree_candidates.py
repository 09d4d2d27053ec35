"""``ops.tree_candidates`` against ``topk`` of the scores in plain torch: 15 depths, 16 tokens at T = 0, 32 above.

``topk`` at T = 1 draws noise that is not keyed, by `exponential_`.
"""

import math

import torch
from harness import Case, main

from dflash import ops

DEPTHS = 15


def cold(logits, *rest):
    values, ids = logits.topk(min(rest[-1], logits.shape[-1]), -1)
    return ids, values - logits.float().logsumexp(-1, keepdim=True)


def warm(logits, *rest):
    z = logits.float()
    noisy = z - torch.empty_like(z).exponential_(1).log()
    scores = torch.logaddexp(z.log_softmax(-1) + math.log(0.9), noisy.log_softmax(-1) + math.log(0.1))
    return scores.topk(min(rest[-1], z.shape[-1]), -1)


def cases(o):
    for m in o.models.values():
        for temperature, count, peer in ((0.0, 16, cold), (1.0, 32, warm)):

            def make(m=m, temperature=temperature, count=count):
                settings = o.integers(7), torch.tensor([temperature], device=o.device), count
                return o.random(1, DEPTHS, m.vocab, scale=3.0), o.positions(100, DEPTHS), *settings

            yield Case(
                f"vocab={m.vocab} T={temperature:g} count={count}",
                make,
                ops.tree_candidates,
                {"topk": peer},
                DEPTHS * (m.vocab * o.size + count * 12),
            )


if __name__ == "__main__":
    main(cases)
