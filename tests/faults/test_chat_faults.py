"""`dflash chat` keeps its conversation: a message that cannot be answered is left out, and the next one is answered."""

import io
import json
import shutil
import sys

import pytest
import torch
from tiny_pair import save_pair, word_tokenizer
from transformers import AutoModelForCausalLM

from dflash.cli.answer import StreamedAnswer

# A system message is refused, and so is a question that has the word w13.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' or m.role == 'user' and 'w13' in m.content %}"
    "{{ raise_exception('no\\nroom for ' + m.role) }}{% endif %}"
    "{{ {'user': 'w91', 'assistant': 'w92'}[m.role] }} {{ m.content }} {% endfor %}w92"
)
NEW, LIMIT = 4, 24


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"), chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def target(pair):
    return AutoModelForCausalLM.from_pretrained(pair / "target").eval()


@pytest.fixture
def chat(shell, monkeypatch, pair):
    """Return a function that sends lines to ``dflash chat``."""

    def call(*lines: str, options: tuple = ("--json",), limit: int = LIMIT):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        models = ["--model", pair / "target", "--draft", pair / "draft"]
        return shell("chat", *models, "--max-new-tokens", NEW, "--max-length", limit, *options)

    return call


def reports(done) -> list[dict]:
    return [json.loads(line) for line in done.out.splitlines()]


class Expected:
    """What a chat must print, from the target's own generate."""

    def __init__(self, target) -> None:
        self.target, self.turns = target, []

    def send(self, line: str) -> str | None:
        """The answer to a line; None for a message that must be left out."""
        if line == "/drop":
            self.turns = self.turns[1:]
            return None
        ids = []
        for question, answer in [*self.turns, (line, None)]:
            ids += [91, *(int(word[1:]) for word in question.split()), 92]
            ids += [] if answer is None else [int(word[1:]) for word in answer.split()]
        room = LIMIT - len(ids)
        if room < 1 or "w13" in line:
            return None
        new = self.target.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=min(NEW, room))[0, len(ids) :]
        answer = word_tokenizer().decode(new, skip_special_tokens=True)
        self.turns.append((line, answer))
        return answer


def test_an_overflow_keeps_the_conversation_and_says_what_to_do(chat, target):
    long = " ".join(["w7"] * 12)
    done = chat("w5 w6", "w8", long, "w9", "/drop", long, "w9")
    expected = Expected(target)
    answers = [expected.send(line) for line in ("w5 w6", "w8", long, "w9", "/drop", long, "w9") if line]
    assert answers[2] is None
    found = reports(done)
    assert [report.get("text") for report in found] == [*answers[:4], *answers[5:]]
    first = done.err.splitlines()[0]
    assert first == (
        "dflash: the conversation would have 29 tokens, the limit is 24: this message was left out; /drop forgets the "
        "oldest message and its answer, /reset all of them"
    )
    assert found[2] == {"error": first.removeprefix("dflash: ")}
    assert done.code == 1


def test_a_conversation_without_a_refused_message_ends_with_code_0(chat):
    assert chat("w5", "/drop", "/drop", "/reset", "w7").code == 0


@pytest.mark.parametrize(("refused", "error"), [
    (("w13",), "the chat template refuses these messages: no room for user"),
    (("", "w\udcff"), "standard input, line 3: not UTF-8 text: the byte 0xff"),
])  # fmt: skip
def test_a_message_that_cannot_be_answered_is_left_out(chat, target, refused, error):
    done = chat("w5", *refused, "w6")
    expected = Expected(target)
    assert [report.get("text") for report in reports(done)] == [expected.send("w5"), None, expected.send("w6")]
    assert done.err == f"dflash: {error}\n"


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_template_that_refuses_the_system_message_is_one_line(shell, command, pair, tmp_path):
    shutil.copytree(pair, tmp_path / "pair")
    (tmp_path / "pair" / "target" / "model.safetensors").unlink()  # refused before the weights are read
    models = ["--model", tmp_path / "pair" / "target", "--draft", tmp_path / "pair" / "draft"]
    done = shell(command, *models, "--system", "be kind", *(["w5"] if command == "generate" else []))
    assert (done.code, done.out) == (2, "")
    assert done.err == "dflash: --system: the chat template refuses these messages: no room for system\n"


LOST = "{% for m in messages if m.role == 'nobody' %}{{ m.content }}{% endfor %}w92"


COMMANDS = ("chat", "generate", "serve", "benchmark", "doctor", "regenerate", "train")


@pytest.mark.parametrize(
    ("command", "role"),
    [*((command, "user") for command in COMMANDS), *((command, "assistant") for command in ("chat", "train"))],
)
def test_a_template_that_loses_text_is_refused_before_the_weights_are_read(shell, command, role, pair, tmp_path):
    shutil.copytree(pair, tmp_path / "pair")
    (tmp_path / "pair" / "target" / "model.safetensors").unlink()
    template = LOST.replace("nobody", "user") if role == "assistant" else LOST
    (tmp_path / "pair" / "target" / "chat_template.jinja").write_text(template)
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": "w5", "response": "w6"}) + "\n")
    models = ["--model", tmp_path / "pair" / "target"]
    models += [] if command in ("regenerate", "train") else ["--draft", tmp_path / "pair" / "draft"]
    new = tmp_path / "new"
    more = {"generate": ["w5"], "serve": ["--port", 0], "benchmark": ["--dataset", data], "doctor": ["--prompts", data]}
    more |= {
        "regenerate": [data, "--out", new],
        "train": ["--data", data, "--output", new, "--mask-token-id", 95, "--taps", "1"],
    }
    done = shell(command, *models, *more.get(command, []))
    assert done.code == 2
    lost = f"the chat template shows no text of {role} messages, as a string or as parts: correct the model's"
    assert lost in done.err
    assert not new.exists()


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_stopped_answer_keeps_what_was_written(tokens, chat, target, monkeypatch):
    add, events = StreamedAnswer.add, []

    def stopping(answer, event):
        events.append(event)
        if len(events) == tokens + 1:
            raise KeyboardInterrupt
        add(answer, event)

    monkeypatch.setattr(StreamedAnswer, "add", stopping)
    *first, last = reports(chat("w5", "w6"))
    assert len(first) == (tokens > 0)
    expected = Expected(target)
    if tokens:
        whole = expected.send("w5")
        expected.turns = [("w5", first[0]["text"])]
        assert whole.startswith(first[0]["text"])
        assert whole != first[0]["text"]
    assert last["text"] == expected.send("w6")
