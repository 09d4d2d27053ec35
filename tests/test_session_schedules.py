"""Random schedules of requests on one session: each writes what it writes alone, bit for bit.

Some have grammars, so that steps with masks come and go too. Chunks of prompts come from the cache of the session, and
answers that have ended are settled at random times. Each step has a random width, but for targets whose bits would
depend on it.

Reference is a request in a session of its own with a drafter that knows nothing, so that its blocks begin elsewhere.
Compared are ids, text, the reason of the end, and the keys and values that the target has kept.
"""

import functools
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from baseline import prompt
from examples import LONG_FACTOR, is_long
from families import at_costs, hinted, make_draft, make_target
from recorded import record
from tiny_tokenizers import byte_level

import dflash
from dflash.proposers import chain_widths
from dflash.session import Session

ROWS, NEW = 4, 20
SCHEDULES = 8  # per kind of pair and way to launch steps
SETTINGS = [
    {},
    {"temperature": 1.0},
    {"temperature": 1.0, "draft_sharpness": 2.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "stop_token_ids": [*range(30, 45)]},
    {"temperature": 1.0, "stop_strings": ["a", "b "], "tokenizer": ...},
    {"tokenizer": ..., "stop_token_ids": []},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.6, "frequency_penalty": 0.2, "temperature": 1.0},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "temperature": 1.2},
    {"logit_bias": {5: 3.0, (5, 6): 4.0, (7, 8, 9): -2.0}, "temperature": 1.0},
    {"logit_bias": {9: 2.0, 11: -float("inf")}},
    {"bad_words_ids": [[5], [6, 7], [8, 9, 10]], "suppress_tokens": [12]},
    {"min_new_tokens": 9, "stop_token_ids": [*range(2, 60)], "temperature": 1.0},
    {"forced_eos_token_id": 4, "begin_suppress_tokens": [*range(2, 50)]},
    {"grammar": dflash.Grammar.regex(r"([a-f]{2,9}[ \n])*(j|é)"), "temperature": 1.0},
    {"grammar": dflash.Grammar.lark('start: pair\npair: "a" pair "b" | "c" pair "d" | pair pair | /[e-g]+/')},
    {"grammar": dflash.Grammar.regex("a{1,3}"), "temperature": 1.0},
    {"grammar": dflash.Grammar.regex("(abc\n){9}"), "temperature": 1.0, "stop_strings": ["a\na"]},
]


class Request(NamedTuple):
    """A prompt and the other arguments of a call."""

    ids: torch.Tensor
    arguments: dict


class Result(NamedTuple):
    """What a request has written."""

    ids: list[int]
    text: str
    reason: str | None
    kept: list[torch.Tensor]


def requests(vocab: int, tokenizer) -> list[Request]:
    """Return requests of every kind, many of which share the beginning of their prompts."""
    stems = [prompt(40, seed=seed, vocab=vocab) for seed in (61, 62)]
    choose, made = random.Random(5), []
    end = {"tokenizer": tokenizer, "stop_token_ids": [tokenizer.eos_token_id]}
    for index in range(3 * len(SETTINGS)):
        stem, length = choose.choice(stems), choose.choice([1, 7, 8, 16, 17, 25, 40])
        ids = torch.cat([stem[:length], prompt(choose.randint(0, 9), seed=index, vocab=vocab)])
        arguments = {"max_new_tokens": choose.randint(1, NEW), "seed": index, **SETTINGS[index % len(SETTINGS)]}
        if "grammar" in arguments:
            arguments |= end
        elif "tokenizer" in arguments:
            arguments["tokenizer"] = tokenizer
        made.append(Request(ids, arguments))
    return made


def tiny(family: str, dtype: torch.dtype) -> tuple:
    target = make_target(family, dtype=dtype)
    return target, make_draft(target), byte_level()


PAIRS: dict[str, Callable] = {
    "tiny fp32": lambda: tiny("qwen3", torch.float32),
    "tiny bf16": lambda: tiny("qwen3", torch.bfloat16),
    "tiny bf16, own modules": lambda: tiny("qwen3", torch.bfloat16),
    "recurrent bf16": lambda: tiny("qwen3_5", torch.bfloat16),
    "trained fp32": lambda: dflash.demo_pair(),
    "trained bf16": lambda: dflash.demo_pair(dtype=torch.bfloat16),
}


@functools.cache
def alone(pair: str) -> tuple:
    """Return target, drafter and requests of a pair, and what each request writes in a session of its own."""
    target, draft, tokenizer = PAIRS[pair]()
    wanted, results = requests(target.get_input_embeddings().weight.shape[0], tokenizer), []
    for request in wanted:
        session = Session(dflash.Generator(target, draft, **options(pair)))
        results += [result for _, result in play(session, [request], random.Random(0))]
        if "grammar" in request.arguments:  # masks that no session applies would be the same in all of them
            generator = dflash.Generator(target, draft, **options(pair))
            output = generator.generate(request.ids[None], return_dict_in_generate=True, **request.arguments)
            assert output.sequences[0, len(request.ids) :].tolist() == results[-1].ids
    return target, draft, wanted, results


def play(
    session: Session, wanted: list[Request], choose: random.Random, tell: Callable = lambda row, request: None
) -> Iterator[tuple[Request, Result]]:
    """Yield each request that was not cancelled, and its result; ``tell`` is called when one gets its row."""
    waiting, running = list(wanted), {}
    while waiting or running:
        while waiting and session.idle and (not running or choose.random() < 0.5):
            request = waiting.pop(0)
            row = session.admit(session.resolve(request.ids[None], **request.arguments))
            running[row] = request, [], []
            tell(row, request)
        for row, event, error in session.step():
            request, ids, texts = running[row]
            assert not error
            ids += event.ids[0]
            texts += event.text or []
            if event.finish_reasons[0] is not None:
                length, cache = len(request.ids) + len(ids) - 1, session.generator.state.target_cache
                kept = [x[row, :, :length].clone() for x in (*cache.keys.values(), *cache.values.values())]
                del running[row]
                session.retire(row)
                yield request, Result(ids, "".join(texts), event.finish_reasons[0], kept)
        if len(wanted) > 1 and running and choose.random() < 0.03:
            row = choose.choice(list(running))
            del running[row]
            session.retire(row)
        if choose.random() < 0.2:
            session.settle()


def options(pair: str) -> dict:
    fused = False if "own modules" in pair else "auto"
    return {"max_length": 72, "batch_size": ROWS, "prefill_chunk": 8, "fused": fused}


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
