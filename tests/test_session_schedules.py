"""Random schedules of requests on one session: each writes what it writes alone, bit for bit.

Some have grammars, so that steps with masks come and go too. Chunks of prompts come from the cache of the session, and
answers that have ended are settled at random times. Each step has a random width, but for targets whose bits would
depend on it.

Reference is a request in a session of its own with a drafter that knows nothing, so that its blocks begin elsewhere.
Compared are ids, text, the reason of the end, and the keys and values that the target has kept.
"""

import functools
import random

import pytest
import torch
from examples import LONG_FACTOR, is_long
from families import at_costs, hinted
from recorded import record
from schedules import PAIRS, ROWS, Request, alone, options, play

from dflash.proposers import chain_widths
from dflash.session import Session

SCHEDULES = 8  # per kind of pair and way to launch steps


class Player:
    """Plays schedules on one session of a pair, whose drafter is told most of each answer."""

    def __init__(self, pair: str, *, replays: bool) -> None:
        target, draft, self.requests, results = alone(pair)
        self.alone = {id(request): result for request, result in zip(self.requests, results, strict=True)}
        empty = [torch.zeros(0, dtype=torch.int64)] * ROWS
        generator = hinted(target, draft, empty, block_size="auto", **options(pair))
        at_costs(generator, dict.fromkeys(chain_widths(generator.block_size), 1.0))
        self.script = generator.script
        self.session = Session(record(generator) if replays else generator)

    def tell(self, row: int, request: Request) -> None:
        text = torch.cat([request.ids, torch.tensor(self.alone[id(request)].ids)])
        self.script[row, : len(text)] = text

    def check(self, seed: int) -> int:
        """Play one schedule; return how many answers were compared."""
        choose, compared = random.Random(seed), 0
        if (budget := self.session.generator.engine.budget) is not None:
            budget.choose = functools.partial(random.Random(seed).choice, sorted(budget.costs))
        wanted = choose.choices(self.requests, k=choose.randint(5, 14))
        for request, result in play(self.session, wanted, choose, self.tell):
            expected = self.alone[id(request)]
            assert result[:3] == expected[:3], (seed, request)
            assert all(map(torch.equal, result.kept, expected.kept)), (seed, request)
            compared += 1
        return compared


@pytest.mark.long
@pytest.mark.parametrize("replays", [False, True], ids=["", "replayed"])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_request_writes_what_it_writes_alone(pair, replays):
    player = Player(pair, replays=replays)
    count = SCHEDULES * (LONG_FACTOR if is_long() else 1)
    compared = sum(player.check(seed) for seed in range(count))
    print(f"{pair}: {count} schedules, {compared} answers")
    assert compared > 4 * count
