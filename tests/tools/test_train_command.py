"""Test ``dflash train`` from the shell: in one process, in two, killed, and with every kind of mistake."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from draft_variants import random_tensors, save_checkpoint
from families import VOCAB, draft_config, make_target
from safetensors.torch import load_file
from tiny_tokenizers import spoken

import dflash
import dflash_tools.commands.training
from dflash import DraftConfig

MASK = 2


@pytest.fixture
def run(shell, another_run):
    """Return a function that runs ``dflash train ARGUMENTS`` in this process."""
    return lambda *arguments: another_run() or shell("train", *arguments)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    make_target("qwen3").save_pretrained(folder)
    spoken().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(18, 40, (12,), generator=generator).tolist()
    ids = [torch.randint(7, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    path.write_text(
        "".join(json.dumps({"input_ids": r, "loss_mask": [0] * 4 + [1] * (len(r) - 4)}) + "\n" for r in ids)
    )
    return path


SMALL = {
    "--layers": 1, "--block-size": 4, "--taps": "0,2", "--mask-token-id": MASK, "--steps": 4, "--batch-tokens": 80,
    "--anchors": 5, "--mixed-precision": "no", "--eval-rows": 0, "--log-every": 1, "--save-every": 2, "--device": "cpu",
}  # fmt: skip


@pytest.fixture
def arguments(model, data, tmp_path):
    """Return a function that gives a small run's options. A change of None drops an option, True makes it a flag."""

    def make(**changes: object) -> list[str]:
        options = {"--model": model, "--data": data, "--output": tmp_path / "out", **SMALL}
        options |= {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
        pairs = (
            [name] if value is True else [name, str(value)] for name, value in options.items() if value is not None
        )
        return [part for pair in pairs for part in pair]

    return make


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained(folder: Path, step: int = 4) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


# ---------------------------------------------------------------------------------------------- runs


def test_a_run_writes_a_draft_that_the_engine_reads(run, arguments, model, tmp_path):
    done = run(*arguments(eval_rows=1, eval_tokens=5, json=True)).assert_done()
    last = json.loads(done.out)
    assert last["step"] == 4
    assert last["acceptance_length"] >= 1
    assert "step 4 of 4  loss" in done.err
    folder = tmp_path / "out"
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["checkpoints", "config.json", "metrics.jsonl", "model.safetensors"]
    draft = dflash.load_draft(folder, dtype=torch.float32)
    assert draft.config.mask_token_id == MASK
    assert draft.config.target_layer_ids == (0, 2)
    target = make_target("qwen3")
    prompt = torch.tensor([[7, 8, 9]])
    assert torch.equal(
        dflash.generate(target, draft, prompt, max_new_tokens=12),
        dflash.generate(target, None, prompt, max_new_tokens=12),
    )
    again = run(*arguments(eval_rows=1, eval_tokens=5, json=True, resume=True)).assert_done()
    assert json.loads(again.out) == last
    onward = run(*arguments(init=folder, output=tmp_path / "more", **dict.fromkeys(NEW))).assert_done()
    assert f"the draft is in {tmp_path / 'more'}: 4 steps in " in onward.err
    assert dflash.load_draft(tmp_path / "more").config == draft.config


NEW = ("layers", "block_size", "taps", "mask_token_id")
DFLASH2 = {"type": "dflash2", "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


def test_a_dflash_2_drafter_is_new_or_starts_from_one_of_the_first_generation(run, arguments, tmp_path):
    done = run(*arguments(**DFLASH2, json=True)).assert_done()
    assert {"selector_loss", "candidate_recall"} <= json.loads(done.out).keys()
    draft = dflash.load_draft(tmp_path / "out")
    assert draft.config.dflash2 == dflash.drafter.DFlash2Config(2, 8, 6, 4)
    run(*arguments(output=tmp_path / "first")).assert_done()
    assert "selector_loss" not in metrics(tmp_path / "first")[-1]
    fixed = dict.fromkeys(NEW)
    fixed |= {"init": tmp_path / "first"}
    run(*arguments(output=tmp_path / "second", learning_rate=1e-9, **DFLASH2, **fixed)).assert_done()
    fixed["init"] = tmp_path / "second"
    before, after = (trained(tmp_path / name, 4) for name in ("first", "second"))
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-2, atol=1e-2)  # bfloat16 between the runs
    run(*arguments(output=tmp_path / "third", **fixed)).assert_done()
    assert dflash.load_draft(tmp_path / "third").config.dflash2 == draft.config.dflash2
    for change, message in (
        ({"type": "dflash"}, "--type dflash cannot start from a DFlash 2 drafter"),
        ({"type": "dspark"}, "--type dspark must start from a DSpark drafter, or without --init"),
        ({"type": "dflash2", "selector_rank": 4}, "--selector-rank is fixed by --init: leave it out"),
    ):
        run(*arguments(output=tmp_path / "none", **fixed, **change)).assert_refused(message)


def test_a_dry_run_prints_the_plan_and_writes_nothing(run, arguments, tmp_path):
    changes = {"json": True, "tracker": "tensorboard", "cache_features": tmp_path / "cache"}
    plan = json.loads(run(*arguments(dry_run=True, **changes)).assert_done().out)
    assert plan["steps"] == 4
    assert plan["rows"] == 12
    assert plan["draft_parameters"] == 39200
    assert plan["features_bytes"] == plan["row_tokens"] * 2 * 64 * 2
    assert min(plan[name] for name in ("hours", "memory_bytes", "tokens_per_second", "tokens")) > 0
    done = run(*arguments(dry_run=True))
    for words in ("39,200 parameters, for a target of", "steps on this data", "stages  data ", "hours at that speed"):
        assert words in done.out
    assert not list(tmp_path.iterdir())


def test_features_are_cached_and_reused(run, arguments, tmp_path, monkeypatch):
    run(*arguments(cache_features=tmp_path / "cache")).assert_done()
    monkeypatch.setattr(dflash_tools.train.TargetFeatures, "__call__", None)  # the target is not run again
    run(*arguments(cache_features=tmp_path / "cache", output=tmp_path / "again")).assert_done()
    ours, theirs = trained(tmp_path / "again"), trained(tmp_path / "out")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def processes(count: int, arguments: list[str]) -> list[subprocess.Popen]:
    """Start ``python -m dflash_tools.train`` ``count`` times, as ``accelerate launch`` does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "dflash_tools.train", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [{**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [subprocess.Popen(command, env=environment, **pipes) for environment in ranks]


def test_two_processes_train_what_one_does_on_the_same_global_batch(run, arguments, tmp_path):
    """The drafter has every part that one can have: the selector's are used outside of its forward pass."""
    common = {"eval_rows": 2, "eval_tokens": 5, "json": True, "save_every": 4, **DFLASH2}
    both = processes(2, arguments(output=tmp_path / "two", accumulate=2, **common))
    try:
        outputs = [process.communicate(timeout=240) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], outputs
    run(*arguments(output=tmp_path / "one", accumulate=4, **common)).assert_done()
    ours, theirs = trained(tmp_path / "two"), trained(tmp_path / "one")
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)
    for two, one in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        names = {"step", "tokens", "loss", "selector_loss", "candidate_recall", "train_acceptance", "gradient_norm"}
        names = (names | {"acceptance_length"}) & one.keys()
        assert {name: two[name] for name in names} == pytest.approx({name: one[name] for name in names}, rel=1e-4)
    assert json.loads(outputs[0][0])["step"] == 4
    assert outputs[1] == ("", ""), "only the first process prints"


