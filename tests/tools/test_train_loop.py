"""Test the training loop on a tiny target: it learns, resumes bit for bit, and names what it cannot do."""

import itertools
import json
import math
import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from baseline import greedy
from families import VOCAB, make_target
from safetensors.torch import load_file, save_file

import dflash
from dflash import Drafter
from dflash.drafter import DFlash2Config
from dflash_tools.train import (
    CheckpointError,
    TargetFeatures,
    TrainConfig,
    Trainer,
    adopt_head_,
    draft_config,
    new_drafter,
)
from dflash_tools.train.batches import Batches
from dflash_tools.train.checkpoint import checkpoints
from dflash_tools.train.features import cache_features
from dflash_tools.train.trainer import learning_rate

pytestmark = pytest.mark.usefixtures("another_run")
MASK, BLOCK, TAPS = 1, 8, (0, 2)
FEW = TrainConfig(
    steps=6, batch_tokens=200, anchors=6, learning_rate=1e-3, mixed_precision="no", eval_rows=0, log_every=1,
    save_every=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def rows(target) -> datasets.Dataset:
    """Return ten prompts with the target's own greedy answers, without the mask token."""
    found, generator = [], torch.Generator().manual_seed(0)
    while len(found) < 10:
        prompt = torch.randint(2, VOCAB, (5 + len(found) % 4,), generator=generator)
        answer = greedy(target, prompt, 40 - 2 * (len(found) % 3))
        if MASK not in answer:
            ids = torch.cat([prompt, answer]).tolist()
            found.append({"input_ids": ids, "loss_mask": [0] * len(prompt) + [1] * len(answer)})
    return datasets.Dataset.from_list(found)


def draft(target, **changes):
    settings = {"num_layers": 2, "block_size": BLOCK, "target_layer_ids": TAPS, **changes}
    return new_drafter(draft_config(target, mask_token_id=MASK, **settings))


def trainer(target, rows, folder, config: TrainConfig = FEW, *, drafter=None, **options) -> Trainer:
    return Trainer(target, drafter or draft(target), rows, config, folder, quiet=True, **options)


def changed(**changes) -> TrainConfig:
    return TrainConfig(**{**FEW.__dict__, **changes})


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in run.drafter.state_dict().items()}


def assert_same(ours: dict, theirs: dict) -> None:
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------- batches and rates


