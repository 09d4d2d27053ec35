"""Test ``dflash demo``: its claims are true, and a missing pair is reported in one clear line."""

import json

import pytest
import torch
from recipes.demo_pair.evaluate import held_out_examples
from recipes.demo_pair.pretrain import build_tokenizer
from recipes.demo_pair.tasks import held_out
from tiny_pair import save_pair
from transformers import AutoTokenizer

import dflash
from dflash_tools.config import Decoding
from dflash_tools.measure import compare, demo, trees

PROMPTS = [
    {"prompt": "w5 w6 w7", "answer": None, "kind": "free"},
    {"prompt": "w8 w9", "answer": None, "kind": "free"},
    {"prompt": "w10 w11", "answer": "w1", "kind": "one answer"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Return a folder in the layout of the package's pair, with random bfloat16 weights."""
    folder = save_pair(tmp_path_factory.mktemp("pair"), torch.bfloat16)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return folder


@pytest.fixture
def run_json(shell):
    """Return a function that runs ``dflash demo --json`` and gives what it prints."""

    def call(*arguments, code: int = 0) -> dict:
        done = shell("demo", "--json", *arguments)
        assert done.code == code, done.err
        return json.loads(done.out)

    return call


@pytest.mark.parametrize(("temperature", "floor", "right"), [(0.0, 10.0, 4), (1.0, 7.0, 3)])
def test_the_packages_own_pair(run_json, temperature, floor, right):
    found = run_json("--prompts", 6, "--temperature", temperature)
    assert found["identical"] is True
    assert found["temperature"] == temperature
    assert found["acceptance_length"] >= floor
    assert found["answerable"] == 4
    assert found["right"] >= right
    steps = sum(length * count for length, count in enumerate(found["histogram"]))
    assert steps == found["new_tokens"] - found["prompts"]  # an answer's first token comes from its prompt
    assert steps / sum(found["histogram"]) == pytest.approx(found["acceptance_length"])


def test_the_packages_own_pair_is_of_the_recipe_and_its_prompts_were_held_out():
    found = [json.loads(line) for line in (demo.PAIR / "prompts.jsonl").read_text().splitlines()]
    recipe = held_out_examples(48)
    assert [line["prompt"] for line in found] == [example.prompt for example in recipe], "the pair has another recipe"
    assert all(held_out(line["prompt"]) for line in found)
    for line, example in zip(found, recipe, strict=True):
        assert line["answer"] == (None if example.kind == "letters" else example.answer)
    assert AutoTokenizer.from_pretrained(demo.PAIR / "target").get_vocab() == build_tokenizer().get_vocab()


def test_trees_are_compared_and_one_is_drawn(tiny, shell, run_json):
    found = run_json("--pair", tiny, "--tree", 6, "--max-new-tokens", 12, "--prompts", 2)
    assert found["identical"] is True
    assert found["tree"] == 6
    assert found["tree_tokens_per_second"] > 0
    assert found["tree_acceptance_length"] >= 1
    assert run_json("--pair", tiny, "--max-new-tokens", 4, "--prompts", 1)["tree_acceptance_length"] is None
    done = shell("demo", "--pair", tiny, "--tree", "6", "--max-new-tokens", "12", "--prompts", "2").assert_done()
    assert "one step: a tree of 6 rows" in done.out
    assert "DFlash, tree=6" in done.out


def test_another_pair_answers_questions(tiny, shell, run_json):
    pair = ("--model", tiny / "target", "--draft", tiny / "draft")
    found = run_json(*pair, "--prompts", 2, "--max-new-tokens", 6)
    assert (found["identical"], found["prompts"], found["available"]) == (True, 2, len(demo.QUESTIONS))
    assert run_json(*pair, "--prompt", "w5 w6", "--max-new-tokens", 6)["prompts"] == 1
    shell("demo", "--dtype", "bfloat16").assert_refused("add --model")
    shell("demo", *pair[2:]).assert_refused("--draft needs --model too")


#         0 -> w5; its children w10 and w20; w10's w11 and w12; and so on. The last row is missing.
SOME_TREE = ([5, 10, 20, 11, 12, 21, 13, 30, 14, -1], [-1, 0, 0, 1, 1, 2, 3, 0, 6, -1])


@pytest.mark.parametrize(("emitted", "path", "bonus", "leaves", "picture"), [
    ([20, 21, 99], [0, 2, 5], [99], True, ["w5┬w10┬w11─w13─w14", "  │   └w12", "  ┝w20━w21━w99", "  └w30"]),
    ([10, 11], [0, 1, 3], [], False, ["w5┯w10┯w11─w13─w14", "  │   └w12", "  ├w20─w21", "  └w30"]),
    ([10, 7], [0, 1], [7], False, ["w5┯w10┬w11─w13─w14", "  │   ├w12", "  │   ┕w7", "  ├w20─w21", "  └w30"]),
])  # fmt: skip
def test_a_drawn_tree_shows_the_accepted_path(emitted, path, bonus, leaves, picture):
    step = trees.TreeStep(*SOME_TREE, emitted)
    assert (step.path, step.bonus, step.leaves_spine) == (path, bonus, leaves)
    lines = trees.draw(step, lambda token: f"w{token}")
    assert ["".join(text for text, _ in line) for line in lines] == picture
    kinds = dict(piece for line in lines for piece in line if piece[1] != trees.EDGE)
    accepted = {f"w{step.ids[row]}" for row in path}
    assert {token for token, kind in kinds.items() if kind == trees.ACCEPTED} == accepted
    assert {token for token, kind in kinds.items() if kind == trees.BONUS} == {f"w{token}" for token in bonus}


def test_the_watched_steps_write_the_answer_and_the_proposer_is_put_back(tiny):
    target, draft, tokenizer = dflash.demo_pair(tiny)
    generator = dflash.Generator(target, draft, max_length=64, tree=9)
    ids = demo.encode(tokenizer, "w5 w6")
    events = list(generator.stream(ids, max_new_tokens=20))
    plain = [event.ids for event in events]
    watch, proposer = trees.TreeWatch(), generator.engine.proposer
    watched = list(watch.watch(generator, generator.stream(ids, max_new_tokens=20)))
    assert [event.ids for event in watched] == plain
    assert watched[-1].statistics.rows == events[-1].statistics.rows == [9] * (len(plain) - 1)
    assert generator.engine.proposer is proposer
    assert watch.best.emitted in [row for (row,) in plain[1:]]
    assert len(watch.best.ids) == 9
    assert len(watch.best.path) + len(watch.best.bonus) == len(watch.best.emitted) + 1


def test_a_given_prompt_is_asked_as_the_pair_was_trained(shell):
    for text in ("add 48213 and 90377", "add 48213 and 90377\n=>\n"):
        assert "The sum of 48213 and 90377 is 138590." in shell("demo", "--prompt", text, "--max-new-tokens", 200).out


@pytest.mark.parametrize(("drafted", "temperature"), [(True, 1.0), (True, 0.0), (None, 0.0)])
def test_a_wrong_answer_is_not_called_identical(tiny, run_json, monkeypatch, drafted, temperature):
    """One-token decoding reveals faults of drafting; greedy ``generate`` also reveals faults that both share."""

    class Wrong(dflash.Generator):
        def generate(self, ids, **arguments):
            out = super().generate(ids, **arguments)
            if drafted is None or (self.draft is not None) == drafted:
                out.sequences[0, -1] = (out.sequences[0, -1] + 1) % 97
            return out

    monkeypatch.setattr(compare, "Generator", Wrong)
    found = run_json("--pair", tiny, "--temperature", temperature, "--max-new-tokens", 8, "--prompts", 1, code=1)
    assert found["identical"] is False


def test_the_packages_pair_has_drafters_of_both_generations(tiny):
    assert dflash.demo_pair()[1].config.dflash2 is not None
    assert dflash.demo_pair(generation=1)[1].config.dflash2 is None
    both = [dflash.demo_pair(tiny, generation=generation)[1].config for generation in (None, 1)]
    assert both[0] == both[1], "a pair with one drafter"


@pytest.mark.parametrize(("seconds", "answered"), [(None, 3), (9, 3), (8, 2), (4, 1), (0.1, 1)])
def test_no_prompt_is_started_when_the_time_is_spent(tiny, monkeypatch, seconds, answered):
    target, draft, tokenizer = dflash.demo_pair(tiny)
    now, real = [0.0], compare.Comparison.answer

    def answer(self, ids):
        now[0] += 4
        return real(self, ids)

    monkeypatch.setattr(compare.Comparison, "answer", answer)
    budget = demo.TimeLimit(seconds, lambda: now[0])
    found = demo.measure(target, draft, tokenizer, demo.demo_prompts(tiny), Decoding(4), budget=budget)
    assert (found["prompts"], found["available"]) == (answered, 3)
    assert found["answerable"] == (answered > 1)  # the second prompt is the one with a single right answer
    assert found["new_tokens"] <= 4 * answered


@pytest.mark.parametrize(("arguments", "message"), [
    (["--prompt", "w5", "--prompts", "2"], "--prompts counts held-out prompts: it does not go with --prompt"),
    (["--prompts", "2", "--seconds", "9"], "--prompts answers exactly that many prompts: it does not go with"),
    (["--seconds", "0"], "--seconds must be above 0, got 0.0"),
    (["--prompts", "0"], "--prompts must be at least 1, got 0"),
    (["--temperature", "-1"], "temperature must be a finite number of at least 0, got -1.0"),
    (["--max-new-tokens", "510"], "4 tokens of a prompt and 510 new ones pass the 512 positions"),
    (["--pair", "nowhere"], "no pair in nowhere: there is no target"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(tiny, shell, arguments, message):
    shell("demo", "--pair", tiny, *arguments).assert_refused(message)
