"""Test the demo pair's synthetic tasks: the held-out split, right answers and reported numbers."""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from recipes.demo_pair import pretrain
from recipes.demo_pair.evaluate import evaluate_sums, held_out_examples, held_out_sums, sum_kind, sums_report
from recipes.demo_pair.pretrain import batches, build_tokenizer
from recipes.demo_pair.tasks import KINDS, Example, examples, held_out, is_right
from transformers import AutoTokenizer

from dflash.loading import PAIR
from dflash_tools.measure import ARROW


def drawn(seed: int, held: bool, count: int, kinds: Sequence[str] = tuple(KINDS)) -> list[Example]:
    return list(itertools.islice(examples(seed, held=held, kinds=kinds), count))


def test_training_never_draws_a_held_out_prompt():
    held = {example.prompt for example in held_out_examples(500)}
    seen = {example.prompt for seed in range(3) for example in drawn(seed, False, 2000)}
    assert all(map(held_out, held))
    assert not any(map(held_out, seen))
    assert not held & seen
    # Held-out prompts are a fixed share of all prompts, not a small set that runs out.
    assert {example.kind for example in held_out_examples(60)} == set(KINDS)


def test_sums_are_right_at_every_column():
    for example in drawn(0, False, 1000, kinds=("sums",)):
        numbers = [int(number) for number in re.findall(r"\d+", example.prompt)]
        word = example.prompt.split()[0]
        result = {"add": sum, "take": lambda n: n[1] - n[0], "multiply": lambda n: n[0] * n[1]}[word](numbers)
        columns = re.findall(r"write (\d)", example.answer)
        assert int("".join(reversed(columns))) == result
        assert example.answer.endswith(f" is {result}.")


def test_a_held_out_prompt_is_not_trained_in_another_spelling():
    for a, b in itertools.product(range(20), repeat=2):
        for prompt in ("add {} and {}", "take {} from {}", "multiply {} by {}"):
            assert held_out(prompt.format(a, b) + ARROW) == held_out(prompt.format(b, a) + ARROW)
    facts = ["city Ostby", "morning 8", "noon 21", "sky fog", "wind west"]
    orders = [f"weather: {'; '.join(order)}{ARROW}" for order in itertools.permutations(facts)]
    assert len(set(map(held_out, orders))) == 1


def test_a_batch_of_the_target_holds_every_kind_and_its_answers():
    tokenizer = build_tokenizer()
    for ids, answers, kinds in itertools.islice(batches(tokenizer, 4, 6), 20):
        assert ids.shape == answers.shape == (6, ids.shape[1])
        assert ids.shape[1] % 32 == 0
        assert kinds == [0, 0, 1, 1, 2, 2]
        for row, mask, kind in zip(ids, answers, kinds, strict=True):
            first, count = int(mask.nonzero()[0]), int(mask.sum())
            assert mask[first : first + count].all()
            assert row[0] == row[first + count - 1] == 0
            assert not row[first + count :].any(), "padding"
            prompt, answer = tokenizer.decode(row[1:first]), tokenizer.decode(row[first : first + count - 1])
            assert prompt.endswith("=>\n")
            assert is_right(Example(list(KINDS)[kind], prompt, answer), answer)
            assert not held_out(prompt)
    with pytest.raises(ValueError, match="batch must be a multiple of 3, got 7"):
        next(batches(tokenizer, 4, 7))


def test_sums_are_evaluated_by_length():
    sums = held_out_sums(2)
    kinds, lengths = ("add", "take"), ("1", "2", "3", "4", "5", "6", "mixed")
    assert set(sums) == {*itertools.product(kinds, lengths), *itertools.product(["multiply"], lengths[:6])}
    for kind, part in sums.items():
        assert 1 <= len({example.prompt for example in part}) == len(part) <= 2
        assert all(held_out(example.prompt) and sum_kind(example.prompt) == kind for example in part)
    right = {example.prompt for kind, part in sums.items() for example in part if kind != ("multiply", "6")}
    found = sums_report(sums, right)
    assert found["by_length"] == dict.fromkeys(lengths, 1.0) | {"6": 2 / 3}
    assert found["by_kind"]["multiply"]["6"] == {"right": 0.0, "prompts": 2}
    assert found["by_kind"]["add"]["mixed"] == {"right": 1.0, "prompts": 2}


def test_the_packages_pair_is_right_at_sums_of_every_length():
    right = evaluate_sums(PAIR, each=4)["by_length"]
    assert min(right.values()) > 0.9, right  # at most one of the 12 sums of a length is wrong


class Stopped(Exception):
    pass


def test_a_stopped_training_of_the_target_continues_bit_for_bit(tmp_path, monkeypatch):
    tokenizer, backward, calls = AutoTokenizer.from_pretrained(PAIR / "target"), pretrain.backward, itertools.count()

    def stopping(*arguments):
        if next(calls) == 2:
            raise Stopped
        return backward(*arguments)

    def run(folder: Path, **changes: float) -> dict[str, torch.Tensor]:
        arguments = {"steps": 3, "batch": 3, "save_every": 2} | changes
        return pretrain.pretrain(folder, **arguments).state_dict()

    monkeypatch.setattr(pretrain, "build_tokenizer", lambda seed: tokenizer)
    whole = run(tmp_path / "whole")
    monkeypatch.setattr(pretrain, "backward", stopping)
    with pytest.raises(Stopped):
        run(tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "config.json").exists()
    with pytest.raises(ValueError, match=r"training.pt is of a run with .*'learning_rate': 0.004.*: remove it"):
        run(tmp_path / "stopped", learning_rate=1e-3)
    continued = run(tmp_path / "stopped")
    assert next(calls) == 4  # 0 to 2, then the step after the checkpoint
    assert all(torch.equal(continued[name], weight) for name, weight in whole.items())
    metrics = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "stopped")]
    losses = [[json.loads(line)["loss"] for line in text.splitlines()] for text in metrics]
    assert len(losses[0]) == 1
    assert losses[0] == losses[1]
    assert not (tmp_path / "stopped" / "training.pt").exists()
    with pytest.raises(FileExistsError, match="already holds a model"):
        run(tmp_path / "stopped")
