"""The command line as a shell user meets it."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from families import draft_config, make_draft, make_target
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import dflash
from dflash import cli


@dataclass
class Done:
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch, capsys):
    """``dflash ARGUMENTS`` in this process."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["dflash", *arguments])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """A tiny target with a word tokenizer, and a random drafter for it, as checkpoints on disk."""
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


def test_the_same_seed_writes_the_same_text(run, folders):
    model, draft = folders
    call = ["generate", "--model", model, "--draft", draft, "--max-new-tokens", "12", "--temperature", "1", "w5 w6"]
    first, again, other = (run(*call, "--seed", seed).out for seed in ("3", "3", "4"))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "./nowhere"], "dflash: no folder './nowhere', and it is not a hub id"),
        (["--draft", "./nowhere"], "dflash: draft './nowhere' is neither a folder nor a hub repository"),
        (["--temperature", "-1"], "dflash: temperature must be a finite number of at least 0, got -1.0"),
        (["--max-new-tokens", "0"], "dflash: max_new_tokens must be an integer of at least 1, got 0"),
        (["--dtype", "int8"], "dflash: --dtype must be auto, float32, bfloat16 or float16, got 'int8'"),
        (["--device", "nonsense"], "dflash: --device 'nonsense'"),
        (["--bos"], "dflash: --bos: this tokenizer has no BOS token"),
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
