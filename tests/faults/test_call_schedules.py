"""Random schedules of calls on one generator: each gives what one-token decoding gives, whatever came before it."""

import contextlib
import functools
import math
from typing import NamedTuple

import pytest
import torch
from baseline import left_padded, prompt, sampled
from examples import examples
from families import Cheat, at_costs, make_draft, make_target
from hypothesis import given
from hypothesis import strategies as st
from recorded import record
from tiny_tokenizers import byte_level
from transformers import LogitsProcessorList

import dflash
from dflash.sampling import fold

ROWS, CAPACITY = 3, 96
POOL = [prompt(40, seed=seed).tolist() for seed in (21, 22)]  # prompts are cut from these, so that prefixes are shared
COSTS = {4: 1.0, 8: 1.05, 16: 1.1}  # of a step by width: the width then changes as a call proceeds
tokenizer = functools.cache(byte_level)


def banned_next(ids, scores):
    """Ban the token after the last one: a processor of Python."""
    scores[:, (int(ids[0, -1]) + 1) % scores.shape[1]] = -float("inf")
    return scores


RULES = {
    "repetition_penalty": st.sampled_from([1.3, 0.8]),
    "no_repeat_ngram_size": st.integers(1, 4),
    "bad_words_ids": st.sampled_from([[[5], [6, 7]], [[8, 9, 10]]]),
    "suppress_tokens": st.sampled_from([[3], [11, 12, 13]]),
    "min_new_tokens": st.integers(1, 6),
    "logits_processor": st.just([banned_next]),
}


class Call(NamedTuple):
    """One call: its prompts as lists of ids, how many tokens to write, and its other arguments."""

    prompts: list[list[int]]
    new: int
    arguments: dict

    @property
    def batch(self) -> dict:
        ids, mask = left_padded([torch.tensor(ids) for ids in self.prompts])
        return {"ids": ids, "attention_mask": mask, "max_new_tokens": self.new, **self.arguments}


@st.composite
def calls(draw):
    starts, ends = (
        [pool[:length] for pool in POOL for length in (1, 7, 20, 21, 40)],
        st.lists(st.integers(2, 96), max_size=2),
    )
    prompts = draw(st.lists(st.builds(list.__add__, st.sampled_from(starts), ends), min_size=1, max_size=ROWS))
    arguments = draw(st.fixed_dictionaries({}, optional=RULES)) if draw(st.booleans()) else {}
    if draw(st.booleans()):
        arguments |= {"temperature": draw(st.sampled_from([0.7, 1.2])), "seed": draw(st.integers(0, 3))}
        arguments |= {"top_k": draw(st.sampled_from([0, 20])), "top_p": draw(st.sampled_from([1.0, 0.9]))}
        arguments["draft_sharpness"] = draw(st.sampled_from([math.inf, 1.0]))
    if draw(st.booleans()):
        arguments |= {"stop_strings": draw(st.sampled_from([["ab"], ["c", "j "]])), "tokenizer": tokenizer()}
    if draw(st.booleans()):
        arguments["stop_token_ids"] = draw(st.lists(st.integers(2, 96), max_size=9))
    if draw(st.integers(0, 3)) == 0:
        arguments["denoise_steps"] = 3
    return Call(prompts, draw(st.integers(1, 14)), arguments)


actions = st.one_of(
    st.tuples(st.just("generate"), calls()),
    st.tuples(st.just("stream"), calls()),
    st.tuples(st.just("leave"), calls(), st.integers(0, 4), st.sampled_from(["open", "closed", "dropped"])),
    st.tuples(st.just("go on"), calls()),
    st.tuples(st.just("fail"), calls(), st.integers(1, 5)),
    st.tuples(st.sampled_from(["continue", "reset", "refuse"])),
)
generators = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([None, 1, 4, "auto"]),
        "reuse_prefix": st.booleans(),
        "prefill_chunk": st.sampled_from([5, 512]),
    }
)


@functools.cache
def pair():
    """Return a target, a drafter and the target's one-token loop, for what transformers' own cannot do."""
    target = make_target("qwen3")
    return target, make_draft(target), dflash.Generator(target, None, max_length=CAPACITY, reuse_prefix=False)


def one_token_decoding(call: Call) -> list[list[int]]:
    """Return the new tokens of every row, each written on its own, one at a time."""
    target, _, loop = pair()
    ignored = ("temperature", "seed", "top_k", "top_p", "draft_sharpness", "denoise_steps", "stop_token_ids")
    rules = {name: value for name, value in call.arguments.items() if name not in ignored}
    temperature, stop = call.arguments.get("temperature", 0), call.arguments.get("stop_token_ids", [])
    rows = []
    for row, ids in enumerate(call.prompts):
        p = torch.tensor(ids)
        if temperature and not rules:
            filters = {name: call.arguments[name] for name in ("top_k", "top_p")}
            seed = fold(call.arguments["seed"], row)
            rows.append(sampled(target, p, call.new, seed, temperature, stop=tuple(stop), **filters).tolist())
        elif temperature:
            alone = {**call.arguments, "seed": fold(call.arguments["seed"], row)}
            rows.append(loop.generate(p[None], max_new_tokens=call.new, **alone)[0, len(ids) :].tolist())
        else:
            rules["logits_processor"] = LogitsProcessorList(rules.get("logits_processor", []))
            # Without a mask transformers would take a token 0 in the prompt for padding.
            plain = {"attention_mask": torch.ones_like(p[None]), "pad_token_id": 0, "do_sample": False}
            out = target.generate(p[None], max_new_tokens=call.new, eos_token_id=stop or None, **plain, **rules)
            rows.append(out[0, len(ids) :].tolist())
    return rows


