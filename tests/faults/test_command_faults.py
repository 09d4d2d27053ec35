"""A command ends with one clear line for a broken file, closed streams, a closed pipe or bytes that are not text."""

import gzip
import io
import shutil
import sys
from pathlib import Path

import process
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_pair import CHAT_TEMPLATE, save_pair

pytestmark = pytest.mark.linux  # writes to /dev/full


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    folder = save_pair(tmp_path_factory.mktemp("pair"), chat_template=CHAT_TEMPLATE)
    (folder / "prompts.jsonl").write_text('{"prompt": "w5 w6"}\n')
    return folder


@pytest.fixture
def copied(pair, tmp_path) -> Path:
    return shutil.copytree(pair, tmp_path / "pair")


def models(folder: Path) -> list:
    return ["--model", folder / "target", "--draft", folder / "draft", "--max-new-tokens", 3]


@pytest.mark.parametrize(("data", "where"), [
    (b"w5\nw6 \xff w7", "line 2: not UTF-8 text: the byte 0xff"),
    (b"\n" * 100_000 + b"\xc3", "line 100001: not UTF-8 text: the byte 0xc3"),
])  # fmt: skip
def test_a_prompt_that_is_not_text_is_named_with_its_line(shell, pair, tmp_path, monkeypatch, data, where):
    path = tmp_path / "prompt.txt"
    path.write_bytes(data)
    call = ["generate", *models(pair)]
    as_argument = data.decode("utf-8", "surrogateescape")
    assert shell(*call, "--file", path).err == f"dflash: --file {path}, {where}\n"
    assert shell(*call, as_argument).err == f"dflash: PROMPT, {where}\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
    assert shell(*call).err == f"dflash: standard input, {where}\n"


def test_options_that_are_not_text_are_named(shell, pair):
    for option, command in (("--system", "generate"), ("--stop", "generate"), ("--prompt", "demo")):
        call = [*models(pair), "w5"] if command == "generate" else []
        done = shell(command, *call, option, "w5\udcff")
        assert done.code == 2
        [message] = [line for line in done.err.splitlines() if line.startswith("dflash:")]
        assert message.startswith(f"dflash: {option}")
        assert "line 1: not UTF-8 text: the byte 0xff" in message


@pytest.mark.parametrize(
    ("command", "suffix"), [("benchmark", ".jsonl"), ("regenerate", ".jsonl.gz"), ("train", ".jsonl")]
)
def test_a_file_of_prompts_that_is_not_text_is_named_with_its_line(shell, pair, tmp_path, command, suffix):
    path = tmp_path / f"prompts{suffix}"
    good, call = b'{"prompt": "w5", "response": "w6"}\n', {
        "benchmark": ["--dataset", path, *models(pair)],
        "regenerate": [path, "--out", tmp_path / "out.jsonl", *models(pair)],
        "train": ["--data", path, *models(pair)[:2], "--output", tmp_path / "out", "--device", "cpu",
                  "--mask-token-id", 96],
    }  # fmt: skip
    for bad in (b'{"prompt": "\xff"}\n', rb'{"prompt": "\ud83d"}' + b"\n"):
        data = good * 2 + bad + good
        path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
        shell(command, *call[command]).assert_refused(f"{path}, line 3")


