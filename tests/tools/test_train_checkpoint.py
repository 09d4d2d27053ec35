"""Test that drafts read back, here and in the reference package, and that checkpoints are written atomically."""

import dataclasses
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from draft_variants import DFLASH2_VARIANTS, VARIANTS, random_drafter
from safetensors.torch import load_file
from transformers.models.qwen3 import Qwen3Config

from dflash import DraftConfig, load_draft
from dflash_tools.train import CheckpointError, published_config, save_draft
from dflash_tools.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint


@pytest.mark.parametrize("name", VARIANTS | DFLASH2_VARIANTS)
def test_a_draft_reads_back_unchanged(name, tmp_path):
    """The configs cover YaRN, llama3 and linear RoPE, windows, causality, biases, scales and softcaps, and DFlash 2."""
    drafter = random_drafter((VARIANTS | DFLASH2_VARIANTS)[name])
    assert DraftConfig.from_config(published_config(drafter.config)) == drafter.config
    folder = save_draft(drafter, tmp_path / "draft", dtype=torch.float32)
    again = load_draft(folder)
    assert again.config == drafter.config
    assert again.dtype == torch.float32
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert load_draft(save_draft(drafter, folder)).dtype == torch.bfloat16
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_the_reference_package_reads_a_draft_and_gives_the_same_logits(reference_package, name, tmp_path):
    drafter = random_drafter(VARIANTS[name])
    folder = save_draft(drafter, tmp_path, dtype=torch.float32)
    model = reference_package.DFlashDraftModel(Qwen3Config(**json.loads((folder / "config.json").read_text()))).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    generator, config = torch.Generator().manual_seed(0), drafter.config
    context = torch.randn(1, 21, len(config.target_layer_ids) * config.hidden_size, generator=generator)
    embeds = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
    head = torch.nn.Linear(config.hidden_size, 50, bias=False)
    places, cache = torch.arange(21 + config.block_size)[None], reference_package._make_cache(model.config)
    inputs = {"target_hidden": context, "noise_embedding": embeds, "position_ids": places}
    theirs = model(**inputs, past_key_values=cache, use_cache=True)
    ours = load_draft(folder)
    count = torch.tensor([21])
    ours = ours(ours.fuse(context, count), count, embeds, count, ours.new_cache(1, 64))
    logits = drafter.logits(ours, head)
    torch.testing.assert_close(logits, model.compute_logits(theirs, head), rtol=1e-4, atol=1e-4)
    assert reference_package._draft_value(model.config, "mask_token_id", None) == config.mask_token_id
    assert float(reference_package._draft_value(model.config, "input_embedding_scale", 1.0)) == pytest.approx(
        config.input_embedding_scale
    )


def test_rules_that_the_layout_cannot_express_are_refused():
    config = random_drafter(VARIANTS["Qwen3.5-27B-September"]).config
    with pytest.raises(ValueError, match="several windows"):
        published_config(dataclasses.replace(config, window=(24, 12, 24, 0)))
    with pytest.raises(ValueError, match="several rules of causality"):
        published_config(dataclasses.replace(config, causal=(True, False, True, False)))


# ---------------------------------------------------------------------------------------------- checkpoints


def checkpoint(folder: Path, step: int, drafter, keep: int = 3) -> Path:
    state = {"optimizer": {"moments": torch.full((3,), float(step))}}
    return save_checkpoint(folder, step, drafter, state, {"step": step}, keep)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_checkpoint_reads_back_and_old_ones_are_removed(tmp_path):
    for step in (2, 4, 10):
        checkpoint(tmp_path, step, random_drafter(seed=step), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004", "step-00000010"]
    drafter = random_drafter(seed=0)
    state, progress = load_checkpoint(checkpoints(tmp_path)[-1], drafter)
    assert progress == {"step": 10}
    assert state["optimizer"]["moments"].tolist() == [10, 10, 10]
    assert torch.equal(drafter.fc.weight, random_drafter(seed=10).fc.weight)
    assert torch.equal(load_draft(checkpoints(tmp_path)[0]).fc.weight, random_drafter(seed=4).fc.weight)


FULL = OSError(28, "No space left on device")
TORCH = "PytorchStreamWriter failed writing file data/0: file write failed\n: No space left on device"


def fail(monkeypatch, part: str) -> None:
    """Let the disk be full when a part of a checkpoint is half written."""
    write = Path.write_text

    def save_file(tensors, path, metadata=None):
        Path(path).write_bytes(b"half")
        raise FULL

    def save(state, file):
        file.write(b"half")
        raise RuntimeError(TORCH)

    def write_text(path, content, **options):
        write(path, content[:5] if path.name == "trainer.json" else content, **options)
        if path.name == "trainer.json":
            raise FULL

    owner, name, function = {
        "weights": (safetensors.torch, "save_file", save_file),
        "state": (torch, "save", save),
        "progress": (Path, "write_text", write_text),
    }[part]
    monkeypatch.setattr(owner, name, function)


@pytest.mark.parametrize("part", ["weights", "state", "progress"])
def test_a_full_disk_leaves_the_last_checkpoint_and_nothing_half_written(part, tmp_path, monkeypatch):
    checkpoint(tmp_path, 2, random_drafter(seed=2), keep=1)
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        fail(patch, part)
        with pytest.raises(CheckpointError) as error:
            checkpoint(tmp_path, 4, random_drafter(seed=4), keep=1)
    assert "step-00000004 was not written (the last good one is" in str(error.value)
    assert "No space left on device" in str(error.value)
    assert "\n" not in str(error.value)
    assert files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    checkpoint(tmp_path, 4, random_drafter(seed=4), keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004"]


def test_other_folders_are_not_touched_and_leftovers_of_a_killed_run_are_removed(tmp_path):
    kept = checkpoint(tmp_path, 2, random_drafter()).rename(tmp_path / "step-00000002-best")
    checkpoint(tmp_path, 4, random_drafter(), keep=1)
    left = tmp_path / ".unfinished-00000006"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000004"]
    checkpoint(tmp_path, 6, random_drafter(), keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept.name, "step-00000006"]
    assert (kept / "model.safetensors").is_file()
