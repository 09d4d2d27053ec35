"""Test that the output is the target's own: greedy, sampled, in bf16, for every family, drafter and block size."""

import functools
import math

import pytest
import torch
from baseline import check_answers, check_batch, greedy, left_padded, prompt, sampled
from families import DRAFTERS, FAMILIES, RECURRENT, cheat, hinted, make_draft, make_target, save_with_head
from transformers import Gemma2Config, Gemma2ForCausalLM

import dflash
from dflash.proposers.chain import DraftPass
from dflash.sampling import fold
from dflash.session import Session

LENGTHS = [1, 2, 15, 16, 17, 70]
BLOCK_SIZES = [2, 7, 16]
NEW = 20
SUPPORTED = [
    "qwen3", "qwen3 (windowed)", "qwen3_moe", "qwen2", "llama", "llama (llama3 RoPE)", "mistral", "mistral (windowed)",
    "gemma3", "gemma4", "gemma4 (shared K/V)", "gemma4 (experts)", "gpt_oss", "glm4_moe", "glm_moe_dsa", "deepseek_v3",
    "deepseek_v32", "deepseek_v4", "minimax_m2", "kimi_k25", *RECURRENT,
]  # fmt: skip


@pytest.mark.parametrize("family", SUPPORTED)
def test_greedy_equals_generate_in_ragged_batches(family):
    target = make_target(family)
    draft = make_draft(target)
    prompts = [prompt(length) for length in LENGTHS]
    expected = [greedy(target, p, NEW) for p in prompts]
    for block_size in BLOCK_SIZES:
        generator = cheat(target, draft, prompts, expected, spoil=5, block_size=block_size)
        output = check_batch(generator.generate, prompts, expected, max_new_tokens=NEW)
        if block_size > 2:
            assert output.statistics.acceptance_length > 2, "correct drafts should have been accepted"


def test_every_family_is_tested_or_refused():
    refused = set(FAMILIES) - set(SUPPORTED)
    assert refused == {"phimoe (windowed)"}  # which has a test of its refusal


DRAWN = {"temperature": 1.0, "seed": 3}
# Options of a generator and of its call.
WAYS = {
    "greedy": ({}, {}),
    "sampled": ({}, DRAWN),
    "the drafter's best": ({}, DRAWN | {"draft_sharpness": math.inf}),
    "rules": ({}, DRAWN | {"repetition_penalty": 1.3, "suppress_tokens": [5, 8]}),
    "several passes": ({"denoise_steps": 3}, {}),
    "sampled in several passes": ({"denoise_steps": 40}, DRAWN | {"draft_sharpness": 1.0}),
    "a tree": ({"tree": 12}, {}),
    "a sampled tree": ({"tree": 40}, DRAWN),
    "short blocks": ({"block_size": 3}, DRAWN),
    "a window": ({"drafter_window": 9}, {}),
    "8 bits": ({"draft_weights": "int8"}, DRAWN),
    "lookup": ({"prompt_lookup": 2}, {}),
}
OTHERS = [pytest.mark.slow, pytest.mark.full]
COMBINATIONS = [
    pytest.param(drafter, way, marks=OTHERS * ((i + j) % len(WAYS) > 0), id=f"{drafter}, {way}")
    for i, drafter in enumerate(DRAFTERS)
    for j, way in enumerate(WAYS)
]


@functools.cache
def own_text(way: str) -> tuple:
    """Return a target, prompts, and what it writes after them by itself."""
    call = {name: value for name, value in WAYS[way][1].items() if name != "draft_sharpness"}
    target, prompts = make_target("qwen3"), [prompt(3, seed=2), prompt(60, seed=2)]
    if not call:
        return target, prompts, [greedy(target, p, NEW) for p in prompts]
    if call == DRAWN:
        return target, prompts, [sampled(target, p, NEW, fold(3, row), 1.0) for row, p in enumerate(prompts)]
    ids, mask = left_padded(prompts)
    alone = dflash.Generator(target, None, max_length=110, batch_size=2)
    text = alone.generate(ids, attention_mask=mask, max_new_tokens=NEW, **call)
    return target, prompts, [*text[:, ids.shape[1] :]]


@pytest.mark.parametrize(("drafter", "way"), COMBINATIONS)
def test_no_drafter_changes_the_text(drafter, way, tmp_path):
    """It knows four tokens of five."""
    made, call = WAYS[way]
    target, prompts, answers = own_text(way)
    texts = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    generator = hinted(target, DRAFTERS[drafter](target, tmp_path), texts, **made)
    output = check_batch(generator.generate, prompts, answers, max_new_tokens=NEW, **call)
    assert "some tokens" in drafter or output.statistics.acceptance_length > 1.5


