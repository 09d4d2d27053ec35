"""Test the demo pair's synthetic tasks: the held-out split, right answers and reported numbers."""

import itertools
import re

import pytest

from dflash.train.demo_pair.__main__ import check_options, watched_examples, writer_name
from dflash.train.demo_pair.evaluate import distinct_share, held_out_examples, prompt_lookup_length
from dflash.train.demo_pair.pretrain import _batches, build_tokenizer
from dflash.train.demo_pair.tasks import _FIELDS, KINDS, NOTATIONS, Example, examples, held_out, is_right


def drawn(seed: int, held: bool, count: int) -> list[Example]:
    return list(itertools.islice(examples(seed, held=held), count))


def test_training_never_draws_a_held_out_prompt():
    held = {example.prompt for example in held_out_examples(500)}
    seen = {example.prompt for seed in range(3) for example in drawn(seed, False, 2000)}
    assert all(map(held_out, held))
    assert not any(map(held_out, seen))
    assert not held & seen
    # Held-out prompts are a fixed share of all prompts, not a small set that runs out.
    assert {example.kind for example in held_out_examples(60)} == set(KINDS)


def test_prompts_watched_in_training_are_held_out_and_differ_from_the_evaluations():
    watched = [example.prompt for example in watched_examples(24)]
    assert len(set(watched)) == 24
    assert all(map(held_out, watched))
    assert not set(watched) & {example.prompt for example in held_out_examples(192)}


def test_another_target_has_another_writer_name(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = writer_name(tmp_path)
    assert writer_name(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert writer_name(tmp_path) != before


def test_a_folder_begun_with_other_options_is_refused(tmp_path):
    options = {"target_steps": 10, "prompts": 5, "draft_steps": 3}
    check_options(tmp_path / "new", options)
    check_options(tmp_path / "new", options)
    with pytest.raises(ValueError, match="was begun with prompts = 5, not 6: choose another folder"):
        check_options(tmp_path / "new", {**options, "prompts": 6})


def test_draws_are_a_function_of_the_seed():
    assert drawn(5, False, 50) == drawn(5, False, 50)
    assert drawn(5, False, 50) != drawn(6, False, 50)


def test_sums_are_right_at_every_column():
    for example in (e for e in drawn(0, False, 3000) if e.kind == "sums"):
        numbers = [int(number) for number in re.findall(r"\d+", example.prompt)]
        word = example.prompt.split()[0]
        result = {"add": sum, "take": lambda n: n[1] - n[0], "multiply": lambda n: n[0] * n[1]}[word](numbers)
        columns = re.findall(r"write (\d)", example.answer)
        assert int("".join(reversed(columns))) == result
        assert example.answer.endswith(f" is {result}.")


def test_records_say_the_same_in_both_notations():
    def fields(text: str) -> list[tuple[str, str]]:
        return re.findall(rf"\b({'|'.join(key for key, _ in _FIELDS)})\b\W+(\w+)", re.sub(r"</\w+>", "", text))

    pairs = set()
    for example in (e for e in drawn(1, False, 3000) if e.kind == "records"):
        source, wanted, body = re.fullmatch(r"(\w+) to (\w+):\n(.*)\n=>\n", example.prompt, re.DOTALL).groups()
        found = fields(body)
        assert 9 <= len(found) <= 12
        assert fields(example.answer) == found
        assert source != wanted
        pairs.add((source, wanted))
    assert len(pairs) == len(NOTATIONS) * (len(NOTATIONS) - 1)


def test_a_right_answer_is_right_and_a_changed_one_is_not():
    for example in drawn(2, True, 200):
        assert is_right(example, example.answer)
        assert not is_right(example, example.answer + " ")
        number = re.search(r"\d+", example.answer)
        if number:
            wrong = example.answer[: number.start()] + str(int(number[0]) + 1) + example.answer[number.end() :]
            assert not is_right(example, wrong)


def test_a_letter_may_choose_its_words_but_not_its_facts():
    letter = next(e for e in drawn(3, False, 500) if e.prompt.startswith("hotel"))
    chosen = re.search(r"our (small|old|quiet) house", letter.answer)[1]
    other = letter.answer.replace(f"our {chosen} house", "our " + {"small": "old"}.get(chosen, "small") + " house")
    assert other != letter.answer
    assert is_right(letter, other)
    assert not is_right(letter, letter.answer.replace(f"our {chosen} house", "our grand house"))
    guest = re.search(r"Dear (\w+)", letter.answer)[1]
    assert not is_right(letter, letter.answer.replace(guest, guest + "o"))


def test_a_batch_of_the_target_holds_every_kind_and_its_answers():
    tokenizer = build_tokenizer()
    for ids, answers, kinds in itertools.islice(_batches(tokenizer, 4, 6), 20):
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
        next(_batches(tokenizer, 4, 7))


@pytest.mark.parametrize(
    ("prompt", "answer", "steps"),
    [
        ([1, 2, 3], [9], []),  # the prompt's own pass writes the first token
        ([1, 2, 3], [7, 8, 9], [1, 1]),  # nothing to look up
        ([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 9], [4]),  # 2 was seen: 3 4 5 match, and one more
        ([1, 2, 3, 4, 5, 6], [2, 3, 9, 9], [2, 1]),  # cut at the end of the answer
    ],
)
def test_prompt_lookup_counts_accepted_tokens_and_one(prompt, answer, steps):
    assert prompt_lookup_length(prompt, answer, block_size=16) == steps


def test_distinct_share_counts_distinct_8_grams():
    assert distinct_share(list(range(20))) == 1.0
    assert distinct_share([1] * 9) == 0.5
    assert distinct_share([1, 2]) == 1.0
