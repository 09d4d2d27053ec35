"""Files that training reads (rows, checkpoints, metrics, features) are checked: errors name them, and no code runs."""

import io
import json
import pickle
import shutil
import tracemalloc
import zipfile
from pathlib import Path

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from families import VOCAB
from safetensors.torch import load_file, save_file
from tiny_tokenizers import spoken

from dflash.train import CheckpointError, TrainConfig, Trainer, draft_config, new_drafter
from dflash.train.data import load_rows
from dflash.train.data.features import FeatureCache, cache_features
from dflash.train.export import export
from dflash.train.regenerate import LocalWriter, Settings, regenerate

CONFIG = TrainConfig(
    steps=4, batch_tokens=60, anchors=4, eval_rows=0, mixed_precision="no", log_every=1, save_every=2, keep=1
)
NESTED = "[" * 100_000


@pytest.fixture(autouse=True)
def another_run():
    """Reset accelerate's state. It exists once per process, and runs must not share it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def rows() -> datasets.Dataset:
    generator = torch.Generator().manual_seed(0)
    found = [torch.randint(7, VOCAB, (24,), generator=generator).tolist() for _ in range(8)]
    return datasets.Dataset.from_list([{"input_ids": ids, "loss_mask": [0] * 4 + [1] * 20} for ids in found])


def trainer(target, rows, folder, **changes) -> Trainer:
    drafter = new_drafter(draft_config(target, mask_token_id=2, num_layers=1, block_size=4, target_layer_ids=(0, 2)))
    return Trainer(target, drafter, rows, TrainConfig(**{**CONFIG.__dict__, **changes}), folder, quiet=True)


# ---------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module", params=["adamw", "muon"])
def trained(request, target, rows, tmp_path_factory) -> tuple[str, Path]:
    """Return an optimizer's name, and the folder of a run with it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp(request.param)
    trainer(target, rows, folder, optimizer=request.param).train()
    return request.param, folder


class Code:
    def __reduce__(self):
        return Path.touch, (Path("code-ran"),)


def deep_pickle() -> object:
    value: object = []
    for _ in range(300):
        value = [value]
    return value


def change_state(change):
    def apply(folder: Path) -> None:
        path = folder / "trainer.pt"
        state = torch.load(path, weights_only=True)
        state = change(state) or state
        torch.save(state, path)

    return apply


def change_progress(**changes):
    def apply(folder: Path) -> None:
        path = folder / "trainer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


def change_weights(change):
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def compressed(folder: Path) -> None:
    content = io.BytesIO()
    torch.save({"optimizers": [torch.zeros(2**24)], "random": torch.get_rng_state()}, content)
    with zipfile.ZipFile(content) as plain, zipfile.ZipFile(folder / "trainer.pt", "w", zipfile.ZIP_DEFLATED) as small:
        for name in plain.namelist():
            small.writestr(name, plain.read(name))


def entry(state: dict) -> dict:
    return state["optimizers"][0]["state"][0]


def cut_moment(state: dict) -> None:
    name = next(name for name in entry(state) if name != "step")
    entry(state)[name] = entry(state)[name][:1]


