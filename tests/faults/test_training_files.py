"""Files that training reads (rows, checkpoints, metrics, features) are checked: errors name them, and no code runs."""

import os
import pickle
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from families import VOCAB
from safetensors.torch import load_file, save_file

from dflash_tools.train import CheckpointError, TrainConfig, Trainer, draft_config, new_drafter
from dflash_tools.train.export import export
from dflash_tools.train.features import FeatureCache, cache_features

pytestmark = pytest.mark.usefixtures("another_run")
CONFIG = TrainConfig(
    steps=4, batch_tokens=60, anchors=4, eval_rows=0, mixed_precision="no", log_every=1, save_every=2, keep=1
)
NESTED = "[" * 100_000


@pytest.fixture(scope="module")
def rows() -> datasets.Dataset:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(7, VOCAB, (24,), generator=generator).tolist() for _ in range(8)]
    return datasets.Dataset.from_list([{"input_ids": ids, "loss_mask": [0] * 4 + [1] * 20} for ids in found])


def trainer(target, rows, folder, **changes) -> Trainer:
    drafter = new_drafter(draft_config(target, mask_token_id=2, num_layers=1, block_size=4, target_layer_ids=(0, 2)))
    return Trainer(target, drafter, rows, TrainConfig(**{**CONFIG.__dict__, **changes}), folder, quiet=True)


@pytest.fixture(scope="module")
def trained(target, rows, tmp_path_factory) -> Path:
    """Return the folder of a finished run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp("run")
    trainer(target, rows, folder).train()
    return folder


class Code:
    def __reduce__(self):
        return Path.touch, (Path("code-ran"),)


def change_state(change):
    def apply(folder: Path) -> None:
        path = folder / "trainer.pt"
        state = torch.load(path, weights_only=True)
        state = change(state) or state
        torch.save(state, path)

    return apply


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def rename_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {"x" if name == "fc.weight" else name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors"
    )


DAMAGED = {
    "code": write("trainer.pt", pickle.dumps(Code())),
    "code in a state": change_state(lambda state: state | {"random": Code()}),
    "no optimizers": change_state(lambda state: state.pop("optimizers") and None),
    "no random numbers": change_state(lambda state: state.pop("random") is None or None),
    "progress of something else": write("trainer.json", b"[1]"),
    "no fingerprint": write("trainer.json", b'{"step": 4}'),
    "weights renamed": rename_weight,
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_checkpoint_is_named_and_runs_no_code(kind, trained, target, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "run")
    DAMAGED[kind](tmp_path / "run" / "checkpoints" / "step-00000004")
    run = trainer(target, rows, tmp_path / "run")
    with pytest.raises(CheckpointError) as refused:
        run.resume()
    assert "step-00000004" in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 600
    assert run.step == 0
    assert not (tmp_path / "code-ran").exists()


def test_a_damaged_feature_cache_is_named(target, rows, tmp_path):
    folder = tmp_path / "cache"
    cache_features(target, None, rows, (0, 2), folder, shard_bytes=2**14)
    index = (folder / "features.json").read_text()
    for text in ("[]", "", '{"fingerprint": 7}'):
        (folder / "features.json").write_text(text)
        with pytest.raises(ValueError, match=r"features\.json: not"):
            cache_features(target, None, rows, (0, 2), folder)
    (folder / "features.json").write_text(index)
    os.truncate(folder / "features-000000.safetensors", 999)
    with pytest.raises(ValueError, match=r"features-000000\.safetensors is damaged"):
        FeatureCache(folder).features([0])


@pytest.mark.parametrize("config", [NESTED, "[]", '{"architectures": 5}', ""], ids=lambda config: config[:24])
def test_an_export_names_a_targets_config_that_cannot_be_read(config, pair_dir, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(config)
    with pytest.raises(ValueError, match=r"target/config\.json"):
        export(pair_dir / "draft", tmp_path / "out", "speculators", target=str(tmp_path / "target"))
    assert not (tmp_path / "out").exists()
