"""Logit rules of many kinds cost bounded memory: the least recently used are freed, and come back right."""

import gc
import weakref

import pytest
import torch
from baseline import prompt
from recorded import record

import dflash
from dflash.engine import graphs

KEPT = 16  # fewer than by default, which would need more calls to be reached
LIVE = KEPT + 1  # and those of the call that runs
SIZES = range(2, 26)
CALL = {"max_new_tokens": 8, "suppress_tokens": [3], "bad_words_ids": [[4]], "repetition_penalty": 1.4}


@pytest.fixture(autouse=True)
def fewer_graphs(monkeypatch):
    monkeypatch.setattr(graphs, "_MAX_GRAPHS", KEPT)


def tensors(generator) -> list[weakref.ref]:
    """Return weak references to the values of every rule of the last call."""
    rules = generator.engine.rules.rules
    return [weakref.ref(value) for rule in rules for value in vars(rule).values() if isinstance(value, torch.Tensor)]


def living(references) -> int:
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("replays", [False, True], ids=["", "replayed"])
def test_values_of_rules_are_freed(target, draft, replays):
    generator = dflash.Generator(target, draft, max_length=40)
    if replays:
        record(generator)
    ids, made = prompt(9)[None], []
    for size in SIZES:
        for _ in range(2):
            generator.generate(ids, no_repeat_ngram_size=size, **CALL)
        made.append(tensors(generator))
    gc.collect()
    alive = [bool(living(each)) for each in made]
    assert sum(alive) <= LIVE
    assert all(alive[-8:]), "recent rules are kept"
    if replays:
        assert generator.runner.graphs <= LIVE


@pytest.mark.parametrize("replays", [False, True], ids=["", "replayed"])
def test_freed_rules_come_back_with_the_right_text(target, draft, replays):
    ids, expected = prompt(9)[None], []
    for size in SIZES:
        expected.append(dflash.Generator(target, None, max_length=40).generate(ids, no_repeat_ngram_size=size, **CALL))
    generator = dflash.Generator(target, draft, max_length=40)
    if replays:
        record(generator)
    for _ in range(3):
        for size, answer in zip(SIZES, expected, strict=True):
            assert torch.equal(generator.generate(ids, no_repeat_ngram_size=size, **CALL), answer)
    if replays:
        assert generator.runner.steps["replayed"] > 0


def test_rules_in_frequent_use_stay(target, draft):
    generator = dflash.Generator(target, draft, max_length=40)
    ids = prompt(9)[None]
    generator.generate(ids, **CALL)
    kept = generator.engine.rules
    for size in SIZES:
        generator.generate(ids, no_repeat_ngram_size=size, **CALL)
        generator.generate(ids, **CALL)
        assert generator.engine.rules is kept


def test_rules_of_a_stream_left_open_are_not_lost(target, draft):
    generator = dflash.Generator(target, draft, max_length=40)
    ids = prompt(9)[None]
    expected = generator.generate(ids, no_repeat_ngram_size=2, **CALL)
    for size in SIZES:
        next(generator.stream(ids, no_repeat_ngram_size=size, **CALL))
    assert torch.equal(generator.generate(ids, no_repeat_ngram_size=2, **CALL), expected)
