"""Test the command line as a shell user sees it."""

import io
import json
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import draft_config, make_draft, make_target
from safetensors.torch import save_file
from tiny_tokenizers import byte_level
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import dflash
from dflash.cli import options as loading
from dflash.train.checkpoint import save_draft


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def run(shell):
    """Return a function that runs ``dflash ARGUMENTS`` in this process."""
    return shell


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """Write a tiny target with a word tokenizer, and a random drafter for it, as checkpoints."""
    root = tmp_path_factory.mktemp("pair")
    target = make_target("qwen3")
    target.save_pretrained(root / "target")
    words = {f"w{index}": index for index in range(97)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(root / "target")
    draft = make_draft(target)
    (root / "draft").mkdir()
    (root / "draft" / "config.json").write_text(json.dumps(draft_config(target)))
    save_file({name: t.contiguous() for name, t in draft.state_dict().items()}, root / "draft" / "model.safetensors")
    return str(root / "target"), str(root / "draft")


def test_it_prints_the_text_and_one_line(run, folders):
    model, draft = folders
    done = run("generate", "--model", model, "--draft", draft, "--max-new-tokens", "9", "w5 w6 w7")
    assert done.code == 0, done.err
    target = AutoModelForCausalLM.from_pretrained(model).eval()
    ids = dflash.generate(target, None, torch.tensor([[5, 6, 7]]), max_new_tokens=9)
    assert done.out == " ".join(f"w{token}" for token in ids[0, 3:].tolist()) + "\n"
    assert done.err.count("\n") == 1
    assert "9 tokens in" in done.err
    assert "acceptance length" in done.err


def answer(model: str, ids: list[int], new: int) -> str:
    target = AutoModelForCausalLM.from_pretrained(model).eval()
    out = dflash.generate(target, None, torch.tensor([ids]), max_new_tokens=new)
    return " ".join(f"w{token}" for token in out[0, len(ids) :].tolist())


def test_the_drafter_gets_the_dtype_of_the_target(run, folders, tmp_path):
    """``dflash train`` writes drafters in bfloat16, whatever the target's dtype is."""
    model, draft = folders
    save_draft(dflash.load_draft(draft), tmp_path / "draft")
    assert dflash.load_draft(tmp_path / "draft").dtype == torch.bfloat16
    call = ["generate", "--model", model, "--draft", tmp_path / "draft", "--max-new-tokens", 5, "w5 w6 w7"]
    assert run(*call).out == answer(model, [5, 6, 7], 5) + "\n"
    done = run(*call, "--dtype", "bfloat16")
    assert done.code == 0, done.err


def test_the_prompt_may_come_from_a_file_or_standard_input(run, folders, tmp_path, monkeypatch):
    model, draft = folders
    call = ["generate", "--model", model, "--draft", draft, "--max-new-tokens", "5"]
    expected = answer(model, [5, 6, 7], 5) + "\n"
    path = tmp_path / "prompt.txt"
    path.write_text("w5 w6 w7")
    assert run(*call, "--file", str(path)).out == expected
    for arguments in ((), ("-",)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6 w7"))
        assert run(*call, *arguments).out == expected
    done = run(*call, "--file", str(path), "w5")
    assert done.code == 2
    assert "as an argument or with --file, not both" in done.err
    done = run(*call, "--file", str(tmp_path / "missing"))
    assert done.code == 2
    assert "there is no file" in done.err


def test_json_is_all_that_is_printed(run, folders):
    model, draft = folders
    done = run("generate", "--model", model, "--draft", draft, "--max-new-tokens", "7", "--json", "w5 w6 w7")
    assert done.code == 0
    assert done.err == ""
    report = json.loads(done.out)
    assert report["text"] == answer(model, [5, 6, 7], 7)
    assert report["num_new_tokens"] == 7
    assert report["finish_reason"] == "length"
    assert sum(steps * length for length, steps in enumerate(report["histogram"])) == 6


def test_a_stop_string_ends_the_text(run, folders, tmp_path):
    model, draft = folders
    shutil.copytree(model, tmp_path / "bytes")
    byte_level().save_pretrained(tmp_path / "bytes")
    call = ["generate", "--model", str(tmp_path / "bytes"), "--draft", draft, "--max-new-tokens", "30", "abc"]
    whole = run(*call).out
    stop = whole[8:10]
    done = run(*call, "--stop", stop)
    assert done.code == 0, done.err
    assert stop in done.out
    assert whole.startswith(done.out.rstrip("\n"))
    assert len(done.out) < len(whole)
    done = run("generate", "--model", model, "--draft", draft, "--stop", "x", "w5")
    assert done.code == 2
    assert "stop_strings: transformers cannot match strings with this" in done.err


TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'w90', 'user': 'w91', 'assistant': 'w92'}[m.role] }} {{ m.content }} "
    "{% endfor %}w92"
)


