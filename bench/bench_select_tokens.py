"""``ops.select_tokens`` against what gpt-fast and transformers do with the same logits.

Greedy: ``argmax``. T = 1: softmax of the logits over an exponential draw, argmax. Filters: ``topk`` and a threshold;
a sort, its softmax and cumulative sum for top-p; a threshold on the softmax for min-p; then the draw. The draws differ
(ours are keyed); the distributions do not. ``flat`` logits are nearly equal: every filter keeps thousands of tokens.

Plain torch needs tens of seconds to filter 1,024 rows of a large vocabulary, so only greedy and T = 1 are measured
there.
"""

import torch
from harness import Case, main

from dflash import ops


def draw(z):
    probabilities = torch.softmax(z.float(), -1)
    return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(-1)


def greedy(logits, *_, **__):
    return logits.argmax(-1)


def sample(logits, *_, k, p, min_p):
    if k:
        logits = torch.where(logits < torch.topk(logits, k).values[..., -1:], float("-inf"), logits)
    if p < 1:
        order, index = logits.sort(-1)
        removed = torch.softmax(order.float(), -1).cumsum(-1) <= 1 - p
        removed[..., -1:] = False
        logits = logits.masked_fill(torch.empty_like(removed).scatter_(-1, index, removed), float("-inf"))
    if min_p:
        probabilities = torch.softmax(logits.float(), -1)
        logits = torch.where(probabilities < min_p * probabilities.amax(-1, keepdim=True), float("-inf"), logits)
    return draw(logits)


def cases(o):
    for m in o.models.values():
        # what, temperature, top_k, top_p, min_p, spread of the logits
        settings = [
            ("greedy", 0.0, 0, 1.0, 0.0, 3.0),
            ("T=1", 1.0, 0, 1.0, 0.0, 3.0),
            ("T=1 flat", 1.0, 0, 1.0, 0.0, 0.1),
            ("top_k=50", 1.0, 50, 1.0, 0.0, 3.0),
            (f"top_k={m.vocab // 16}", 1.0, m.vocab // 16, 1.0, 0.0, 3.0),
            (f"top_k={m.vocab // 2} flat", 1.0, m.vocab // 2, 1.0, 0.0, 0.1),
            ("top_p=0.9", 1.0, 0, 0.9, 0.0, 3.0),
            ("top_p=0.9 flat", 1.0, 0, 0.9, 0.0, 0.1),
            ("min_p=0.05", 1.0, 0, 1.0, 0.05, 3.0),
            ("top_k=50 top_p=0.9", 1.0, 50, 0.9, 0.0, 3.0),
        ]
        for rows in o.rows:
            for what, temperature, k, p, min_p, spread in settings:
                if rows * m.vocab > 1 << 24 and what not in ("greedy", "T=1"):
                    continue

                def make(m=m, rows=rows, temperature=temperature, k=k, p=p, min_p=min_p, spread=spread):
                    real = lambda value: torch.tensor([value], device=o.device)  # noqa: E731
                    parameters = real(temperature), o.integers(k), real(p), real(min_p), real(1.0)
                    return o.random(1, rows, m.vocab, scale=spread), o.positions(100, rows), o.integers(7), *parameters

                if temperature == 0:
                    peers = {"argmax": greedy}
                else:
                    peers = {"softmax, filters, draw": lambda *x, k=k, p=p, q=min_p: sample(*x, k=k, p=p, min_p=q)}
                yield Case(
                    f"vocab={m.vocab} rows={rows} {what}",
                    make,
                    ops.select_tokens,
                    peers,
                    rows * m.vocab * o.size,
                )


if __name__ == "__main__":
    main(cases)
