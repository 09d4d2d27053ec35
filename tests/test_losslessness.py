"""Test that the output is the target's own: greedy, sampled, in bf16, for every family, drafter and block size."""

import functools
import itertools
import math

import pytest
import torch
from baseline import check_answers, check_batch, greedy, left_padded, prompt, sampled
from draft_variants import DFLASH2_VARIANTS, VARIANTS
from families import FAMILIES, RECURRENT, cheat, make_draft, make_target, save_with_head
from transformers import Gemma2Config, Gemma2ForCausalLM

import dflash
from dflash.sampling import fold

LENGTHS = [1, 2, 15, 16, 17, 113]
BLOCK_SIZES = [1, 2, 7, 8, 16]
NEW = 24
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


@pytest.mark.parametrize("variant", VARIANTS | DFLASH2_VARIANTS)
def test_no_drafter_changes_the_text(variant):
    target = make_target("qwen3")
    prompts = [prompt(3, seed=2), prompt(30, seed=2)]
    generate = functools.partial(dflash.generate, target, make_draft(target, variant), max_new_tokens=NEW)
    answers = [greedy(target, p, NEW) for p in prompts]
    drawn = [sampled(target, p, NEW, fold(3, row), 1.0) for row, p in enumerate(prompts)]
    for tree in (None, 20):
        check_batch(generate, prompts, answers, tree=tree)
        check_batch(generate, prompts, drawn, temperature=1.0, seed=3, tree=tree)


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


@pytest.mark.parametrize(("variant", "options"), [
    *itertools.product(["Qwen3-4B", "Qwen3.6-27B"], [{}, {"tree": 16}, {"temperature": 1.0, "seed": 3}]),
    ("Qwen3-4B", {"draft_weights": "int8"}), ("Qwen3-4B", {"denoise_steps": 2}),
    ("DFlash2-causal", {}), ("DFlash2-causal", {"tree": 16}),
], ids=str)  # fmt: skip
def test_a_window_of_the_drafter_changes_no_text(variant, options):
    target, ids = make_target("qwen3"), prompt(60, seed=2)[None]
    plain = {name: value for name, value in options.items() if name in ("temperature", "seed")}
    expected = dflash.generate(target, None, ids, max_new_tokens=NEW, **plain)
    draft = make_draft(target, variant)
    assert torch.equal(dflash.generate(target, draft, ids, max_new_tokens=NEW, drafter_window=9, **options), expected)


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
