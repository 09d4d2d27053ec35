"""A model's own Python code runs only with `--trust-remote-code`, and nobody is asked on standard input."""

import io
import json
import shutil
import sys
from pathlib import Path

import process
import pytest
import torch
from tiny_pair import CHAT_TEMPLATE, save_pair

import dflash
from dflash.loading import Pretrained

PACKAGE = Path(dflash.__file__).parent
STDIN = "y\nyes\n1\ny\nw5 w6\n"

# Every class of the folder's own; importing the file leaves a mark, which tells that it ran.
CODE = """
from pathlib import Path

from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Path({mark!r}).touch()


class StrangeConfig(Qwen3Config):
    model_type = "strange"


class StrangeModel(Qwen3ForCausalLM):
    config_class = StrangeConfig


class StrangeTokenizer(PreTrainedTokenizerFast):
    pass


def generate(*arguments, **more):
    raise AssertionError
"""
TOKENIZER = {"tokenizer_class": "StrangeTokenizer", "auto_map": {"AutoTokenizer": [None, "strange.StrangeTokenizer"]}}
MODEL = {"AutoModelForCausalLM": "strange.StrangeModel"}
AUTO_MAP = {"AutoConfig": "strange.StrangeConfig", **MODEL}
# name -> what changes in config.json and in tokenizer_config.json
OTHERS = {key: f"someone/else--{name}" for key, name in AUTO_MAP.items()}
NEEDS_CODE = {
    "everything": ({"model_type": "strange", "auto_map": AUTO_MAP}, TOKENIZER),
    "the config and the model": ({"model_type": "strange", "auto_map": AUTO_MAP}, {}),
    "only the model": ({"model_type": "clip_text_model", "auto_map": MODEL}, {}),
    "another repository's": ({"model_type": "strange", "auto_map": OTHERS}, {}),
}
NEEDS_NONE = {
    "a known config and model": ({"auto_map": AUTO_MAP}, {}),
    "a known tokenizer": ({}, TOKENIZER),
    "a tokenizer in the old notation": ({}, {"auto_map": ["strange.StrangeTokenizer", None]}),
    "code to generate with": ({}, {}),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"), chat_template=CHAT_TEMPLATE)


@pytest.fixture
def strange(pair, tmp_path):
    """Return a function that copies the pair and gives its target files of its own; ``mark`` appears if they run."""

    def make(config: dict, tokenizer: dict) -> Path:
        folder = shutil.copytree(pair, tmp_path / "strange")
        for name, changes in (("config.json", config), ("tokenizer_config.json", tokenizer)):
            path = folder / "target" / name
            path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        code = CODE.format(mark=str(tmp_path / "mark"))
        (folder / "target" / "strange.py").write_text(code)
        (folder / "target" / "custom_generate").mkdir()
        (folder / "target" / "custom_generate" / "generate.py").write_text(code)
        (folder / "prompts.jsonl").write_text('{"prompt": "w5 w6"}\n')
        return folder

    return make


def commands(folder: Path) -> dict[str, list]:
    """Every command that loads a target or a tokenizer."""
    models = ["--model", folder / "target", "--draft", folder / "draft"]
    prompts, out = folder / "prompts.jsonl", folder / "out"
    few = ["--max-new-tokens", 2]
    return {
        "generate": ["generate", *models, *few, "w5"],
        "chat": ["chat", *models, *few],
        "benchmark": ["benchmark", *models, *few, "--dataset", prompts],
        "regenerate": ["regenerate", *models, *few, "--out", folder / "rows.jsonl", prompts],
        "train": ["train", *models[:2], "--data", prompts, "--output", out, "--device", "cpu"],
        "demo": ["demo", "--pair", folder, *few],
    }


@pytest.fixture
def asked(shell, monkeypatch, another_run):
    """Return a function that runs a command while standard input says yes, and returns what was not read of it too."""

    def call(*arguments: object):
        another_run()
        monkeypatch.setattr(sys, "stdin", io.StringIO(STDIN))
        done = shell(*arguments)
        return done, sys.stdin.read()

    return call


@pytest.mark.parametrize(
    ("kind", "command"),
    [*(("everything", command) for command in commands(Path())), *((kind, "generate") for kind in [*NEEDS_CODE][1:])],
)
def test_a_command_refuses_code_in_one_line_without_asking(kind, command, strange, asked, tmp_path):
    folder = strange(*NEEDS_CODE[kind])
    done, unread = asked(*commands(folder)[command])
    assert not (tmp_path / "mark").exists()
    assert unread == STDIN
    done.assert_refused(f"{folder / 'target'} needs Python code of its own")
    assert ("--trust-remote-code" in done.err) == (command != "demo")
    assert "trust_remote_code" not in done.err


@pytest.mark.parametrize("kind", list(NEEDS_NONE))
def test_code_that_is_not_needed_is_left_alone(kind, strange, asked, tmp_path):
    folder = strange(*NEEDS_NONE[kind])
    done, unread = asked(*commands(folder)["generate"])
    assert not (tmp_path / "mark").exists()
    assert (done.code, unread) == (0, STDIN)


def test_a_drafter_never_brings_code(strange, asked, tmp_path):
    folder = strange({}, {})
    shutil.copy(folder / "target" / "strange.py", folder / "draft" / "dflash.py")
    path = folder / "draft" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoModel": "dflash.StrangeModel"}}))
    done, unread = asked(*commands(folder)["generate"])
    assert not (tmp_path / "mark").exists()
    assert (done.code, unread) == (0, STDIN)


@pytest.mark.parametrize(
    "change", [{"attn_implementation": "someone/kernel@main:function"}, {"_attn_implementation": "someone/kernel"}]
)
def test_a_kernel_from_the_hub_is_refused(change, strange, asked):
    folder = strange(change, {})
    done, _ = asked(*commands(folder)["generate"])
    done.assert_refused("attn_implementation in config.json asks for code from the hub, 'someone/kernel")


class Touch:
    """Its pickle makes a file when it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_weights_that_are_pickles_run_nothing(strange, asked, tmp_path):
    folder = strange({}, {})
    weights = folder / "target" / "model.safetensors"
    weights.unlink()
    torch.save({"lm_head.weight": Touch(str(tmp_path / "mark"))}, folder / "target" / "pytorch_model.bin")
    done, _ = asked(*commands(folder)["generate"])
    assert not (tmp_path / "mark").exists()
    done.assert_refused()


def test_a_server_has_no_code_to_trust(shell, tmp_path):
    done = shell("regenerate", "--server", "http://x/v1", "--model", "m", "--out", tmp_path / "o",
                 "--trust-remote-code", PACKAGE / "pair" / "prompts.jsonl")  # fmt: skip
    done.assert_refused("--trust-remote-code does not go with --server")


def test_with_the_option_the_code_runs_and_nobody_is_asked(strange, tmp_path):
    folder = strange({"model_type": "qwen3"}, TOKENIZER)
    child = process.python(
        """
        import sys
        import dflash.cli
        import transformers.dynamic_module_utils

        transformers.dynamic_module_utils.HF_MODULES_CACHE = sys.argv.pop(1)  # where the code is copied before it runs
        dflash.cli.main()
        """,
        tmp_path / "modules",
        *[*commands(folder)["generate"], "--trust-remote-code"],
        stdin=STDIN,
    )
    assert child.returncode == 0, child.stderr
    assert (tmp_path / "mark").exists()


def test_python_doors_refuse_code_too(strange, tmp_path, monkeypatch):
    folder = strange(*NEEDS_CODE["everything"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(STDIN))
    with pytest.raises(ValueError, match="needs Python code of its own, which is not run unasked: a pair has"):
        dflash.demo_pair(folder)
    for load in (Pretrained.load_config, Pretrained.load_empty_target, lambda files: files.load_target("auto")):
        with pytest.raises(ValueError, match="needs Python code of its own"):
            load(Pretrained(folder / "target"))
    assert sys.stdin.read() == STDIN
    assert not (tmp_path / "mark").exists()