def test_an_epoch_takes_every_row_once_in_batches_of_like_length():
    lengths = torch.randint(5, 90, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    batches = Batches(lengths, 200, 2, seed=0)
    steps = batches.epoch(0)
    flat = [rows for step in steps for rows in step]
    seen = sorted(itertools.chain(*flat))
    assert len(seen) == len(set(seen))
    assert len(seen) >= 300 - max(map(len, flat)), "at most one micro-batch waits"
    assert all(len(step) == 2 for step in steps)
    assert all(len(rows) * max(lengths[row] for row in rows) <= 200 for rows in flat)
    padding = sum(len(rows) * max(lengths[row] for row in rows) for rows in flat) / sum(lengths[row] for row in seen)
    assert padding < 1.2
    assert batches.epoch(0) == steps
    assert batches.epoch(1) != steps
    assert Batches(lengths, 200, 2, seed=1).epoch(0) != steps
    whole = Batches(lengths, 200, 1, seed=0).epoch(0)
    assert list(itertools.chain(*whole))[: len(flat)] == flat, "several processes share the order of one"
    assert batches.count(2) == len(steps) + len(batches.epoch(1))


def test_a_long_row_gets_its_own_batch_and_little_data_still_fills_a_step():
    assert Batches([500, 3], 200, 1, seed=0).epoch(0) in ([[[0]], [[1]]], [[[1]], [[0]]])
    assert Batches([3], 200, 4, seed=0).epoch(0) == [[[0]] * 4]


def test_the_learning_rate_rises_stays_and_falls():
    rates = [learning_rate(step, 300, 0.1, 0.5) for step in range(300)]
    assert rates[:3] == pytest.approx([1 / 30, 2 / 30, 3 / 30])
    assert set(rates[30:150]) == {1.0}
    assert rates[225] == pytest.approx(0.5)
    assert rates[150:] == sorted(rates[150:], reverse=True)
    assert 0 < rates[-1] < 1e-3


# ---------------------------------------------------------------------------------------------- it learns


@pytest.mark.parametrize(("shape", "changes"), [
    ({}, {}),
    ({"draft_vocab_size": 80, "markov_rank": 8}, {"slot_weights": "dpace"}),
    ({"predicts_from_anchor": True, "markov_rank": 8}, {"l1_weight": 0.8, "steps": 150}),
], ids=["first-generation", "draft vocabulary, Markov head and D-PACE", "DSpark"])  # fmt: skip
def test_a_drafter_learns_a_handful_of_sequences_by_heart(target, rows, tmp_path, shape, changes):
    config = changed(
        anchors=16, batch_tokens=300, learning_rate=6e-3, log_every=90, save_every=0, eval_tokens=33,
        feature_noise=0.02, **{"steps": 90} | changes,
    )  # fmt: skip
    rows = rows.select(range(6))
    drafter = draft(target, **shape)
    if "draft_vocab_size" in shape:
        adopt_head_(drafter, target, rows)
    run = trainer(target, rows, tmp_path, config, drafter=drafter)
    run.prompts = [row["input_ids"][: row["loss_mask"].index(1)] for row in rows]  # by heart, so nothing held out
    before = run.evaluate()["acceptance_length"]
    last = run.train()
    assert before < 1.5
    assert last["acceptance_length"] > 0.93 * BLOCK
    assert last["train_acceptance"] > 0.93 * BLOCK
    assert metrics(tmp_path)[-1]["acceptance_length"] == last["acceptance_length"]
    # The draft on disk must reach the measured acceptance in the engine, on the same prompts.
    written = dflash.load_draft(tmp_path, dtype=torch.float32)
    generator, lengths = dflash.Generator(target, written, max_length=80), []
    for prompt in run.prompts:
        out = generator.generate(torch.tensor([prompt]), max_new_tokens=33, return_dict_in_generate=True)
        lengths += out.statistics.acceptance_lengths[0]
    assert sum(lengths) / len(lengths) > 0.9 * BLOCK


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_any_family_and_dtype_takes_a_step(family, tmp_path, another_run):
    """Covers bfloat16 with and without mixed precision, and a family that scales its embeddings."""
    other = make_target(family, dtype=torch.bfloat16)
    ids = torch.randint(2, VOCAB, (5, 30), generator=torch.Generator().manual_seed(0)).tolist()
    some = datasets.Dataset.from_list([{"input_ids": row, "loss_mask": [0] * 5 + [1] * 25} for row in ids])
    some, held = some.select(range(3)), some.select(range(3, 5))
    for precision in ("no", "bf16"):
        another_run()
        config = changed(steps=2, mixed_precision=precision, eval_rows=2, eval_tokens=4, eval_temperatures=(0.0, 1.0))
        last = trainer(other, some, tmp_path / precision, config, heldout=held).train()
        assert math.isfinite(last["loss"])
        assert last["acceptance_length"] >= 1
        assert last["acceptance_length_t1"] >= 1


@pytest.mark.parametrize(("has", "chosen"), [({}, "no"), ({"avx512_bw": True}, "bf16"), ({"bf16": True}, "bf16")])
def test_a_cpu_that_emulates_bfloat16_trains_in_float32(has, chosen, target, rows, tmp_path, another_run, monkeypatch):
    wanted = trainer(target, rows, tmp_path / "wanted", changed(steps=2, mixed_precision=chosen))
    wanted.train()
    another_run()
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    found = trainer(target, rows, tmp_path / "found", changed(steps=2, mixed_precision=None))
    found.train()
    assert found.config.mixed_precision == chosen
    assert all(torch.equal(x, weights(found)[name]) for name, x in weights(wanted).items())


def test_features_on_disk_train_the_same_drafter(target, rows, tmp_path, monkeypatch):
    config = changed(steps=4, eval_rows=2, eval_tokens=4)  # held-out rows shift the numbers of the others
    online = trainer(target, rows, tmp_path / "online", config)
    online.train()
    taps = TargetFeatures(target, TAPS)
    cache = cache_features(target, taps, rows, TAPS, tmp_path / "cache", dtype=torch.float32)
    cached = trainer(target, rows, tmp_path / "cached", config, features=cache)
    with monkeypatch.context() as patch:
        patch.setattr(TargetFeatures, "__call__", None)  # the target is not run
        cached.train()
    for name, tensor in weights(online).items():
        torch.testing.assert_close(cached.drafter.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="holds features of other rows"):
        trainer(target, rows.select(range(5)), tmp_path / "x", features=cache)
    other = draft(target, target_layer_ids=(0, 1))
    with pytest.raises(ValueError, match=r"features of layers \[0, 2\], the drafter taps \[0, 1\]"):
        trainer(target, rows, tmp_path / "x", drafter=other, features=cache)


# ---------------------------------------------------------------------------------------------- held-out prompts


def answered(prompts, samples: int = 2, length: int = 12) -> datasets.Dataset:
    """Return ``samples`` different answers to each of ``prompts``, in order."""
    generator = torch.Generator().manual_seed(1)
    answers = torch.randint(2, VOCAB, (len(prompts) * samples, length), generator=generator).tolist()
    asked = [prompt for prompt in prompts for _ in range(samples)]
    ids = [[*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)]
    return datasets.Dataset.from_list(
        [{"input_ids": row, "loss_mask": [0] * (len(row) - length) + [1] * length} for row in ids]
    )


PROMPTS = [[5 + i, 6, 7 + i] for i in range(30)]


def trained_prompts(run: Trainer) -> set[tuple[int, ...]]:
    return {tuple(run.rows[i]["input_ids"][: run.rows[i]["loss_mask"].index(1)]) for i in run.index}


def test_no_answer_to_a_held_out_prompt_is_trained_on(target, tmp_path, capsys):
    run = Trainer(target, draft(target), answered(PROMPTS), changed(steps=1, eval_rows=2, eval_tokens=4), tmp_path)
    assert len(run.prompts) == 2
    assert not trained_prompts(run) & set(map(tuple, run.prompts))
    assert len(run.index) == 56
    run.train()
    assert "2 held-out prompts are answered, 4 rows of held-out prompts are not trained on" in capsys.readouterr().err


def test_rows_that_share_a_prompt_with_the_held_out_rows_are_left_out(target, tmp_path):
    config = changed(eval_rows=2, eval_tokens=4)
    run = trainer(target, answered(PROMPTS), tmp_path, config, heldout=answered(PROMPTS[3:6], samples=3))
    assert run.prompts == PROMPTS[3:5], "each prompt is asked once, however many answers it has"
    assert not trained_prompts(run) & set(map(tuple, PROMPTS[3:6]))
    assert len(run.index) == 54
    with pytest.raises(ValueError, match="every row answers a held-out prompt"):
        trainer(target, answered(PROMPTS[:4]), tmp_path, config, heldout=answered(PROMPTS[:4]))


def test_an_evaluation_without_a_prompt_is_an_error_before_any_work(target, tmp_path):
    config = changed(eval_rows=4, eval_tokens=4)
    with pytest.raises(ValueError, match="none of 1 prompts can be held out"):
        trainer(target, answered(PROMPTS[:1], samples=8), tmp_path, config)
    with pytest.raises(ValueError, match="eval_tokens must be at least 2, got 1"):
        changed(eval_tokens=1)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(("optimizer", "dflash2"), [("adamw", None), ("muon", DFlash2Config(2, 16, 8, 4))])
def test_a_resumed_run_ends_with_the_same_weights_bit_for_bit(target, rows, tmp_path, optimizer, dflash2):
    config = changed(steps=7, accumulate=2, feature_noise=0.1, weight_decay=0.1, optimizer=optimizer)

    def start():
        return new_drafter(replace(draft(target).config, dflash2=dflash2))

    whole = trainer(target, rows, tmp_path / "whole", config, drafter=start())
    whole.train()
    stopped = trainer(target, rows, tmp_path / "stopped", config, drafter=start())

    step = stopped.run_step

    def until(group, *arguments):
        if stopped.step == 5:
            raise KeyboardInterrupt
        return step(group, *arguments)

    stopped.run_step = until
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    assert [line["step"] for line in metrics(tmp_path / "stopped")] == [1, 2, 3, 4, 5]
    assert checkpoints(tmp_path / "stopped" / "checkpoints")[-1].name == "step-00000004"
    resumed = trainer(target, rows, tmp_path / "stopped", config, drafter=start())
    assert resumed.resume()
    assert resumed.step == 4
    resumed.train()
    assert_same(weights(resumed), weights(whole))
    assert [line["step"] for line in metrics(tmp_path / "stopped")] == list(range(1, 8))
    ours, theirs = metrics(tmp_path / "stopped"), metrics(tmp_path / "whole")
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs]
    assert [line["tokens"] for line in ours] == [line["tokens"] for line in theirs]
    done = trainer(target, rows, tmp_path / "stopped", config, drafter=start())
    assert done.resume()
    done.train()
    assert_same(weights(done), weights(whole))


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_run_that_is_stopped_by_a_signal_saves_its_last_step(target, rows, tmp_path, number, raised, capsys):
    config, before = changed(steps=4, save_every=0), signal.getsignal(number)
    whole, stopped = (trainer(target, rows, tmp_path / name, config) for name in ("whole", "stopped"))
    whole.train()
    stopped.quiet, step = False, stopped.run_step

    def kill(group, *arguments):
        if stopped.step == 2:
            os.kill(os.getpid(), number)
        return step(group, *arguments)

    stopped.run_step = kill
    with pytest.raises(raised):
        stopped.train()
    assert "stopped at step 3 of 4; to go on from there, run the same command with --resume" in capsys.readouterr().err
    assert signal.getsignal(number) is before
    resumed = trainer(target, rows, tmp_path / "stopped", config)
    assert resumed.resume()
    assert resumed.step == 3
    resumed.train()
    assert_same(weights(resumed), weights(whole))


