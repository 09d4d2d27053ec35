"""Test draft_sharpness: it changes what is drafted, never the text."""

import math

import pytest
from baseline import left_padded, prompt, sampled
from families import make_draft, make_target

import dflash
from dflash.sampling import fold


@pytest.fixture(scope="module")
def ragged():
    target = make_target("llama")
    prompts = [prompt(length, seed=3) for length in (1, 16, 40)]
    return target, make_draft(target), prompts, *left_padded(prompts)


@pytest.mark.parametrize(
    ("rule", "sharpness"),
    [
        ({"temperature": 1.0}, (0.0, 2.0, math.inf)),
        ({"temperature": 0.7, "top_k": 5}, (0.5, 1.0, 7.0)),
        ({"temperature": 1.4, "top_p": 0.8}, (1.0, math.inf)),
    ],
)
def test_the_text_is_the_same_for_every_sharpness(ragged, rule, sharpness):
    target, draft, prompts, ids, mask = ragged
    expected = [sampled(target, p, 24, fold(11, row), **rule).tolist() for row, p in enumerate(prompts)]
    for value in sharpness:
        output = dflash.generate(
            target, draft, ids, attention_mask=mask, max_new_tokens=24, seed=11, draft_sharpness=value, **rule
        )
        assert output[:, ids.shape[1] :].tolist() == expected, value


def test_1_is_the_default_and_equal_calls_draft_equally(ragged):
    target, draft, _, ids, mask = ragged
    generator = dflash.Generator(target, draft, max_length=80, batch_size=3, reuse_prefix=False)
    call = {"attention_mask": mask, "max_new_tokens": 24, "temperature": 1.0, "seed": 5}
    lengths = []
    for more in ({}, {"draft_sharpness": 1.0}, {"draft_sharpness": math.inf}):
        output = generator.generate(ids, return_dict_in_generate=True, **call, **more)
        lengths.append(output.statistics.acceptance_lengths)
    assert lengths[0] == lengths[1]
    with pytest.raises(TypeError, match=r"draft_sharpness must be a number of at least 0 .*, got 'auto'"):
        generator.generate(ids, **call, draft_sharpness="auto")
