"""DeepSeek-V4, GLM-5.3, Qwen4: a rejected row never becomes part of a pooled key, wherever in its window it stands."""

import functools

import pytest
import torch
from baseline import check_answers, check_batch, greedy, prompt
from families import cheat, make_draft, make_target
from rollback import play

import dflash
from dflash.targets import Target
from dflash_serve.memory import bytes_per_token

NEW = 24
FAMILIES = ["deepseek_v4", "glm5_next", "qwen4_exp"]  # windows of 4 and 8 positions, of 4, and blocks of 4
SLOW = "qwen4_exp"  # its own modules loop over rows in Python: fewer prompts and tokens


@functools.cache
def shared(family):
    return make_target(family)


@pytest.fixture(scope="module")
def target():
    return shared("deepseek_v4")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("accepted", [1, 2, 3, 4, 5, 8, 9])
def test_rows_are_rejected_at_every_place_of_a_window(family, accepted):
    """Prompts begin at each place of the longest window, and every step accepts so many rows of nine."""
    target = shared(family)
    draft = make_draft(target)
    new = 10 if family == SLOW else NEW
    for length in (17, 19) if family == SLOW else range(16, 24):
        p = prompt(length)
        expected = greedy(target, p, new)
        generator = cheat(target, draft, [p], [expected], spoil=accepted, block_size=9)
        output = check_batch(generator.generate, [p], [expected], max_new_tokens=new)
        if accepted > 2 and family != SLOW:
            assert output.statistics.acceptance_length > min(accepted, 9) / 2


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_has_the_bits_of_one_token_decoding(family):
    target = Target(make_target(family, dtype=torch.bfloat16))
    prompts = [prompt(length) for length in (1, 17, 60)]
    new = 12 if family == SLOW else 32
    one = play(target, prompts, new)
    for seed in (1, 2, 3):
        played = play(target, prompts, new, seed, one.tokens)
        assert all(map(torch.equal, played.logits, one.logits))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{"prefill_chunk": 7}, {"reuse_prefix": True}, {"compile": True}], ids=str)
def test_chunks_earlier_calls_and_compiled_steps_write_the_same(family, options):
    target = shared(family)
    if "compile" in options and family == "qwen4_exp":
        with pytest.raises(ValueError, match="compile=True cannot be followed: the indexers of its model loop"):
            dflash.Generator(target, make_draft(target), max_length=160, **options)
        return
    generator = dflash.Generator(target, make_draft(target), max_length=160, **options)
    new = 10 if family == SLOW else NEW
    for length in (61, 30) if family == SLOW else (61, 64, 30, 8):
        p = prompt(length)
        check_answers(generator.generate(p[None], max_new_tokens=new), length, [greedy(target, p, new)])


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_equal_scores_are_chosen_as_the_model_chooses(family):
    target = make_target(family, index_topk=24 if family == "glm5_next" else 6)  # of positions, or of entries
    for name, weight in target.named_parameters():
        if "weights_proj" in name:
            weight.data.zero_()
    generator = dflash.Generator(target, make_draft(target), max_length=160, prefill_chunk=16)
    for length in (1, 40, 61):
        p = prompt(length)
        check_answers(generator.generate(p[None], max_new_tokens=NEW), length, [greedy(target, p, NEW)])


def test_taps_are_the_mean_of_the_streams(target):
    ids = prompt(20)[None]
    with torch.no_grad():
        hidden = target(ids, output_hidden_states=True).hidden_states
    ours = Target(target, (0, 3))
    cache = ours.new_cache(1, 32, 16)
    nothing = torch.zeros(1, dtype=torch.int64)
    _, taps = ours.forward(ids, nothing, cache, keep=nothing + 20)
    assert hidden[1].dim() == 4
    torch.testing.assert_close(taps[0], hidden[1].mean(2), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(taps[1], hidden[-1], rtol=1e-4, atol=1e-4)


def test_the_memory_of_what_is_pooled_is_counted(target):
    generator = dflash.Generator(target, None, max_length=64)
    generator.generate(prompt(9)[None], max_new_tokens=3)
    cache = generator.state.target_cache
    each = sum(buffer.nbytes // cache.capacity for buffer in cache.buffers)
    assert each <= bytes_per_token(target, None) <= each + 256