def test_another_run_is_not_resumed(target, rows, tmp_path):
    trainer(target, rows, tmp_path, changed(steps=2)).train()
    others = datasets.Dataset.from_list(
        [{**row, "input_ids": [5 + (row["input_ids"][0] == 5), *row["input_ids"][1:]]} for row in rows]
    )
    nudged, half = make_target("qwen3"), make_target("qwen3", dtype=torch.bfloat16)
    with torch.no_grad():
        nudged.model.layers[1].mlp.up_proj.weight += 1e-3  # fine-tuned a little
    scaled = make_target("qwen3", rms_norm_eps=1e-5)
    cache = cache_features(target, None, rows, TAPS, tmp_path / "cache")
    two = changed(steps=2)
    for run, message in (
        (trainer(target, rows, tmp_path, changed(steps=3)), "its steps is 2, this run's is 3"),
        (trainer(target, others, tmp_path, two), "its data is "),
        (trainer(target, rows.select(range(9)), tmp_path, two), "its rows is 10, this run's is 9"),
        (trainer(target, rows, tmp_path, two, drafter=draft(target, num_layers=1)), "its drafter is"),
        *((trainer(other, rows, tmp_path, two), "its target is") for other in (nudged, half, scaled)),
        (trainer(target, rows, tmp_path, two, features=cache), "its features is of the running target"),
    ):
        before = weights(run)
        with pytest.raises(ValueError, match=message):
            run.resume()
        assert_same(weights(run), before)