# A child of its own per attempt would take minutes. A fork does what Python does if a stream was closed at its start.
ATTEMPTS = """
import os, sys
os.environ["TERM"] = "dumb"
from dflash import cli

folder, *pair = sys.argv[1:]
rows, prompts = (os.path.join(folder, name) for name in ("rows.jsonl", "prompts.jsonl"))

def run(*arguments):
    sys.argv = ["dflash", *arguments]
    try:
        cli.main()
        code = 0
    except SystemExit as exit:
        code = exit.code or 0
    try:
        sys.stdout.flush()
    except OSError:
        code = 120  # as Python, which then prints a traceback too
    return code

def attempt(name, *arguments, closed=(), stdout=None):
    sys.stdout.flush()
    report, child = os.path.join(folder, "report"), os.fork()
    if child == 0:
        os.dup2(os.open(report, os.O_RDWR | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(os.open(os.path.join(folder, "input"), os.O_RDONLY), 0)
        if stdout is not None:
            os.dup2(stdout, 1)
        for descriptor in closed:
            os.close(descriptor)
            setattr(sys, ("stdin", "stdout", "stderr")[descriptor], None)
        os._exit(run(*arguments))  # without the second that Python takes to end
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(report) as file:
        text = file.read()
        print(name, code, *text.splitlines()[-1:], *["escapes"] * ("\\x1b" in text), sep="|")

run("generate", *pair, "--json", "w5")  # once, for what is imported late
attempt("generate (1,)", "generate", *pair, "w5", closed=(1,))
attempt("chat (0, 1)", "chat", *pair, "--json", closed=(0, 1))
attempt("chat (0,)", "chat", *pair, "--json", closed=(0,))
attempt("doctor", "doctor", closed=(0, 1, 2))
attempt("regenerate", "regenerate", *pair, "--out", rows, "--json", prompts, closed=(0, 1, 2))
with open(rows) as file:
    print("rows", len(file.read().splitlines()))
for command in (["generate", *pair, "w5"], ["doctor"]):
    reading, writing = os.pipe()
    os.close(reading)
    attempt(f"pipe {command[0]}", *command, stdout=writing)
    os.close(writing)
strange = [part.replace("target", "strange") for part in pair]
attempt("strange names", "generate", *strange, "--json", "w5", stdout=os.open(os.devnull, os.O_WRONLY))
attempt("full", "generate", *pair, "w5", stdout=os.open("/dev/full", os.O_WRONLY))
"""


def test_closed_streams_and_pipes_end_a_command_in_one_line(copied):
    (copied / "input").write_text("w5\nw6\n")
    shutil.copytree(copied / "target", copied / "strange")
    weights = copied / "strange" / "model.safetensors"
    save_file({**load_file(weights), "\x1b[31mred\x07": torch.zeros(1)}, weights, metadata={"format": "pt"})
    child = process.python(ATTEMPTS, copied, *models(copied))
    lost = "dflash: standard output is closed, so the text would be lost; > /dev/null discards it"
    assert child.returncode == 0, child.stderr
    found = dict(line.split("|", 1) for line in child.stdout.splitlines() if "|" in line)
    for name in ("generate (1,)", "chat (0, 1)"):
        assert found.pop(name) == f"2|{lost}"
    assert found.pop("full") == "2|dflash: [Errno 28] No space left on device"
    assert found.pop("chat (0,)") == "0"
    pipes = {name: found.pop(f"pipe {name}") for name in ("generate", "doctor")}
    assert pipes == dict.fromkeys(pipes, "1")
    strange = found.pop("strange names")
    assert strange.startswith("2|dflash: ")
    assert r"these have none: \x1b[31mred\x07 F32 [1]. config.json" in strange
    assert not strange.endswith("escapes")
    assert found == {"doctor": "0", "regenerate": "0"}
    assert "rows 1" in child.stdout.splitlines()


DEEP = "[" * 100_000 + "]" * 100_000
BROKEN = {
    "tokenizer.json": ["", "[]", DEEP, '{"model": {"type": "Strange"}}'],
    "tokenizer_config.json": ["", "[]", DEEP, '{"tokenizer_class": 5}'],
    "special_tokens_map.json": ["[]"],
    "config.json": ["", "null", DEEP, "{}", '{"model_type": "qwen3", "hidden_size": "a"}'],
    "generation_config.json": ["[]", '{"eos_token_id": "abc"}'],
    "chat_template.jinja": ["{% for", "{{ messages.__class__.__mro__ }}"],
    "model.safetensors": ["", "c" + "\0" * 7 + "{"],
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_file_of_a_target_is_one_line(shell, copied, name):
    path = copied / "target" / name
    for content in BROKEN[name]:
        path.write_text(content)
        done = shell("generate", *models(copied), "w5")
        done.assert_refused()
        assert len(done.err) < 2000
