"""Logit rules of many kinds cost bounded memory: the least recently used are freed, and come back right."""

import gc
import weakref

import process
import pytest
import torch
from baseline import prompt
from recorded import record

import dflash
from dflash.engine import runner
from dflash.engine.runner import compiled_per_kind

KEPT = 16  # fewer than by default, which would need more calls to be reached
LIVE = KEPT + 1  # and those of the call that runs
SIZES = range(2, 26)
CALL = {"max_new_tokens": 8, "suppress_tokens": [3], "bad_words_ids": [[4]], "repetition_penalty": 1.4}


@pytest.fixture(autouse=True)
def fewer_graphs(monkeypatch):
    monkeypatch.setattr(runner, "_MAX_GRAPHS", KEPT)


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
        assert len(generator.runner._seen) <= LIVE + 1


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


def test_compiled_steps_of_freed_rules_are_freed(monkeypatch):
    class Rules:
        pass

    def compiled(step, **options):
        graph = lambda: step()  # noqa: E731 - a lambda can be referred to weakly, and is a new object
        graphs.append(weakref.ref(graph))
        return graph

    graphs, rules = [], []
    monkeypatch.setattr(torch, "compile", compiled)
    run = compiled_per_kind(lambda: None, lambda: (1, weakref.ref(rules[-1])))
    for _ in range(30):
        rules[:] = [*rules[-4:], Rules()]
        run()
        run()
    gc.collect()
    assert len(graphs) == 30
    assert living(graphs) <= 6
    forever = [Rules() for _ in range(60)]
    for each in forever:
        rules.append(each)
        run()
    assert living(graphs) <= LIVE


MEMORY = """
import resource

import torch
from families import make_draft, make_target

import dflash

target = make_target("qwen3", vocab_size=151936, num_hidden_layers=1)
generator = dflash.Generator(target, None, max_length=512)
ids = torch.arange(2, 300)[None]
call = {"max_new_tokens": 1, "suppress_tokens": [3], "bad_words_ids": [[4]], "logit_bias": {5: 1.0}}


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


for size in range(2, 22):
    generator.generate(ids, no_repeat_ngram_size=size, **call)
before = peak()
for size in range(30, 100):
    generator.generate(ids, no_repeat_ngram_size=size, **call)
print(peak() - before)
"""


def test_70_sizes_of_n_grams_cost_less_than_50_megabytes():
    done = process.python(MEMORY)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 50
