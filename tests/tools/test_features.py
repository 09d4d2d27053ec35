"""Test that cached features are the target's, complete or absent, and never of another target."""

import os

import datasets
import pytest
import safetensors.torch
import torch
from families import make_target

from dflash_tools.train.features import FeatureCache, cache_features, cache_size, fingerprint

TAPS = (0, 2)


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 17, 1, 9, 12, 3, 16)
    ids = [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]
    return datasets.Dataset.from_list([{"input_ids": row, "loss_mask": [1] * len(row)} for row in ids])


@pytest.fixture
def compute(target):
    """Computes features with transformers, and counts the rows that were requested."""

    def features(ids):
        features.rows += ids.shape[0]
        states = target(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        return torch.cat([states[tap + 1] for tap in TAPS], -1)

    features.rows = 0
    return features


SMALL = {"batch_tokens": 20, "shard_bytes": 20 * 128 * 4, "dtype": torch.float32}


def test_features_are_the_targets(target, rows, compute, tmp_path):
    seen = []
    show = lambda rows, total, _: seen.append((rows, total))  # noqa: E731
    cache = cache_features(target, compute, rows, TAPS, tmp_path, **SMALL, progress=show)
    assert len(list(tmp_path.glob("*.safetensors"))) == 5
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1, "all files should have the same mode"
    assert seen[-1] == (7, 7)
    assert len(cache) == 7
    for chosen in ([1], [4, 2, 6, 0], [5, 5]):
        got = cache.features(chosen)
        longest = max(len(rows[row]["input_ids"]) for row in chosen)
        assert got.shape == (len(chosen), longest, 2 * 64)
        for row, features in zip(chosen, got, strict=True):
            ids = rows[row]["input_ids"]
            torch.testing.assert_close(features[: len(ids)], compute(torch.tensor([ids]))[0].detach())
            assert not features[len(ids) :].any()
    half = cache_features(target, None, rows, TAPS, tmp_path / "half")
    assert half.features([3]).dtype == torch.bfloat16
    torch.testing.assert_close(half.features([3]), cache.features([3]).bfloat16())
    assert cache_size(rows, 128, torch.bfloat16) == 63 * 128 * 2


def test_an_interrupted_cache_continues(target, rows, compute, tmp_path):
    whole = cache_features(target, compute, rows, TAPS, tmp_path / "whole", **SMALL)

    def killed(done, *_):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache_features(target, compute, rows, TAPS, tmp_path / "cache", **SMALL, progress=killed)
    with pytest.raises(ValueError, match=r"is incomplete: compute 4 of 5 shards"):
        FeatureCache(tmp_path / "cache")
    compute.rows = 0
    cache = cache_features(target, compute, rows, TAPS, tmp_path / "cache", **{**SMALL, "shard_bytes": 1})
    assert compute.rows == 6, "the complete shard holds one row and is not computed again"
    everything = list(range(7))
    assert torch.equal(cache.features(everything), whole.features(everything))
    compute.rows = 0
    cache_features(target, compute, rows, TAPS, tmp_path / "cache", **SMALL)
    assert compute.rows == 0


def test_processes_share_the_shards(target, rows, compute, tmp_path):
    whole = cache_features(target, compute, rows, TAPS, tmp_path / "whole", **SMALL)
    assert cache_features(target, compute, rows, TAPS, tmp_path / "cache", **SMALL, rank=1, world=2) is None
    assert len(list((tmp_path / "cache").glob("*.safetensors"))) == 2
    # The process that starts late finds some shards done, and still computes its own.
    cache = cache_features(target, compute, rows, TAPS, tmp_path / "cache", **SMALL, rank=0, world=2)
    assert torch.equal(cache.features([0, 3, 6]), whole.features([0, 3, 6]))


def test_a_cache_of_something_else_is_refused(target, rows, compute, tmp_path):
    cache = cache_features(target, compute, rows, TAPS, tmp_path, **SMALL)
    assert cache.fingerprint == fingerprint(target, rows, TAPS, torch.float32)
    other = make_target("qwen3")
    with torch.no_grad():
        other.get_input_embeddings().weight[3, 5] += 1e-3
    other_scale = make_target("qwen3")  # the same weights, another config
    other_scale.config.attention_bias = True
    other_rows = rows.select([1, 0, 2, 3, 4, 5, 6])
    compute.rows = 0
    for changed, message in (
        ((other, compute, rows, TAPS), "another target's"),
        ((other_scale, compute, rows, TAPS), "another target's"),
        ((target, compute, other_rows, TAPS), "of other rows"),
        ((target, compute, rows, (2, 0)), r"target_layer_ids \[0, 2\], not \[2, 0\]"),
    ):
        with pytest.raises(ValueError, match=message):
            cache_features(*changed, tmp_path, **SMALL)
    with pytest.raises(ValueError, match="dtype float32, not bfloat16"):
        FeatureCache(tmp_path, fingerprint(target, rows, TAPS, torch.bfloat16))
    assert compute.rows == 0
    renamed = make_target("qwen3")
    renamed.config._name_or_path, renamed.config.eos_token_id, renamed.config.use_cache = "elsewhere", 5, False
    assert fingerprint(renamed, rows, TAPS, torch.float32) == cache.fingerprint
    assert FeatureCache(tmp_path, cache.fingerprint).target_layer_ids == TAPS
    with pytest.raises(FileNotFoundError, match="is not a feature cache"):
        FeatureCache(tmp_path / "none")
    with pytest.raises(ValueError, match=r"features are stored as .*, got torch\.int8"):
        fingerprint(target, rows, TAPS, torch.int8)


def test_a_shard_that_cannot_be_written_leaves_the_others_intact(target, rows, compute, tmp_path, monkeypatch):
    write = safetensors.torch.save_file

    def full(tensors, path, metadata=None):
        if "000002" in str(path):
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(tensors, path)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=r"features-000002.* could not be written .*No space left on device"):
        cache_features(target, compute, rows, TAPS, tmp_path, **SMALL)
    monkeypatch.undo()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["features-000000.safetensors", "features-000001.safetensors", "features.json"]
    assert cache_features(target, compute, rows, TAPS, tmp_path, **SMALL) is not None


def test_a_damaged_cache_is_named(target, rows, tmp_path):
    cache_features(target, None, rows, TAPS, tmp_path, **SMALL)
    index = (tmp_path / "features.json").read_text()
    for text in ("[]", "", '{"fingerprint": 7}'):
        (tmp_path / "features.json").write_text(text)
        with pytest.raises(ValueError, match=r"features\.json: not"):
            cache_features(target, None, rows, TAPS, tmp_path, **SMALL)
    (tmp_path / "features.json").write_text(index)
    os.truncate(tmp_path / "features-000000.safetensors", 999)
    with pytest.raises(ValueError, match=r"features-000000\.safetensors is damaged"):
        FeatureCache(tmp_path).features([*range(7)])
