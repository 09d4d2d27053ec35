"""Logit rules of many kinds cost bounded memory: the least recently used are freed, and come back right."""

import gc
import weakref

import pytest
import torch
from baseline import prompt
from recorded import record

import dflash

SIZES = range(2, 90)
CALL = {"max_new_tokens": 4, "suppress_tokens": [3], "bad_words_ids": [[4]], "repetition_penalty": 1.4}


@pytest.mark.parametrize("replays", [False, True], ids=["", "replayed"])
def test_values_of_rules_are_freed_and_come_back_with_the_right_text(target, draft, replays):
    generator = dflash.Generator(target, draft, max_length=40)
    alone = dflash.Generator(target, None, max_length=40)
    if replays:
        record(generator)
    ids, made = prompt(9)[None], []
    generator.generate(ids, **CALL)
    frequent = generator.engine.rules
    for size in SIZES:
        for _ in range(1 + replays):
            generator.generate(ids, no_repeat_ngram_size=size, **CALL)
        made.append(weakref.ref(generator.engine.rules))
        generator.generate(ids, **CALL)
        assert generator.engine.rules is frequent
    gc.collect()
    alive = [reference() is not None for reference in made]
    assert not any(alive[:16])
    assert all(alive[-8:]), "recent rules are kept"
    for size in (2, 3, 60):
        call = {"no_repeat_ngram_size": size, **CALL}
        assert torch.equal(generator.generate(ids, **call), alone.generate(ids, **call))
    if replays:
        assert generator.runner.graphs <= len(SIZES)
        assert generator.runner.device.steps["replayed"] > 0
