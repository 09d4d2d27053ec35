"""``ops.draft_rows`` against torch's gather, fill, ``cat`` and lookup: the rows of a block of masks."""

import torch
from harness import Case, main
from torch.nn.functional import embedding

from dflash import ops

CAPACITY, MASK = 1024, 1


def plain(tokens, length, table, rows):
    anchor = tokens.gather(1, length[:, None])
    positions = length[:, None] + torch.arange(1, rows, device=tokens.device)
    ids = torch.cat([anchor, torch.full_like(positions, MASK)], 1)
    return embedding(ids, table), anchor, positions


def ours(tokens, length, table, rows):
    return ops.draft_rows(tokens, length, None, table, MASK, rows - 1, rows)


def cases(o):
    for name, m in o.models.items():
        for rows in o.rows:

            def make(m=m, rows=rows):
                tokens = torch.zeros(1, CAPACITY, dtype=torch.int64, device=o.device)
                return tokens, o.integers(CAPACITY // 2), o.random(m.vocab, m.hidden), rows

            moved = 2 * rows * m.hidden * o.size
            yield Case(f"{name} hidden={m.hidden} rows={rows}", make, ours, {"gather, cat, embedding": plain}, moved)


if __name__ == "__main__":
    main(cases)
