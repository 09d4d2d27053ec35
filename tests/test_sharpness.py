"""Test draft_sharpness="auto": its counts, its choice, and that the text never changes."""

import json
import math

import pytest
import torch
from baseline import left_padded, prompt, sampled
from families import make_draft, make_target
from transformers import AutoModelForCausalLM, AutoTokenizer, SuppressTokensLogitsProcessor

import dflash
from dflash import ops
from dflash.evaluate import draft_folder
from dflash.proposers import LEVELS, AutoSharpness
from dflash.sampling import fold

NEW = 120


def observe(auto, candidates, posterior, num_context, done):
    auto.candidates.copy_(torch.tensor(candidates))
    auto.observe_(torch.tensor(posterior), torch.tensor(num_context), torch.tensor(done))


class TestCounts:
    def test_drafts_are_judged_only_on_emitted_tokens(self):
        auto = AutoSharpness(1, 4)
        ended = auto.ended.clone()
        # 3 tokens emitted: the current level got 2 right, the second all 3 and perhaps more, the third 1.
        observe(auto, [[[5, 6, 0, 8], [5, 6, 7, 8], [5, 0, 7, 8]]], [[5, 6, 7, 8, 9]], [3], [0])
        assert auto.kept.tolist() == [[2, 3, 1]]
        assert (auto.ended - ended).tolist() == [[1, 0, 1]]
        # The full block and the bonus token were emitted: nobody knows how far the right drafts would have gone.
        observe(auto, [[[1, 2, 3, 4], [1, 2, 3, 4], [0, 2, 3, 4]]], [[1, 2, 3, 4, 5]], [5], [0])
        assert auto.kept.tolist() == [[6, 7, 1]]
        assert (auto.ended - ended).tolist() == [[1, 0, 2]]
        # The row ends after two tokens: no level could have got more right.
        observe(auto, [[[1, 2, 3, 4], [1, 2, 0, 4], [1, 0, 3, 4]]], [[1, 2, 3, 4, 5]], [2], [1])
        assert auto.kept.tolist() == [[8, 9, 2]]
        assert (auto.ended - ended).tolist() == [[2, 1, 3]]

    def test_a_row_that_is_done_and_nan_proposals_count_nothing(self):
        auto = AutoSharpness(2, 2)
        ended = auto.ended.clone()
        observe(auto, [[[5, 6]] * 3, [[-1, -1]] * 3], [[5, 6, 7], [5, 6, 7]], [0, 1], [2, 0])
        assert auto.kept.tolist() == [[0] * 3] * 2
        assert (auto.ended - ended).tolist() == [[0] * 3, [1] * 3]
        assert auto.choice.tolist() == [0, 0]

    def test_a_draft_that_fills_a_narrow_block_has_not_ended(self):
        auto = AutoSharpness(1, 7)
        right, wrong = [1, 2, 3], [1, 2, 0]
        for _ in range(4):
            auto.remember_(torch.tensor([[right, wrong, right]]))
            auto.observe_(torch.tensor([[1, 2, 3, 4]]), torch.tensor([4]), torch.tensor([0]))
        assert auto.kept.tolist() == [[12, 8, 12]]
        assert (auto.ended - auto.ended[:, :1]).tolist() == [[0, 6, 2]], "of 4 drafts, and 2 of the handicap"

    def test_rows_choose_separately_and_ties_stay_at_the_first_level(self):
        auto = AutoSharpness(4, 3)
        right, wrong = [1, 2, 3], [0, 2, 3]
        candidates = [[wrong, wrong, right], [right] * 3, [wrong, right, wrong], [wrong] * 3]
        for _ in range(20):
            emitted = [1, 4, 1, 1]
            observe(auto, candidates, [[1, 2, 3, 4]] * 4, emitted, [0] * 4)
        assert auto.choice.tolist() == [2, 0, 1, 0]
        picked = auto.pick(torch.tensor(candidates))
        assert picked.tolist() == [right, right, right, wrong]
        auto.reset_(slice(None))
        assert auto.choice.tolist() == [0] * 4
        assert auto.kept.sum() == 0