@pytest.fixture
def chat_folders(folders, tmp_path):
    model, draft = folders
    shutil.copytree(model, tmp_path / "chat")
    path = tmp_path / "chat" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return str(tmp_path / "chat"), draft


def test_the_chat_template_is_used_unless_raw(run, chat_folders):
    model, draft = chat_folders
    call = ["generate", "--model", model, "--draft", draft, "--max-new-tokens", "5"]
    assert run(*call, "w5 w6").out == answer(model, [91, 5, 6, 92], 5) + "\n"
    assert run(*call, "--system", "w8", "w5 w6").out == answer(model, [90, 8, 91, 5, 6, 92], 5) + "\n"
    assert run(*call, "--raw", "w5 w6").out == answer(model, [5, 6], 5) + "\n"
    done = run(*call, "--raw", "--system", "w8", "w5 w6")
    assert done.code == 2
    assert "--system needs a tokenizer with a chat template" in done.err


def test_chat_answers_line_by_line(run, chat_folders, monkeypatch):
    model, draft = chat_folders
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6\n\nw7\n/reset\nw7\n/exit\nw9\n"))
    done = run("chat", "--model", model, "--draft", draft, "--max-new-tokens", "4")
    assert done.code == 0
    first = answer(model, [91, 5, 6, 92], 4)
    ids = [91, 5, 6, 92, *(int(word[1:]) for word in first.split()), 91, 7, 92]
    assert done.out.splitlines() == [first, answer(model, ids, 4), answer(model, [91, 7, 92], 4)]


def test_trees_and_blocks_of_any_width_write_the_same_text_and_are_named(run, folders):
    model, draft = folders
    call = ["generate", "--model", model, "--draft", draft, "--max-new-tokens", "9", "w5 w6 w7"]
    chain = run(*call)
    for options, named in (
        (["--tree", "5"], "of 16 in trees of 5 rows"),
        (["--tree", "auto"], "of 16 in trees of 16 to 128 rows"),
        (["--block-size", "auto"], ""),
        (["--block-size", "4"], "of 4"),
    ):
        done = run(*call, *options)
        assert (done.code, done.out) == (0, chain.out), done.err
        assert named in done.err
    assert json.loads(run(*call, "--tree", "5", "--json").out)["tree"] == 5


@pytest.fixture
def stored(monkeypatch):
    """How a command asks for the weights of its target and of its drafter, call by call."""
    found = []
    for name in ("text:stream", "text:Generator", "serving:Generator"):
        make = pkgutil.resolve_name(f"dflash.cli.{name}")

        def spy(*models, make=make, **options):
            found.append((options["weights"], options["draft_weights"]))
            return make(*models, **options)

        monkeypatch.setattr("dflash.cli." + name.replace(":", "."), spy)
    return found


