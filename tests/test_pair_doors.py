"""Every door to the pair inside the package gives right answers: its tokenizer writes prompts as they were trained."""

import io
import json
import sys

import pytest
from recipes.demo_pair.tasks import Example, is_right
from transformers import AutoTokenizer

from dflash.loading import PAIR, prompt_ids
from dflash_tools.measure import ARROW, demo_prompts, encode

NAMED = ["--model", PAIR / "target", "--draft", PAIR / "draft"]
SAID = "no --model: the pair inside the package answers"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(PAIR / "target")


def held_out(count: int, kind: str | None = None) -> list[Example]:
    """The first of the pair's own prompts, which no training step has seen."""
    own = [Example(prompt.kind, prompt.text, prompt.answer or "") for prompt in demo_prompts()]
    return [example for example in own if kind in (None, example.kind)][:count]


def question(example: Example) -> str:
    return example.prompt.removesuffix(ARROW)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_message_becomes_the_prompt_that_was_trained(tokenizer):
    for example in held_out(60):
        trained = encode(tokenizer, example.prompt)[0].tolist()
        assert trained[0] == tokenizer.bos_token_id
        assert tokenizer(example.prompt).input_ids == trained
        text = question(example)
        for content in (text, example.prompt, text + "\n", f"  {text} "):
            assert prompt_ids(tokenizer, {"prompt": content}) == trained
            asked = tokenizer.apply_chat_template([user(content)], add_generation_prompt=True, return_dict=True)
            assert asked["input_ids"] == trained


def test_a_conversation_with_its_answer_is_a_training_row(tokenizer):
    example = held_out(1)[0]
    messages = [user(question(example)), {"role": "assistant", "content": example.answer}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == tokenizer.bos_token + example.prompt + example.answer + tokenizer.eos_token


@pytest.mark.parametrize(("messages", "reason"), [
    ([{"role": "system", "content": "be brief"}, user("add 1 and 2")], "trained without messages of the role system"),
    ([{"role": "assistant", "content": "3"}], "there is no message of the user to answer"),
])  # fmt: skip
def test_messages_that_the_pair_cannot_read_are_refused(tokenizer, messages, reason):
    with pytest.raises(ValueError, match=f"the chat template refuses these messages: .*{reason}"):
        prompt_ids(tokenizer, {"messages": messages})


@pytest.mark.parametrize("named", [[], NAMED])
def test_the_generate_command(shell, tmp_path, named):
    for number, example in enumerate(held_out(3, "sums") + held_out(1, "records") + held_out(1, "letters")):
        (tmp_path / "prompt.txt").write_text(question(example) + "\n")
        for prompt in ([question(example)], ["--file", tmp_path / "prompt.txt"])[: 2 if number == 0 else 1]:
            done = shell("generate", *named, *prompt)
            assert done.code == 0, done.err
            assert is_right(example, done.out.removesuffix("\n"))
            assert (SAID in done.err) == (not named)


@pytest.mark.parametrize("named", [[], NAMED])
def test_the_chat_command(shell, monkeypatch, named):
    asked = held_out(4, "sums")
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(question(example) + "\n" for example in asked)))
    done = shell("chat", "--json", *named)
    assert done.code == 0, done.err
    answers = [json.loads(line)["text"] for line in done.out.splitlines()]
    assert [is_right(example, answer) for example, answer in zip(asked, answers, strict=True)] == [True] * 4
    assert (SAID in done.err) == (not named)


def test_a_drafter_without_its_target_is_refused(shell):
    done = shell("generate", "--draft", PAIR / "draft", "add 1 and 2")
    assert done.code == 2
    assert done.err == "dflash: --draft needs --model too: without both, the pair inside the package answers\n"