def simulate(gain: float, noise: float, policy: int | None, tokens: int = 500, batch: int = 48) -> float:
    """Measure the acceptance length under a fixed level (``policy``) or, for None, the automatic choice.

    The target's logits have deviation ``gain`` and depend only on the position. The drafter sees them with ``noise``.
    """
    g = torch.Generator().manual_seed(0)
    vocab, rows = 64, 16
    width = tokens + rows + 1
    target = torch.randn(batch, width, vocab, generator=g) * gain
    draft = target + torch.randn(batch, width, vocab, generator=g) * noise
    positions = torch.arange(width).expand(batch, -1)
    one, zero = torch.ones(batch), torch.zeros(batch)

    def select(logits, sharpness):
        return ops.select_tokens(
            logits, positions, torch.arange(batch), one, zero.long(), one, zero, torch.full((batch,), sharpness)
        )

    text, proposals = select(target, 1.0), torch.stack([select(draft, level) for level in LEVELS], 1)
    auto, steps = AutoSharpness(batch, rows - 1), 0
    length, done = torch.zeros(batch, dtype=torch.int64), torch.zeros(batch, dtype=torch.int64)
    while not done.all():
        index = (length[:, None] + 1 + torch.arange(rows)).clamp(max=width - 1)
        posterior = text.gather(1, index)
        auto.candidates.copy_(proposals.gather(2, index[:, None, :-1].expand(-1, len(LEVELS), -1)))
        drafts = auto.pick(auto.candidates) if policy is None else auto.candidates[:, policy]
        count = (drafts == posterior[:, :-1]).long().cumprod(1).sum(1) + 1
        count = torch.where(done == 0, torch.minimum(count, tokens - length), 0)
        steps += int((count > 0).sum())
        length = length + count
        done = (length >= tokens).long()
        auto.observe_(posterior, count, done)
    return tokens * batch / steps


@pytest.mark.parametrize(("gain", "noise"), [(2.0, 0.0), (2.0, 1.0), (4.0, 1.0), (4.0, 3.0), (10.0, 3.0), (30.0, 6.0)])
def test_it_settles_on_the_best_level(gain, noise):
    fixed = [simulate(gain, noise, level) for level in range(len(LEVELS))]
    auto = simulate(gain, noise, None)
    listed = ", ".join(f"{level:g}: {length:.2f}" for level, length in zip(LEVELS, fixed, strict=True))
    print(f"gain {gain:g}, noise {noise:g}: {listed}, auto: {auto:.2f}")
    assert auto > 0.95 * max(fixed)


@pytest.fixture(scope="module")
def ragged():
    target = make_target("llama")
    prompts = [prompt(length, seed=3) for length in (1, 16, 40)]
    return target, make_draft(target), prompts, *left_padded(prompts)


@pytest.mark.parametrize(
    "rule", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}, {"temperature": 1.4, "top_p": 0.8}]
)
def test_the_text_is_the_same_for_every_sharpness(ragged, rule):
    target, draft, prompts, ids, mask = ragged
    expected = [sampled(target, p, 24, fold(11, row), **rule).tolist() for row, p in enumerate(prompts)]
    for sharpness in ("auto", 0.0, 0.5, 1.0, 2.0, 7.0, math.inf):
        output = dflash.generate(
            target, draft, ids, attention_mask=mask, max_new_tokens=24, seed=11, draft_sharpness=sharpness, **rule
        )
        assert output[:, ids.shape[1] :].tolist() == expected, sharpness


def test_auto_is_the_default_and_equal_calls_draft_equally(ragged):
    target, draft, _, ids, mask = ragged
    generator = dflash.Generator(target, draft, max_length=80, batch_size=3)
    call = {
        "attention_mask": mask,
        "max_new_tokens": 24,
        "temperature": 1.0,
        "seed": 5,
        "return_dict_in_generate": True,
    }
    outputs = [generator.generate(ids, **call, **more) for more in ({}, {"draft_sharpness": "auto"})]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    lengths = [output.statistics.acceptance_lengths for output in outputs]
    assert lengths[0] == lengths[1]
    assert generator.engine.proposer.auto.ended.amax() > 10
    with pytest.raises(TypeError, match="draft_sharpness must be a number of at least 0 or \"auto\", got 'best'"):
        generator.generate(ids, **{**call, "draft_sharpness": "best"})


def test_at_temperature_0_nothing_is_counted(ragged):
    target, draft, _, ids, mask = ragged
    generator = dflash.Generator(target, draft, max_length=80, batch_size=3)
    before = generator.engine.proposer.auto.ended.clone()
    generator.generate(ids, attention_mask=mask, max_new_tokens=24)
    assert torch.equal(generator.engine.proposer.auto.ended, before)


