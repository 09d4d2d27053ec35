"""``ops.accept_prefix_`` against the whole update in plain torch, the faster of two ways.

``prefix`` emits by slices, as a loop over one sequence does, and reads the count on the host (CPU only); ``masked``
keeps every shape fixed and reads nothing. All put the length back first. 1 and 64 sequences of 16 rows with 7 correct
proposals.
"""

from typing import NamedTuple

import torch
from harness import Case, main
from torch import Tensor

from dflash import ops


class State(NamedTuple):
    tokens: Tensor
    length: Tensor
    num_context: Tensor
    done: Tensor


def ours(block_ids, posterior, stops, limits, state, start):
    state.length.copy_(start)
    ops.accept_prefix_(block_ids, posterior, stops, limits, *state)


def masked(block_ids, posterior, stops, limits, state, start):
    tokens, length, num_context, done = state
    length.copy_(start)
    slot = torch.arange(posterior.shape[1], device=posterior.device)
    matched = (block_ids[:, 1:] == posterior[:, :-1]).cumprod(1).sum(1)
    stop = (posterior[..., None] == stops[:, None]).any(-1)
    before_stop = torch.where(stop, slot, posterior.shape[1]).amin(1)
    room = limits.clamp(max=tokens.shape[1]) - 1 - length
    count = torch.minimum(torch.minimum(matched, before_stop) + 1, room) * (done == 0)
    at = length[:, None] + 1 + slot
    emitted = torch.where(slot < count[:, None], posterior, tokens.gather(1, at))
    tokens.scatter_(1, at, emitted)
    length += count
    num_context.copy_(count)
    done.copy_(torch.where(count == before_stop + 1, 1, torch.where(count == room, 2, done)))


def prefix(block_ids, posterior, stops, limits, state, start):
    tokens, length, num_context, done = state
    length.copy_(start)
    first = int(length)
    count = int((block_ids[0, 1:] == posterior[0, :-1]).cumprod(0).sum()) + 1
    count = min(count, min(int(limits), tokens.shape[1]) - 1 - first)
    emitted = posterior[0, :count]
    found = torch.isin(emitted, stops).nonzero()
    if len(found):
        count, done[0] = int(found[0]) + 1, 1
    tokens[0, first + 1 : first + 1 + count] = emitted[:count]
    length += count
    num_context.fill_(count)


def cases(o):
    for batch in (1, 64):

        def make(batch=batch):
            block_ids = torch.arange(100, 116, device=o.device).repeat(batch, 1)
            posterior = block_ids + 1
            posterior[:, 7] = 5
            fill = lambda value: torch.full((batch,), value, device=o.device)  # noqa: E731
            tokens = torch.zeros(batch, 512, dtype=torch.int64, device=o.device)
            state = State(tokens, fill(100), fill(0), fill(0))
            return block_ids, posterior, fill(0)[:, None], fill(512), state, fill(100)

        peers = {"masked": masked}
        if batch == 1 and o.device.type == "cpu":
            peers["prefix"] = prefix
        yield Case(f"batch={batch} rows=16", make, ours, peers, batch * (2 * 16 + 8 + 5) * 8, "int64")


if __name__ == "__main__":
    main(cases)
