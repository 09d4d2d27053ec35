"""Weights of unknown origin load, or are refused with their file's name before anything is allocated for them."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from checkpoints import SECONDS, load_in_child, save_drafter
from safetensors.torch import load_file, save_file

from dflash import load_draft

pytestmark = pytest.mark.linux  # reads /proc

INDEX = "model.safetensors.index.json"


def join(header: dict | str, data: bytes, length: int | None = None) -> bytes:
    """Return a safetensors file."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def hostile_files(folder: Path) -> dict[str, bytes]:
    """Files that must be refused, by what is wrong with them."""
    content = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    text, name = json.dumps(header), "norm.weight"
    start, end = header[name]["data_offsets"]
    changed = lambda **changes: join(header | {name: header[name] | changes}, data)  # noqa: E731
    return {
        "a header longer than the file": join(text, data, 2**63),
        "nested brackets": join("[" * 100_000, data),
        "a list": join("[]", data),
        "no shape": join(header | {name: {"dtype": "F32", "data_offsets": [start, end]}}, data),
        "a size of 2^62": changed(shape=[2**62, 4]),
        "a size of 10^400": changed(shape=[10**400]),
        "more bytes than the shape": changed(shape=[63]),
        "offsets past the end": changed(data_offsets=[start + 2**40, end + 2**40]),
        "the bytes of another tensor": changed(data_offsets=header["hidden_norm.weight"]["data_offsets"]),
        "an unknown type": changed(dtype="F13\x1b[2J"),
        "integers": changed(dtype="I32"),
        "less data": join(header, data[:-1]),
        "nothing": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "a name of 500,000 characters": join(header | {"x" * 500_000: header[name]}, data),
        "a layer of 10^9": join(text.replace("layers.0.", "layers.1000000000."), data),
        "a pickle": b"\x80\x02c__builtin__\neval\n.",
    }


def test_hostile_files_are_refused_within_a_second_and_50_mb(tmp_path):
    good, folders = save_drafter(tmp_path / "good"), []
    files = hostile_files(good)
    for name, content in files.items():
        folders.append(save_drafter(tmp_path / name))
        (folders[-1] / "model.safetensors").write_bytes(content)
    for name, (kind, message, seconds) in zip(files, load_in_child(good, folders), strict=True):
        assert kind == "ValueError", (name, kind, message)
        begins = ("/model.safetensors: ", ": tensor ", ": unknown tensors: ", ": weights in few bits need scales")
        assert message.startswith(begins), (name, message)
        assert len(message) < 1000
        assert "\x1b" not in message
        assert seconds < SECONDS, (name, seconds)


INDEXES = {
    "a shard with a full path": ({"a": "/etc/passwd"}, "not a file in the same folder"),
    "the folder above": ({"a": ".."}, "not a file in the same folder"),
    "a shard name with escapes": ({"a": "\x1b[2J.safetensors"}, r"shard \\x1b\[2J.safetensors is missing"),
    "a device": ({"a": "zero"}, "shard zero is missing"),
}


@pytest.mark.parametrize("name", INDEXES)
def test_a_hostile_index_is_refused(tmp_path, name):
    folder, (mapping, message) = save_drafter(tmp_path), INDEXES[name]
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": mapping}))
    (folder / "zero").symlink_to("/dev/zero")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_draft(folder)


def test_config_and_weights_may_be_links_as_in_the_cache_of_the_hub(tmp_path):
    blobs, snapshot = save_drafter(tmp_path / "blobs"), tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / file.name)
    expected = load_draft(blobs).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load_draft(snapshot).state_dict().items())


@pytest.mark.parametrize("target", ["/dev/zero", "/etc/passwd", "/proc/self/environ", "missing", "config.json"])
def test_links_to_other_files_are_refused_without_showing_what_is_in_them(tmp_path, target):
    os.environ["A_SECRET"] = "hunter2"
    folder = save_drafter(tmp_path)
    for name in ("config.json", "model.safetensors"):
        folder = save_drafter(tmp_path)
        (folder / name).unlink()
        (folder / name).symlink_to(target)
        with pytest.raises((ValueError, FileNotFoundError), match=name) as caught:
            load_draft(folder)
        assert not {"root:", "hunter2"} & set(str(caught.value).split())
        (folder / name).unlink()


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    folder = save_drafter(tmp_path)

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(ValueError, match=r"config\.json: cannot be read: Permission denied"):
        load_draft(folder)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_every_stored_type_loads_as_safetensors_reads_it(tmp_path, stored, dtype):
    folder = save_drafter(tmp_path)
    tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_draft(folder, dtype=dtype).state_dict()
    assert all(torch.equal(loaded[name], tensor.to(dtype or stored)) for name, tensor in tensors.items())