@pytest.mark.parametrize("drafter", ["Qwen3-4B", "DFlash2", "DSpark", "DSpark of some tokens", "own head"])
def test_rejection_repeats_itself_with_one_seed(drafter, tmp_path):
    target, p = make_target("qwen3"), prompt(9, seed=2)[None]
    generator = dflash.Generator(target, DRAFTERS[drafter](target, tmp_path), max_length=40)
    call = DRAWN | {"max_new_tokens": NEW, "acceptance": "rejection"}
    assert torch.equal(generator.generate(p, **call), generator.generate(p, **call))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "deepseek_v32", "glm4_moe"])
def test_no_head_of_the_target_changes_the_text(family, tmp_path):
    target = dflash.load_target(save_with_head(tmp_path, family))
    prompts = [prompt(3, seed=2), prompt(30, seed=2)]
    expected = [greedy(target, p, NEW) for p in prompts]
    check_batch(functools.partial(dflash.generate, target, "mtp"), prompts, expected, max_new_tokens=NEW)
    for block_size in (2, 4, 8):
        generator = cheat(target, "mtp", prompts, expected, spoil=5, block_size=block_size)
        output = check_batch(generator.generate, prompts, expected, max_new_tokens=NEW)
        assert output.statistics.acceptance_length > 1.4, "correct drafts should have been accepted"
    expected = [sampled(target, p, NEW, fold(3, row), 1.0) for row, p in enumerate(prompts)]
    check_batch(generator.generate, prompts, expected, max_new_tokens=NEW, temperature=1.0, seed=3)


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_window_of_the_drafter_hides_what_is_older(weights, shift):
    """The first row of a block of 16 sees 9 + 15 positions before the anchor, and keeps the drafter as it is."""
    target, length, options = make_target("qwen3"), torch.tensor([50]), {"max_length": 80, "draft_weights": weights}
    draft, generator = make_draft(target), torch.Generator().manual_seed(0)
    made = dflash.Generator(target, draft, drafter_window=9, **options).draft
    whole = dflash.Generator(target, draft, **options).draft
    context = torch.randn(1, 50, draft.fc.weight.shape[1], generator=generator)
    block, seen = torch.randn(1, 16, 64, generator=generator), []
    for each in (made, whole):
        cache, features = each.new_cache(1, 80), each.fuse(context, length)
        each.inject_(features, torch.arange(50)[None], cache)
        for buffer in cache.buffers:
            buffer[:, :, : 50 - 9 - 15 + shift] = math.nan
        seen.append(each(features[:, :0], torch.tensor([0]), block, length, cache).isfinite().all(-1)[0].tolist())
    assert seen == [[not shift] * 16, [False] * 16]
    assert draft.config.window == (0, 0, 0)


def _drafted(target, slides: bool, act, monkeypatch, **options) -> tuple:
    """Return what ``act`` returns with a generator whose drafter sees a window, and the logits of all its passes."""
    draft, logits, new_cache = make_draft(target), [], dflash.Drafter.new_cache
    with monkeypatch.context() as patch:
        if not slides:
            patch.setattr(dflash.Drafter, "new_cache", lambda self, *sizes, slides: new_cache(self, *sizes))
        generator = dflash.Generator(target, draft, drafter_window=9, max_length=1300, **options)
    assert (generator.state.draft_cache.capacity < 600) == slides
    chain = generator.engine.chain

    def predict(*given):
        predictions = DraftPass.predict(chain, *given)
        logits.append(predictions.logits[generator.state.done == 0])
        return predictions

    monkeypatch.setattr(chain, "predict", predict)
    return act(generator), logits


def _batch(generator) -> list:
    """Of two ragged prompts, one of which fills the drafter's cache while it is answered."""
    ids, mask = left_padded([prompt(1150, seed=3), prompt(525, seed=3)])
    return generator.generate(ids, attention_mask=mask, max_new_tokens=24).tolist()


def _conversation(generator) -> list:
    """Whose second turn takes back some of the first answer, and which then begins again."""
    first = generator.generate(prompt(1000, seed=3)[None], max_new_tokens=24, temperature=1.0, seed=3)[0]
    second = torch.cat([first[:-9], prompt(30)])[None]
    return [generator.generate(ids, max_new_tokens=12).tolist() for ids in (second, prompt(40, seed=5)[None])]


def _cached_prompts(generator) -> list:
    """Of which the second begins with chunks of the first, in another row, beside a request that runs."""
    session, texts = Session(generator), {}
    for ids in (prompt(700, seed=3), prompt(60), torch.cat([prompt(700, seed=3)[:660], prompt(20)])):
        session.admit(session.resolve(ids[None], max_new_tokens=40))
        for _ in range(20):
            for row, event, error in session.step():
                assert not error
                texts.setdefault(row, []).extend(event.ids[0])
    return sorted(texts.items())


