"""``ops.build_tree`` against best-first search with Python's ``heapq`` on a CPU, and the plain-torch twin elsewhere.

15 depths of 16 candidates as a drafter gives them, whose best tokens have probabilities of about 0.6.
"""

import heapq

import torch
from harness import Case, main

from dflash import ops
from dflash.ops import reference

DEPTHS, COUNT = 15, 16


def heap(anchor, ids, scores, rows):
    """Build the tree of the only sequence; returns ids and parents."""
    (ids,), (scores,) = ids.tolist(), scores.tolist()
    tree, parents = anchor.tolist(), [-1]
    frontier = [(-scores[0][0], 1, ids[0][0], 0, 0)]
    while frontier and len(tree) < rows:
        score, depth, token, parent, rank = heapq.heappop(frontier)
        tree.append(token)
        parents.append(parent)
        if rank + 1 < len(ids[depth - 1]):
            below = score + scores[depth - 1][rank] - scores[depth - 1][rank + 1]
            heapq.heappush(frontier, (below, depth, ids[depth - 1][rank + 1], parent, rank + 1))
        if depth < len(ids):
            heapq.heappush(frontier, (score - scores[depth][0], depth + 1, ids[depth][0], len(tree) - 1, 0))
    return torch.tensor([tree]), torch.tensor([parents])


def cases(o):
    for batch, rows in ((1, 16), (1, 32), (1, 64), (1, 128), (16, 64)):

        def make(batch=batch, rows=rows):
            logits = o.random(batch, DEPTHS, 1000, scale=1.0, dtype=torch.float32) * 2.2
            scores, ids = logits.log_softmax(-1).topk(COUNT, -1)
            return torch.arange(batch, device=o.device), ids, scores, rows

        on_cpu = batch == 1 and o.device.type == "cpu"
        peers = {"heapq": heap} if on_cpu else {"twin": reference.build_tree}
        words = 4 + -(-rows // 64)
        yield Case(
            f"batch={batch} rows={rows}", make, ops.build_tree, peers, batch * (DEPTHS * COUNT * 12 + rows * words * 8),
            "int64",
        )  # fmt: skip


if __name__ == "__main__":
    main(cases)
