"""``ops.accept_path_`` against the whole update in plain torch, the faster of two ways.

``lists`` walks one sequence on the host, which has to read the choices (CPU only); ``masked`` keeps every shape fixed
and reads nothing. All put the length back first. 1 and 64 trees of 16 and 64 rows, 7 correct nodes on the path.
"""

import torch
from bench_accept_prefix import State, masked
from harness import Case, main

from dflash import ops

PATH_ROWS = 16


def ours(ids, parents, choices, stops, limits, state, told, start):
    state.length.copy_(start)
    ops.accept_path_(ids, parents, choices, stops, limits, *state, *told)


def fixed_shapes(ids, parents, choices, stops, limits, state, told, start):
    path, chain_choices, chain_ids = told
    rows = torch.arange(ids.shape[1], device=ids.device)
    chosen = (parents >= 0) & (ids == choices.gather(1, parents.clamp(min=0)))
    child = torch.where(chosen[:, None] & (parents[:, None] == rows[:, None]), rows, len(rows)).amin(-1)
    child = torch.nn.functional.pad(child, (0, 1), value=len(rows))
    walked = [torch.zeros_like(start)[:, None]]
    for _ in range(path.shape[1] - 1):
        walked.append(child.gather(1, walked[-1]))
    walked = torch.cat(walked, 1)
    found = walked < len(rows)
    chain, along = (
        torch.where(found, x.gather(1, walked.clamp(max=len(rows) - 1)), missing)
        for x, missing in ((ids, -1), (choices, -2))
    )
    masked(chain, along, stops, limits, state, start)
    depth = rows[: path.shape[1]]
    emitted = depth < state.num_context[:, None]
    path.copy_(torch.where(emitted, walked, depth))
    chain_choices.copy_(torch.where(emitted, along, -1))
    chain_ids.copy_(torch.where(depth <= state.num_context[:, None], chain, -1))


def lists(ids, parents, choices, stops, limits, state, told, start):
    path, chain_choices, chain_ids = told
    tokens, length, num_context, done = state
    length.copy_(start)
    token_of, parent_of, choice_of = (x[0].tolist() for x in (ids, parents, choices))
    child_of = {(parent, token): row for row, (parent, token) in enumerate(zip(parent_of, token_of, strict=True))}
    ends, first, row, rows = set(stops[0].tolist()), int(length), 0, []
    room = min(int(limits), tokens.shape[1]) - 1 - first
    while row is not None and len(rows) < min(room, path.shape[1]):
        rows.append(row)
        row = None if choice_of[row] in ends else child_of.get((row, choice_of[row]))
    count = len(rows)
    kept, pads = [choice_of[row] for row in rows], [-1] * path.shape[1]
    drafts = [token_of[at] for at in ([*rows] if row is None else [*rows, row])]
    tokens[0, first + 1 : first + 1 + count] = torch.tensor(kept)
    path.copy_(torch.tensor([[*rows, *range(count, path.shape[1])]]))
    chain_choices.copy_(torch.tensor([(kept + pads)[: path.shape[1]]]))
    chain_ids.copy_(torch.tensor([(drafts + pads)[: path.shape[1]]]))
    length += count
    num_context.fill_(count)
    done[0] = 1 if choice_of[rows[-1]] in ends else 2 if count == room else 0


def cases(o):
    for batch in (1, 64):
        for rows in (16, 64):

            def make(batch=batch, rows=rows):
                # Pairs of siblings, of which the second has children: 0, 2, 4, ..
                row = torch.arange(rows, device=o.device)
                parents = ((row - 1) // 2 * 2).clamp(min=-1).repeat(batch, 1)
                parents[:, 0] = -1
                ids = (row + 100).repeat(batch, 1)
                choices = ids + 2
                choices[:, 14:] = 5
                fill = lambda value: torch.full((batch,), value, device=o.device)  # noqa: E731
                tokens = torch.zeros(batch, 512, dtype=torch.int64, device=o.device)
                state = State(tokens, fill(100), fill(0), fill(0))
                told = [torch.zeros(batch, PATH_ROWS, dtype=torch.int64, device=o.device) for _ in range(3)]
                return ids, parents, choices, fill(0)[:, None], fill(512), state, told, fill(100)

            peers = {"masked": fixed_shapes}
            if batch == 1 and o.device.type == "cpu":
                peers["lists"] = lists
            moved = batch * (3 * rows + 8 + 5 + 3 * PATH_ROWS) * 8
            yield Case(f"batch={batch} rows={rows}", make, ours, peers, moved, "int64")


if __name__ == "__main__":
    main(cases)