class Failure(Exception):
    """Raised by a processor."""


class Player:
    """Plays a schedule on a generator, and checks every text."""

    def __init__(self, options: dict, *, replays: bool) -> None:
        target, draft, _ = pair()
        self.generator = at_costs(Cheat(target, draft, max_length=CAPACITY, batch_size=ROWS, **options), COSTS)
        self.generator.spoil = 5
        if replays:
            record(self.generator)
        self.last: list[list[int]] = POOL[:1]
        self.open: list = []  # the stream that was left open, what it has given, and what it will give in all
        self.is_current = False

    def expect(self, call: Call) -> list[list[int]]:
        """Return the right text, and let the drafter propose most of it."""
        expected = one_token_decoding(call)
        self.generator.script = torch.zeros(ROWS, CAPACITY + 16, dtype=torch.int64)
        for row, (ids, answer) in enumerate(zip(call.prompts, expected, strict=True)):
            self.generator.script[row, : len(ids) + len(answer)] = torch.tensor([*ids, *answer])
        self.last = [[*ids, *answer] for ids, answer in zip(call.prompts, expected, strict=True)]
        self.is_current = False
        return expected

    def generate(self, call: Call) -> None:
        expected, width = self.expect(call), max(map(len, call.prompts))
        output = self.generator.generate(**call.batch)
        for row, answer in zip(output[:, width:].tolist(), expected, strict=True):
            assert row[: len(answer)] == answer
        assert output.shape[1] == width + max(map(len, expected))

    def stream(self, call: Call) -> None:
        expected = self.expect(call)
        events = list(self.generator.stream(**call.batch))
        for row, answer in enumerate(expected):
            assert [token for event in events for token in event.ids[row]] == answer
            if "tokenizer" in call.arguments:
                assert "".join(event.text[row] for event in events) == tokenizer().decode(answer)

    def leave(self, call: Call, steps: int, how: str) -> None:
        expected, got = self.expect(call), [[] for _ in call.prompts]
        stream = self.generator.stream(**call.batch)
        for event in (event for _, event in zip(range(steps), stream, strict=False)):
            got = [[*before, *new] for before, new in zip(got, event.ids, strict=True)]
        assert got == [answer[: len(tokens)] for tokens, answer in zip(got, expected, strict=True)]
        if how == "closed":
            stream.close()
        elif how == "open":
            self.open, self.is_current = [stream, got, expected], True

    def go_on(self, call: Call) -> None:
        """Take the texts of the call before as prompts, as the next turn of a conversation does."""
        rows = min(len(self.last), len(call.prompts))
        prompts = [[*self.last[row][: CAPACITY - 20], *call.prompts[row][-2:]] for row in range(rows)]
        self.generate(call._replace(prompts=prompts))

    def fail(self, call: Call, after: int) -> None:
        """Raise from a processor in the middle of the call."""
        self.expect(call)
        countdown = iter(range(after))

        def processor(ids, scores):
            if next(countdown, None) is None:
                raise Failure
            return scores

        with_processor = {**call.batch, "logits_processor": [processor]}
        with contextlib.suppress(Failure):
            self.generator.generate(**with_processor)

    def resume(self) -> None:
        if not self.open:
            return
        (stream, got, expected), self.open = self.open, []
        if self.is_current or not any(got):  # one that has not begun takes its turn now
            self.is_current = False
            try:
                for event in stream:
                    got = [[*before, *new] for before, new in zip(got, event.ids, strict=True)]
            except RuntimeError:
                pytest.fail("nothing has started since")
            assert got == expected
        elif got != expected:
            with pytest.raises(RuntimeError, match="this stream has ended"):
                list(stream)

    def refuse(self) -> None:
        with pytest.raises(ValueError, match="temperature"):
            self.generator.generate(torch.tensor([[1, 2]]), temperature=-1.0)

    def play(self, name: str, *arguments: object) -> None:
        if name == "reset":
            self.is_current = False
            self.generator.reset()
        else:
            {"continue": self.resume, "go on": self.go_on}.get(name, getattr(self, name, None))(*arguments)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Unfeasible length")
@examples(20)
@given(generators, st.booleans(), st.lists(actions, min_size=5, max_size=8))
def test_every_call_of_a_schedule_gives_the_right_text(options, replays, schedule):
    player = Player(options, replays=replays)
    for action in schedule:
        player.play(*action)