def test_processes_of_which_one_is_stopped_save_the_same_step(arguments, tmp_path):
    both = processes(2, arguments(steps=100_000, save_every=0))
    try:
        while not (tmp_path / "out/metrics.jsonl").exists():
            assert both[0].poll() is None, both[0].communicate()
            time.sleep(0.1)
        both[1].send_signal(signal.SIGINT)
        outputs = [process.communicate(timeout=120) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [130, 130], outputs
    assert "to go on from there, run the same command with --resume" in outputs[0][1]
    assert len([*(tmp_path / "out/checkpoints").iterdir()]) == 1


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(("change", "message"), [
    ({"model": "./nowhere"}, "no folder './nowhere', and it is not a hub id"),
    ({"taps": "0,9"}, "target_layer_ids must be layers of the target, 0 .. 3, got [0, 9]"),
    ({"taps": "0;1"}, "--taps must be numbers with commas between them, got '0;1'"),
    ({"mask_token_id": None}, "no mask token: the tokenizer has none"),
    ({"mask_token_id": None}, "(--mask-token-id 3, '<line>', does not occur in the data"),
    ({"mask_token_id": 97}, "must lie in 0 .. 96, the embedding rows, got 97: name one that the target never writes"),
    ({"threads": 0}, "--threads must be at least 1, got 0"),
    ({"dry_run": True, "resume": True}, "--dry-run plans a run from its start: leave out --resume"),
    ({"type": "eagle"}, "--type must be dflash, dflash2 or dspark, got 'eagle'"),
    ({**DFLASH2, "conv_group_size": 7}, "conv_group_size must divide hidden_size 64, got 7"),
    ({"init": "./nowhere"}, "--layers is fixed by --init: leave it out"),
    ({"init": "./nowhere", **dict.fromkeys(NEW)}, "draft './nowhere' is neither a folder nor"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments, change, message, tmp_path):
    run(*arguments(**change)).assert_refused(message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("changes", "option", "message"), [
    ({"attention_sink_bias": True}, {}, "a drafter with attention sinks cannot be trained"),
    ({}, {"selector_weight": 2}, "--selector-weight is for DFlash 2 drafters"),
], ids=str)  # fmt: skip
def test_what_cannot_be_trained_is_named_before_weights_are_loaded(
    run, arguments, model, tmp_path, changes, option, message
):
    folder = tmp_path / "target"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    config = draft_config(make_target("qwen3")) | changes
    save_checkpoint(tmp_path / "draft", config, random_tensors(DraftConfig.from_config(config)))
    done = run(*arguments(model=folder, init=tmp_path / "draft", **dict.fromkeys(NEW), **option))
    done.assert_refused(message)
    assert not (tmp_path / "out").exists()
    assert ("--init" in done.err) == (not option)
