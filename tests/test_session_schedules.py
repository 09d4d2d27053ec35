"""Random schedules of requests on one session, and of calls on one generator: each writes what it writes alone.

Some have grammars, so that steps with masks come and go too. Chunks of prompts come from the cache of the session, and
answers that have ended are settled at random times. Each step has a random width, but for targets whose bits would
depend on it.

Reference is a request in a session of its own with a drafter that knows nothing, so that its blocks begin elsewhere.
Of a session, ids, text, the reason of the end, and the keys and values that the target has kept are compared bit for
bit.
"""

import contextlib
import functools
import itertools
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


PLAIN = {"max_new_tokens", "seed", "temperature", "top_k", "top_p", "min_p"}  # settings that do not read the text


class Failure(Exception):
    """Raised by a processor."""


def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Raise in the middle of a call."""
    if ids.shape[1] % 5 == 0:
        raise Failure
    return scores


@pytest.mark.long
@pytest.mark.parametrize("replays", [False, True], ids=["", "replayed"])
def test_a_call_writes_what_it_writes_alone(replays):
    """Whatever its generator did before: calls that were streamed, left or failed, and texts that are continued."""
    player, choose, streams = Player("tiny fp32", replays=replays), random.Random(0), []
    generator = player.session.generator
    for _ in range(SCHEDULES * (LONG_FACTOR if is_long() else 10)):
        request = choose.choice(player.requests)
        expected, call = player.alone[id(request)].ids, {"ids": request.ids[None], **request.arguments}
        player.tell(0, request)
        action = choose.choice(["generate", "stream", "leave", "fail", "reset", "go on"])
        if action == "reset":
            generator.reset()
        elif action == "fail":
            with contextlib.suppress(Failure):
                generator.generate(**call, logits_processor=[fails])
        elif action in ("stream", "leave"):
            events = generator.stream(**call)
            count = len(expected) if action == "stream" else choose.randint(0, 3)
            got = [token for event in itertools.islice(events, count) for token in event.ids[0]]
            assert got == (expected if action == "stream" else expected[: len(got)]), request
            streams += [events] * choose.randint(0, 1)  # stays open, or is closed
        elif action == "generate":
            assert generator.generate(**call)[0, len(request.ids) :].tolist() == expected, request
        elif request.arguments.keys() <= PLAIN and len(expected) > 1:
            # Noise is a function of the position: the first part of an answer may as well belong to the prompt.
            part = choose.randrange(1, len(expected))
            prompt = torch.cat([request.ids, torch.tensor(expected[:part])])
            call |= {"ids": prompt[None], "max_new_tokens": len(expected) - part}
            assert generator.generate(**call)[0, len(prompt) :].tolist() == expected[part:], request