def test_weights_in_8_bits_write_the_text_of_the_quantized_target(run, folders, tmp_path, stored):
    model, draft = folders
    call = ["generate", "--model", model, "--draft", draft, "--max-new-tokens", "12", "w5 w6", "--dtype", "float32"]
    plain, file = run(*call), tmp_path / "receipt.json"
    done = run(*call, "--weights", "int8", "--receipt", str(file))
    assert done.code == 0, done.err
    assert json.loads(file.read_text())["weights"] == "int8"
    assert run("verify", str(file), "--model", model).code == 0
    assert ", int8 weights, first token" in done.err
    drafted = run(*call, "--draft-weights", "int8")
    assert (drafted.code, drafted.out) == (0, plain.out)
    assert "int8" not in drafted.err
    assert stored == [(None, None), ("int8", None), (None, "int8")]
    for weights in ("int8", None):
        options = [] if weights is None else ["--weights", weights]
        assert json.loads(run(*call, *options, "--json").out)["weights"] == weights


def test_chat_and_serve_store_weights_as_asked(run, chat_folders, stored, monkeypatch):
    model, draft = chat_folders
    options = ["--model", model, "--draft", draft, "--weights", "int8", "--draft-weights", "int8"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6\n"))
    done = run("chat", *options, "--max-new-tokens", "4")
    assert done.code == 0, done.err
    assert ", int8 weights, first token" in done.err
    monkeypatch.setattr("dflash.serve.app.Server.run", lambda _server, sockets: sockets[0].close())
    done = run("serve", *options, "--port", "0")
    assert done.code == 0, done.err
    assert stored == [("int8", "int8")] * 2


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("generate", "--weights int8", "--weights int8 needs the models on the CPU, got cuda: pass --device cpu"),
        ("serve", "--draft-weights int8", "--draft-weights int8 needs the models on the CPU, got cuda"),
        ("benchmark", "--draft-weights int8 --block-size 1 --device cpu", "--draft-weights int8 needs a drafter, and"),
    ],
)
def test_weights_that_cannot_be_stored_are_refused_before_models_are_loaded(
    run, chat_folders, tmp_path, monkeypatch, command, options, message
):
    model, draft = chat_folders
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w5 w6"}\n')
    monkeypatch.setattr("dflash.cli.options.check_device", lambda _dtype, device: device or "cuda")
    monkeypatch.setattr(loading, "load_target", lambda *_: pytest.fail("the target was loaded"))
    monkeypatch.setattr("dflash.cli.options.load_draft", lambda *_, **__: pytest.fail("the drafter was loaded"))
    more = {"generate": ["w5"], "benchmark": ["--dataset", str(tmp_path / "prompts.jsonl")]}.get(command, [])
    done = run(command, "--model", model, "--draft", draft, *options.split(), *more)
    assert done.code == 2
    assert message in done.err


def test_a_receipt_of_int8_weights_is_verified_on_the_cpu(run, folders, tmp_path, monkeypatch):
    model, draft = folders
    file = str(tmp_path / "receipt.json")
    call = ["generate", "--model", model, "--draft", draft, "--max-new-tokens", "6", "--receipt", file, "w5 w6"]
    assert run(*call, "--weights", "int8").code == 0
    asked = []
    monkeypatch.setattr(
        "dflash.cli.options.check_device", lambda _dtype, device: asked.append(device) or device or "cuda"
    )
    done = run("verify", file, "--model", model)
    assert (done.code, asked) == (0, ["cpu"]), done.err


