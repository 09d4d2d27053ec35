"""Test a trained pair: identical output, and the acceptance lengths of a correct implementation.

Wrong features, positions or masks do not change the text, but acceptance falls far below these floors.
"""

import json

import pytest
import torch
from baseline import sampled
from examples import some
from transformers import AutoModelForCausalLM, AutoTokenizer

import dflash

NEW = 120


@pytest.fixture(scope="module")
def prompts(pair_dir) -> list[torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(pair_dir / "target")
    lines = (pair_dir / "prompts.jsonl").read_text().splitlines()
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
    return [torch.tensor([0, *encode(json.loads(line)["prompt"])]) for line in lines]


def load(pair_dir, dtype):
    target = AutoModelForCausalLM.from_pretrained(pair_dir / "target", dtype=dtype).eval()
    return target, dflash.load_draft(pair_dir / "draft", dtype=dtype)


def run(generator, prompts, **arguments):
    outputs = [
        generator.generate(p[None], max_new_tokens=NEW, return_dict_in_generate=True, **arguments) for p in prompts
    ]
    steps = [n for output in outputs for n in output.statistics.acceptance_lengths[0]]
    answers = [output.sequences[0, len(p) :] for output, p in zip(outputs, prompts, strict=True)]
    return answers, sum(steps) / len(steps)


@pytest.mark.long
@pytest.mark.parametrize(
    ("temperature", "sharpness", "floor"),
    [(0.0, 1.0, 12.5), (1.0, 1.0, 10.0), (1.0, float("inf"), 10.0)],  # docs/demo-pair.md: greedy 13.7, to the end
)
def test_text_and_acceptance(pair_dir, prompts, temperature, sharpness, floor):
    target, draft = load(pair_dir, torch.float32)
    generator = dflash.Generator(target, draft, max_length=512)
    call = {"temperature": temperature, "seed": 7, "draft_sharpness": sharpness}
    answers, acceptance = run(generator, prompts, **call)
    for p, answer in some(8, list(zip(prompts, answers, strict=True))):
        if temperature:
            expected = sampled(target, p, NEW, 7, 1.0, stop=(0,))
        else:
            expected = target.generate(p[None], do_sample=False, max_new_tokens=NEW)[0, len(p) :]
        assert answer.tolist() == expected.tolist()
    assert acceptance > floor


class TestBfloat16:
    @pytest.mark.long
    def test_a_difference_from_generate_is_a_near_tie(self, pair_dir, prompts, record_property):
        """One row and sixteen rows sum in different orders. Texts may differ only where the best logits nearly tie."""
        target, draft = load(pair_dir, torch.bfloat16)
        prompts = some(8, prompts)
        answers, _ = run(dflash.Generator(target, draft, max_length=512), prompts)
        gaps = []
        for p, answer in zip(prompts, answers, strict=True):
            expected = target.generate(p[None], do_sample=False, max_new_tokens=NEW)[0, len(p) :]
            same = min(len(expected), len(answer))
            different = (expected[:same] != answer[:same]).nonzero()
            if not len(different):
                assert len(expected) == len(answer)
                continue
            at = int(different[0])
            logits = target(torch.cat([p, expected[:at]])[None]).logits[0, -1].float()
            gaps.append(float((logits[expected[at]] - logits[answer[at]]).abs()))
        record_property("bf16_logit_gaps", gaps)
        print(f"bf16 against generate: {len(gaps)} of {len(prompts)} answers differ, logit gaps {gaps}")
        assert max(gaps, default=0.0) <= 0.25  # two bf16 steps at a logit of 16