def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(target, rows, tmp_path, capsys):
    whole = trainer(target, rows, tmp_path)
    whole.train()
    folder = tmp_path / "checkpoints"
    (folder / "step-00000006" / "trainer.pt").write_bytes(b"")
    resumed = trainer(target, rows, tmp_path)
    assert resumed.resume()
    assert resumed.step == 4
    said = capsys.readouterr().err
    assert "step-00000006 cannot be read; remove that folder" in said
    assert said.endswith("; trying the one before it\n")
    resumed.train()
    assert_same(weights(resumed), weights(whole))
    for step in (6, 4, 2):
        (folder / f"step-{step:08}" / "trainer.pt").write_bytes(b"")
    run = trainer(target, rows, tmp_path)
    before, lines = weights(run), metrics(tmp_path)
    with pytest.raises(CheckpointError, match="step-00000006 cannot be read"):
        run.resume()
    assert_same(weights(run), before)
    assert metrics(tmp_path) == lines


class Code:
    def __reduce__(self):
        return Path.touch, (Path("code-ran"),)


def change_state(change):
    def apply(folder: Path) -> None:
        state = torch.load(folder / "trainer.pt", weights_only=True)
        change(state)
        torch.save(state, folder / "trainer.pt")

    return apply


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def rename_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["x"] = tensors.pop("fc.weight")
    save_file(tensors, folder / "model.safetensors")


DAMAGED = {
    "code": write("trainer.pt", pickle.dumps(Code())),
    "code in a state": change_state(lambda state: state.update(random=Code())),
    "no optimizers": change_state(lambda state: state.pop("optimizers")),
    "no random numbers": change_state(lambda state: state.pop("random")),
    "progress of something else": write("trainer.json", b"[1]"),
    "no fingerprint": write("trainer.json", b'{"step": 2}'),
    "weights renamed": rename_weight,
}