def test_the_loop_with_python_processors_counts_too(ragged):
    target, draft, _, ids, mask = ragged
    generator = dflash.Generator(target, draft, max_length=80, batch_size=3)
    processors = [SuppressTokensLogitsProcessor([3])]
    call = {"attention_mask": mask, "max_new_tokens": 24, "temperature": 1.0, "seed": 5}
    walked = generator.generate(ids, logits_processor=processors, **call)
    assert generator.engine.proposer.auto.ended.amax() > 10
    assert torch.equal(walked, generator.generate(ids, suppress_tokens=[3], **call))


def test_a_compiled_step_chooses_too(ragged):
    _, _, prompts, ids, mask = ragged
    target = make_target("qwen3", num_hidden_layers=2)
    generator = dflash.Generator(target, make_draft(target), max_length=96, batch_size=3, denoise_steps=2, compile=True)
    output = generator.generate(ids, attention_mask=mask, max_new_tokens=20, temperature=1.0, seed=2)
    for row, p in enumerate(prompts):
        assert output[row, ids.shape[1] :].tolist() == sampled(target, p, 20, fold(2, row), 1.0).tolist()
    assert generator.engine.proposer.auto.ended.amax() > 10


@pytest.fixture(scope="module")
def pair(pair_dir):
    tokenizer = AutoTokenizer.from_pretrained(pair_dir / "target")
    lines = (pair_dir / "prompts.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    prompts = [torch.tensor([[0, *tokenizer.encode(text, add_special_tokens=False)]]) for text in texts]
    return AutoModelForCausalLM.from_pretrained(pair_dir / "target", dtype=torch.float32).eval(), prompts


class TestPair:
    def run(self, generator, prompts, **arguments):
        outputs = [
            generator.generate(p, max_new_tokens=NEW, stop_token_ids=[0], return_dict_in_generate=True, **arguments)
            for p in prompts
        ]
        steps = [n for output in outputs for n in output.statistics.acceptance_lengths[0]]
        return [output.sequences.tolist() for output in outputs], sum(steps) / len(steps)

    @pytest.mark.parametrize(("temperature", "floor"), [(0.7, 11.0), (1.0, 10.0)])
    def test_the_acceptance_length_reaches_its_floor(self, pair_dir, pair, temperature, floor):
        target, prompts = pair
        generator = dflash.Generator(target, dflash.load_draft(pair_dir / "draft", dtype=torch.float32), max_length=512)
        texts, lengths = {}, {}
        for sharpness in ("auto", math.inf, 1.0):
            call = {"temperature": temperature, "seed": 7, "draft_sharpness": sharpness}
            texts[sharpness], lengths[sharpness] = self.run(generator, prompts, **call)
        print(f"T = {temperature:g}: " + ", ".join(f"{key}: {value:.2f}" for key, value in lengths.items()))
        assert lengths["auto"] >= floor
        assert texts["auto"] == texts[1.0] == texts[math.inf]

    @pytest.mark.parametrize("noise", [2.0, 4.0])
    def test_a_noisy_drafter_is_not_worse_than_with_sharpness_1(self, pair_dir, pair, noise):
        target, prompts = pair
        draft = dflash.load_draft(draft_folder(pair_dir, 1), dtype=torch.float32)
        clean = draft.logits
        texts, lengths = {}, {}
        for sharpness in ("auto", math.inf, 1.0):
            g = torch.Generator().manual_seed(0)

            def noisy(hidden, head, g=g):
                logits = clean(hidden, head)
                return logits + noise * torch.randn(logits.shape, generator=g)

            draft.logits = noisy
            generator = dflash.Generator(target, draft, max_length=512)
            call = {"temperature": 1.0, "seed": 7, "draft_sharpness": sharpness}
            texts[sharpness], lengths[sharpness] = self.run(generator, prompts[:32], **call)
        print(f"noise {noise:g}: " + ", ".join(f"{key}: {value:.2f}" for key, value in lengths.items()))
        assert lengths["auto"] >= 0.97 * lengths[1.0]  # 9.80 to 9.63 if the noise is small
        assert texts["auto"] == texts[1.0] == texts[math.inf]