@pytest.mark.parametrize(("act", "batch_size"), [(_batch, 2), (_conversation, 1), (_cached_prompts, 3)])
def test_a_drafter_drafts_the_same_from_a_cache_that_slides(act, batch_size, monkeypatch):
    target, options = make_target("qwen3", max_position_embeddings=1400), {"batch_size": batch_size}
    (texts, logits), (wanted, others) = (
        _drafted(target, slides, act, monkeypatch, prefill_chunk=64, **options) for slides in (True, False)
    )
    assert texts == wanted
    assert len(logits) > 20
    assert all(map(torch.equal, logits, others))


def test_a_conversation_may_go_back_past_what_a_sliding_cache_holds():
    target = make_target("qwen3", max_position_embeddings=1400)
    generator = dflash.Generator(target, make_draft(target), drafter_window=9, max_length=1300)
    generator.generate(prompt(1000, seed=3)[None], max_new_tokens=1)
    ids = torch.cat([prompt(1000, seed=3)[:200], prompt(5)])
    output = generator.generate(ids[None], max_new_tokens=NEW, return_dict_in_generate=True)
    assert output.statistics.num_prefilled_tokens == [5]
    assert output.sequences[0, 205:].tolist() == greedy(target, ids, NEW).tolist()


RULES = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_sampled_output_equals_the_independent_baseline(rule):
    target = make_target("llama")
    generate = functools.partial(dflash.generate, target, make_draft(target), max_new_tokens=NEW, **rule)
    prompts = [prompt(length, seed=3) for length in (1, 16, 40)]
    expected = [sampled(target, p, NEW, fold(11, row), **rule) for row, p in enumerate(prompts)]
    for block_size, sharpness in ((16, 1.0), (5, math.inf), (2, 2.0), (1, 1.0)):
        check_batch(generate, prompts, expected, seed=11, block_size=block_size, draft_sharpness=sharpness)
    check_batch(generate, prompts[2:], expected[2:], seed=fold(11, 2))


@pytest.mark.parametrize("family", SUPPORTED)
def test_sampled_output_equals_the_baseline_for_every_family(family):
    target = make_target(family)
    p = prompt(18, seed=4)
    output = dflash.generate(target, make_draft(target), p[None], max_new_tokens=NEW, temperature=0.9, seed=-5)
    check_answers(output, len(p), [sampled(target, p, NEW, -5, 0.9)])


def test_stop_tokens_end_a_row_in_the_middle_of_a_block():
    target = make_target("qwen3")
    prompts = [prompt(4, seed=5), prompt(9, seed=5)]
    full = [greedy(target, p, NEW) for p in prompts]
    stop = (int(full[0][6]), int(full[1][13]))
    expected = [greedy(target, p, NEW, stop) for p in prompts]
    assert any(len(answer) < NEW for answer in expected)
    generator = cheat(target, make_draft(target), prompts, full)
    output = check_batch(generator.generate, prompts, expected, max_new_tokens=NEW, stop_token_ids=stop)
    assert output.finish_reasons == ["stop" if answer[-1] in stop else "length" for answer in expected]


def test_a_softcap_of_the_scores_is_applied():
    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(0)
    config = Gemma2Config(**sizes, attn_logit_softcapping=2.0, sliding_window=64, attn_implementation="eager")
    target, p = Gemma2ForCausalLM(config).eval(), prompt(20, seed=5)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.q_proj.weight *= 40  # scores past the cap
    check_answers(dflash.generate(target, None, p[None], max_new_tokens=NEW), 20, [greedy(target, p, NEW)])


class TestBfloat16:
    """In bf16, the output equals the one-token mode's bit for bit. That mode runs the same padded shapes."""

    @pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_equal_to_the_one_token_mode_for_five_drafters(self, family, temperature):
        target = make_target(family, dtype=torch.bfloat16)
        prompts = [prompt(length, seed=6) for length in (1, 17, 60)]
        ids, mask = left_padded(prompts)
        call = {"attention_mask": mask, "max_new_tokens": 40, "temperature": temperature, "seed": 8}
        one = dflash.Generator(target, None, max_length=128, batch_size=3, block_size=16)
        expected = one.generate(ids, return_dict_in_generate=True, **call)
        assert expected.statistics.acceptance_length == 1
        answers, lengths = list(expected.sequences[:, ids.shape[1] :]), set()
        for spoil in (0, 2, 5, 11):
            generator = cheat(target, make_draft(target), prompts, answers, spoil, max_length=128)
            output = generator.generate(ids, return_dict_in_generate=True, **call)
            assert torch.equal(output.sequences, expected.sequences)
            lengths.update(length for row in output.statistics.acceptance_lengths for length in row)
        assert max(lengths) == 16
        random = dflash.generate(target, make_draft(target), ids, **call)
        assert torch.equal(random, expected.sequences)