def test_a_damaged_checkpoint_is_named_and_runs_no_code(target, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = changed(steps=2, keep=1)
    trainer(target, rows, tmp_path / "run", config).train()
    for number, change in enumerate(DAMAGED.values()):
        folder = shutil.copytree(tmp_path / "run", tmp_path / str(number))
        change(folder / "checkpoints" / "step-00000002")
        run = trainer(target, rows, folder, config)
        with pytest.raises(CheckpointError, match="step-00000002") as refused:
            run.resume()
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 600
        assert run.step == 0
    assert not (tmp_path / "code-ran").exists()


# ---------------------------------------------------------------------------------------------- what it tells


def test_a_plan_measures_and_restores_everything(target, rows, tmp_path):
    config = changed(steps=5, eval_rows=1)
    whole = trainer(target, rows, tmp_path / "whole", config)
    whole.train()
    run = trainer(target, rows, tmp_path / "planned", config)
    before = weights(run)
    plan = run.plan(cached=True)
    assert not (tmp_path / "planned").exists()
    assert_same(weights(run), before)
    assert plan["draft_parameters"] == sum(p.numel() for p in run.drafter.parameters())
    assert plan["steps"] == 5
    assert plan["rows"] == 9
    from_the_cache = 5 - round(5 / plan["epochs"])  # steps
    assert from_the_cache > 0
    seconds = 5 * plan["seconds_per_step"] - from_the_cache * plan["stage_seconds"]["features"]
    assert plan["hours"] == pytest.approx(seconds / 3600)
    assert plan["memory_bytes"] > 4 * plan["draft_parameters"]
    run.train()
    assert_same(weights(run), weights(whole))
    assert plan["tokens"] == pytest.approx(metrics(tmp_path / "planned")[-1]["tokens"], rel=0.2)
    with pytest.raises(ValueError, match="must run before the first step"):
        run.plan()


@pytest.mark.parametrize(("row", "message"), [
    ({"input_ids": [5] * 600, "loss_mask": [1] * 600}, "row 10 has 600 tokens, the target has 512 positions"),
    ({"input_ids": [5, 97], "loss_mask": [1, 1]}, r"row 10 has token ids outside 0 \.\. 96"),
    ({"input_ids": [5, 6], "loss_mask": [1]}, "row 10 has 2 input_ids and a loss_mask of 1"),
    ({"input_ids": [5, MASK], "loss_mask": [1, 1]}, "row 10 must not teach the mask token 1"),
])  # fmt: skip
def test_an_unusable_row_is_named_before_any_work(target, rows, row, message, tmp_path):
    bad = datasets.Dataset.from_list([*rows, row])
    with pytest.raises(ValueError, match=message):
        trainer(target, bad, tmp_path / "run")
    with pytest.raises(ValueError, match=f"held-out {message}"):
        trainer(target, rows, tmp_path / "run", changed(eval_rows=2), heldout=bad)
    assert not (tmp_path / "run").exists()


def test_mismatches_are_named_before_any_work(target, rows, tmp_path):
    silent = datasets.Dataset.from_list([{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0]}])
    with pytest.raises(ValueError, match="nothing to learn"):
        trainer(target, silent, tmp_path)
    with pytest.raises(ValueError, match=r"taps layers \[0, 7\], the target has layers 0 \.\. 3"):
        trainer(target, rows, tmp_path, drafter=Drafter(replace(draft(target).config, target_layer_ids=(0, 7))))
    context = datasets.Dataset.from_list([*rows, {"input_ids": [MASK, 5, 6], "loss_mask": [0, 1, 1]}])
    trainer(target, context, tmp_path)  # a mask token that the target read, and did not write
    with pytest.raises(ValueError, match="its hidden_size is 64, the target's is 32"):
        trainer(make_target("qwen3", hidden_size=32), rows, tmp_path, drafter=draft(target))
    with pytest.raises(ValueError, match=r"the drafter must be float32 for training, got torch\.bfloat16"):
        trainer(target, rows, tmp_path, drafter=draft(target).bfloat16())
    with pytest.raises(ValueError, match="selector_weight is for DFlash 2 drafters, and this one has no selector"):
        trainer(target, rows, tmp_path, changed(selector_weight=0.5))
    with pytest.raises(dflash.UnsupportedTargetError, match="lightning attention"):
        trainer(make_target("minimax"), rows, tmp_path, drafter=draft(target))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("change", "message"), [
    ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
    ({"learning_rate": 0.0}, "learning_rate must be above 0"),
    ({"selector_weight": -1.0}, "selector_weight must be at least 0, got -1.0"),
    ({"l1_weight": 1.5}, "l1_weight must be in 0 .. 1, got 1.5"),
    ({"mixed_precision": "fp16"}, 'mixed_precision must be "no" or "bf16", got \'fp16\''),
])  # fmt: skip
def test_a_setting_out_of_range_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**change)