def test_chat_needs_a_template(run, folders):
    model, draft = folders
    done = run("chat", "--model", model, "--draft", draft)
    assert done.code == 2
    assert "has no chat template: use dflash generate" in done.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "./nowhere"], "dflash: no folder './nowhere', and it is not a hub id"),
        (["--draft", "./nowhere"], "dflash: draft './nowhere' is neither a folder nor a reachable hub repository"),
        (["--temperature", "-1"], "dflash: temperature must be a finite number of at least 0, got -1.0"),
        (["--max-new-tokens", "0"], "dflash: max_new_tokens must be an integer of at least 1, got 0"),
        (["--dtype", "int8"], "dflash: --dtype must be auto, float32, bfloat16 or float16, got 'int8'"),
        (["--device", "nonsense"], "dflash: --device 'nonsense'"),
        (["--bos"], "dflash: --bos: this tokenizer has no BOS token"),
        (["--tree", "1"], 'dflash: tree must be a number of rows in 2 .. 128, "auto" or None, got 1'),
        (["--tree", "+-5"], "dflash: tree must be a number of rows in 2 .. 128, \"auto\" or None, got '+-5'"),
        (["--tree", "16", "--block-size", "1"], "dflash: tree=16 needs a drafter to grow from, got"),
        (["--block-size", "most"], 'dflash: block_size must be an integer of at least 1, "auto" or None, got'),
        (["--block-size", "auto", "--tree", "16"], "dflash: block_size='auto' cannot be combined with tree=16"),
        (["--tree", "16", "--draft-sharpness", "2"], "dflash: tree=16 cannot be combined with draft_sharpness=2.0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, folders, change, message):
    model, draft = folders
    done = run("generate", "--model", model, "--draft", draft, *change, "w5 w6")
    assert done.code == 2
    assert done.out == ""
    assert message in done.err
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err


@pytest.mark.parametrize("command", ["generate", "benchmark"])
def test_trees_that_cannot_be_are_refused_before_models_are_loaded(run, chat_folders, tmp_path, monkeypatch, command):
    model, draft = chat_folders
    recurrent, prompts = tmp_path / "recurrent", tmp_path / "prompts.jsonl"
    shutil.copytree(model, recurrent)
    make_target("qwen3_5").config.save_pretrained(recurrent)
    prompts.write_text('{"prompt": "w5 w6"}\n')
    monkeypatch.setattr(loading, "load_target", lambda *_: pytest.fail("the target was loaded"))
    monkeypatch.setattr("dflash.cli.options.load_draft", lambda *_, **__: pytest.fail("the drafter was loaded"))
    rest = {"generate": ["w5"], "benchmark": ["--dataset", prompts]}[command]
    mistakes = [
        (recurrent, [], "Qwen3_5ForCausalLM has recurrent layers: these take chains only"),
        (model, ["--block-size", "1"], "tree=16 needs a drafter to grow from"),
    ]
    if command == "generate":  # a benchmark has chains too, whose sharpness it is
        mistakes.append((model, ["--draft-sharpness", "2"], "cannot be combined with draft_sharpness=2.0"))
    for target, options, message in mistakes:
        done = run(command, "--model", target, "--draft", draft, "--tree", "16", *options, *rest)
        assert done.code == 2
        assert message in done.err


def test_the_installed_command_and_its_debug_option(folders):
    model, draft = folders
    command = [str(Path(sys.executable).with_name("dflash")), "--debug", "generate", "--model", model, "--draft", draft]
    done = subprocess.run([*command, "--temperature", "-1", "w5"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: temperature must be" in done.stderr


def test_a_truncated_checkpoint_is_named(run, folders, tmp_path):
    model, draft = folders
    broken = tmp_path / "draft"
    shutil.copytree(draft, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = run("generate", "--model", model, "--draft", str(broken), "w5 w6")
    assert done.code == 2
    assert str(weights) in done.err
    shutil.copytree(model, tmp_path / "target")
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = run("generate", "--model", str(tmp_path / "target"), "--draft", draft, "w5 w6")
    assert done.code == 2
    assert done.err.count("\n") == 1


def test_a_terminal_shows_what_is_loaded_and_json_does_not(run, folders, monkeypatch):
    model, draft = folders
    call = ("generate", "--model", model, "--draft", draft, "--max-new-tokens", "2", "w5 w6 w7")
    monkeypatch.setenv("TERM", "xterm")
    for extra, shown in (((), True), (("--json",), False)):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        assert run(*call, *extra).code == 0
        printed = terminal.getvalue()
        for what in ("tokenizer", "drafter", "target"):
            assert (f"loading the {what}" in printed) == shown
        assert "Loading weights" not in printed