HOSTILE = {
    "code": write("trainer.pt", pickle.dumps(Code())),
    "code in a state": change_state(lambda state: state | {"random": Code()}),
    "compressed": compressed,
    "another type": change_state(lambda state: [state]),
    "no optimizers": change_state(lambda state: state.pop("optimizers") and None),
    "optimizers": change_state(lambda state: state | {"optimizers": {}}),
    "too many optimizers": change_state(lambda state: state["optimizers"].append({})),
    "an optimizer": change_state(lambda state: state["optimizers"].__setitem__(0, 7)),
    "groups": change_state(lambda state: state["optimizers"][0].__setitem__("param_groups", {})),
    "maximize": change_state(lambda state: state["optimizers"][0]["param_groups"][0].__setitem__("weight_decay", "x")),
    "parameters": change_state(lambda state: state["optimizers"][0]["param_groups"][0].__setitem__("params", [0] * 99)),
    "no state": change_state(lambda state: state["optimizers"][0]["state"].clear()),
    "a moment's name": change_state(lambda state: entry(state).clear()),
    "a moment's shape": change_state(cut_moment),
    "a moment's type": change_state(lambda state: entry(state).update(dict.fromkeys(entry(state), 7))),
    "a moment's dtype": change_state(lambda state: entry(state).update({k: v.half() for k, v in entry(state).items()})),
    "a sparse moment": change_state(lambda s: entry(s).update({k: v.to_sparse() for k, v in entry(s).items()})),
    "a moment on meta": change_state(lambda s: entry(s).update({k: v.to("meta") for k, v in entry(s).items()})),
    "a narrow moment": change_state(lambda s: entry(s).update({k: v[..., :1] for k, v in entry(s).items() if v.dim()})),
    "random numbers": change_state(lambda state: state | {"random": torch.zeros(5, dtype=torch.uint8)}),
    "random floats": change_state(lambda state: state | {"random": torch.zeros(5056)}),
    "random meta": change_state(lambda state: state | {"random": torch.zeros(5056, dtype=torch.uint8, device="meta")}),
    "random noise": change_state(lambda state: state | {"random": torch.full((5056,), 255, dtype=torch.uint8)}),
    "nested state": change_state(lambda state: state | {"optimizers": deep_pickle()}),
    "nested progress": write("trainer.json", NESTED.encode()),
    "large progress": write("trainer.json", b'{"step": 4' + b" " * 2**21 + b"}"),
    "progress not UTF-8": write("trainer.json", b"\xff"),
    **{
        f"{name} {value!r:.20}": change_progress(**{name: value})
        for name in ("step", "epoch", "place", "tokens", "seconds")
        for value in ("4", -1, 10**30, [4], None, float("nan"), True)
        if not (name == "seconds" and value == 10**30)
    },
    "step above all": change_progress(step=5),
    "last": change_progress(last=[]),
    "fingerprint": change_progress(fingerprint=[]),
    "no fingerprint": change_progress(fingerprint={}),
    "weights renamed": change_weights(lambda tensors: tensors.update(x=tensors.pop("fc.weight"))),
    "weights reshaped": change_weights(lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:1].clone()})),
    "weights retyped": change_weights(lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].double()})),
    "weights of spaces": write("model.safetensors", (2**23).to_bytes(8, "little") + b" " * 2**23),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_checkpoint_that_was_changed_is_named_and_changes_nothing(kind, trained, target, rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    optimizer, original = trained
    shutil.copytree(original, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    HOSTILE[kind](checkpoint)
    run = trainer(target, rows, tmp_path / "run", optimizer=optimizer)
    before = {name: tensor.clone() for name, tensor in run.drafter.state_dict().items()}
    random = torch.get_rng_state()
    with pytest.raises(CheckpointError) as refused:
        run.resume()
    assert "step-00000004" in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 600
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.drafter.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert run.step == 0
    assert all(not optimizer.state for optimizer in run.optimizers)
    assert not (tmp_path / "code-ran").exists()


def test_a_checkpoint_of_another_run_is_told_in_a_line(trained, target, rows, tmp_path):
    optimizer, original = trained
    shutil.copytree(original, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    progress = json.loads((checkpoint / "trainer.json").read_text())
    progress["fingerprint"]["seed"] = "\x1b[2J" * 10_000
    (checkpoint / "trainer.json").write_text(json.dumps(progress))
    with pytest.raises(ValueError, match="belongs to another run: its seed is") as refused:
        trainer(target, rows, tmp_path / "run", optimizer=optimizer).resume()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 600


def test_metrics_that_are_not_ours_are_dropped(trained, target, rows, tmp_path):
    optimizer, original = trained
    shutil.copytree(original, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    ours = path.read_bytes()
    more = [
        NESTED.encode(),
        b"[1]",
        b"7",
        b"{}",
        b'{"step": "1"}',
        b'{"step": null}',
        b"\xff\xfe",
        b'{"step": 9}',
        b'{"st',
    ]
    path.write_bytes(b"\n".join(more[:4]) + b"\n" + ours + b"\n".join(more[4:]))
    assert trainer(target, rows, tmp_path / "run", optimizer=optimizer).resume()
    assert path.read_bytes() == ours


# ---------------------------------------------------------------------------------------------- rows

WRITTEN = {"line": 1, "sample": 0, "seed": 0, "model": "x", "max_new_tokens": 4, "prompt": "w7", "response": "w8"}
BAD_ROWS = {
    NESTED: "not JSON that can be read: more than 100 levels",
    '{"prompt": "w7", "response": ' + NESTED: "not JSON that can be read: more than 100 levels",
    r'{"prompt": "w7 \ud83d", "response": "w8"}': "half of a surrogate pair",
    r'{"text": "\udfff"}': "half of a surrogate pair",
    r'{"messages": [{"role": "user", "content": "\uDC00"}]}': "half of a surrogate pair",
    '{"input_ids": [7, 8], "loss_mask": [[1], {}]}': "loss_mask must hold a 0 or 1",
    '{"input_ids": [7, 8], "loss_mask": [1, NaN]}': "loss_mask must hold a 0 or 1",
    '{"input_ids": [7, 8], "loss_mask": "11"}': "loss_mask must hold a 0 or 1",
    '{"input_ids": [7, 1' + "0" * 4000 + '], "loss_mask": [1, 1]}': "input_ids must lie in 0 .. 96",
    '{"input_ids": [7, -1], "loss_mask": [1, 1]}': "input_ids must lie in 0 .. 96",
    '{"prompt_ids": ["7"], "response_ids": [8]}': "prompt_ids must be a list of token ids",
    '{"prompt_ids": [true], "response_ids": [8]}': "prompt_ids must be a list of token ids",
    json.dumps(dict.fromkeys(("\x1b[2J", *map(str, range(5000))), 1)): "a row needs a prompt and response",
    **{
        json.dumps(WRITTEN | {"template": template}): "template must be an object of arguments"
        for template in ("x", [1], 7, {"chat_template": "{{ 1 }}"}, {"tokenize": True}, {"conversation": []})
    },
}


@pytest.mark.parametrize("row", BAD_ROWS, ids=lambda row: row[:40])
def test_a_row_that_cannot_be_read_is_named_by_its_line(row, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "w7", "response": "w8"}) + "\n" + row + "\n")
    with pytest.raises(ValueError, match="line 2") as refused:
        load_rows(path, spoken(), 32)
    assert BAD_ROWS[row] in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("line", [NESTED, "[]", "7", '{"line": [1], "sample": {}}', '{"line": true, "sample": 0}'])
def test_an_output_of_something_else_is_refused_and_stays(line, target, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(line + "\n")
    writer = LocalWriter(target, spoken(), raw=True)
    with pytest.raises(ValueError, match=r"out\.jsonl, line 1"):
        regenerate([{"line": 1, "prompt": "w7"}], writer, path, Settings(max_new_tokens=4))
    assert path.read_text() == line + "\n"


# ---------------------------------------------------------------------------------------------- features, exports


def test_a_feature_cache_that_was_changed_is_named(target, rows, tmp_path):
    folder = tmp_path / "cache"
    cache_features(target, None, rows, (0, 2), folder, shard_bytes=2**14)
    index = json.loads((folder / "features.json").read_text())
    for change in (
        {"lengths": [10**12] * 8},
        {"lengths": "x"},
        {"shards": [[0, 9]]},
        {"shards": [[0, 4], [5, 8]]},
        {"shards": [["0", 8]]},
        {"shards": 7},
        {"width": "x"},
        {"fingerprint": []},
        {"fingerprint": index["fingerprint"] | {"dtype": "x"}},
        {"fingerprint": index["fingerprint"] | {"target_layer_ids": 7}},
    ):
        (folder / "features.json").write_text(json.dumps(index | change))
        with pytest.raises(ValueError, match="cache"):
            FeatureCache(folder).features([0])
    for text in (NESTED, "[]", "", "\x1b"):
        (folder / "features.json").write_text(text)
        with pytest.raises(ValueError, match=r"features\.json: not"):
            cache_features(target, None, rows, (0, 2), folder)
    (folder / "features.json").write_text(json.dumps(index))
    shard = folder / "features-000000.safetensors"
    features = load_file(shard)["features"]
    for wrong in (features[:-1].clone(), features[:, 1:].clone(), features.float(), features[None].clone()):
        save_file({"features": wrong}, shard)
        with pytest.raises(ValueError, match=r"features-000000\.safetensors must hold features"):
            FeatureCache(folder).features([0])
    for damaged in ({"x": features},):
        save_file(damaged, shard)
        with pytest.raises(ValueError, match=r"features-000000\.safetensors is damaged"):
            FeatureCache(folder).features([0])


@pytest.mark.parametrize(
    "config",
    [NESTED, "[]", '{"architectures": 5}', '{"architectures": "abc"}', '{"architectures": [1]}', "", " " * (2**24 + 1)],
    ids=lambda config: config[:24],
)
def test_an_export_names_a_targets_config_that_cannot_be_read(config, pair_dir, tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(config)
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"target/config\.json"):
        export(pair_dir / "draft", tmp_path / "out", "speculators", target=str(tmp_path / "target"))
    assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    tracemalloc.stop()
    assert not (tmp_path / "out").exists()
