"""Weights of unknown origin load, or are refused with their file's name before anything is allocated for them."""

import contextlib
import json
import os
import struct
from pathlib import Path

import pytest
import torch
from checkpoints import SECONDS, load_in_child, published, save_drafter
from draft_variants import random_tensors
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from process import python
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash import DraftConfig, load_draft

INDEX = "model.safetensors.index.json"


def split(path: Path) -> tuple[dict, bytes]:
    """Return the header and the data of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(header: dict | str, data: bytes, length: int | None = None) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def changed_header(folder: Path, name: str, **changes) -> bytes:
    header, data = split(folder / "model.safetensors")
    header[name] |= changes
    return join(header, data)


def hostile_files(folder: Path) -> dict[str, bytes]:
    """Files that must be refused, by what is wrong with them."""
    header, data = split(folder / "model.safetensors")
    text = json.dumps(header)
    name, entry = "norm.weight", header["norm.weight"]
    start, end = entry["data_offsets"]
    twice = text[:-1] + f', "{name}": {json.dumps(entry)}}}'
    return {
        "99 MB of spaces": join(text + " " * 99_000_000, data),
        "a header longer than the file": join(text, data, 2**63),
        "a header of all bytes": join(text, data, 2**64 - 1),
        "nested brackets": join("[" * 100_000, data),
        "nested metadata": join('{"__metadata__": ' + "[" * 100_000 + "]" * 100_000 + "}", data),
        "a tensor twice": join(twice, data),
        "a list": join("[]", data),
        "an entry that is a list": join(header | {name: []}, data),
        "no shape": join(header | {name: {"dtype": "F32", "data_offsets": [start, end]}}, data),
        "a negative size": changed_header(folder, name, shape=[-64]),
        "a size of 2^62": changed_header(folder, name, shape=[2**62, 4]),
        "a size of 10^400": changed_header(folder, name, shape=[10**400]),
        "a size that is text": changed_header(folder, name, shape=["64"]),
        "a size that is a fraction": changed_header(folder, name, shape=[64.0]),
        "a million sizes": changed_header(folder, name, shape=[1] * 300_000),
        "more bytes than the shape": changed_header(folder, name, shape=[63]),
        "no elements": changed_header(folder, name, shape=[0]),
        "offsets backward": changed_header(folder, name, data_offsets=[end, start]),
        "offsets past the end": changed_header(folder, name, data_offsets=[start + 2**40, end + 2**40]),
        "negative offsets": changed_header(folder, name, data_offsets=[-256, 0]),
        "one offset": changed_header(folder, name, data_offsets=[start]),
        "the bytes of another tensor": changed_header(
            folder, name, data_offsets=header["hidden_norm.weight"]["data_offsets"]
        ),
        "an unknown type": changed_header(folder, name, dtype="F13\x1b[2J"),
        "a type that is no text": changed_header(folder, name, dtype=["F32"]),
        "integers": changed_header(folder, name, dtype="I32"),
        "more data": join(header, data + b"\0"),
        "less data": join(header, data[:-1]),
        "no data": join(header, b""),
        "half a header": (folder / "model.safetensors").read_bytes()[:100],
        "nothing": b"",
        "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        "a name of 500,000 characters": join(header | {"x" * 500_000: entry}, data),
        "a layer of 10^9": join(json.dumps(header).replace("layers.0.", "layers.1000000000."), data),
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
        assert message.startswith(("/model.safetensors: ", ": tensor ", ": unknown tensors: ")), (name, message)
        assert len(message) < 1000
        assert "\x1b" not in message
        assert seconds < SECONDS, (name, seconds)


def hostile_indexes(folder: Path) -> dict[str, tuple[str, str]]:
    """Indexes that must be refused, and the error's type."""
    name = "model-00001-of-00001.safetensors"
    return {
        "a shard name of 10,000 characters": (json.dumps({"weight_map": {"a": "x" * 10_000}}), "ValueError"),
        "a shard name of 300 characters": (json.dumps({"weight_map": {"a": "x" * 300}}), "ValueError"),
        "a shard name with a null": (json.dumps({"weight_map": {"a": "x\0.safetensors"}}), "ValueError"),
        "a shard in the folder above": (json.dumps({"weight_map": {"a": "../good/model.safetensors"}}), "ValueError"),
        "a shard with a full path": (json.dumps({"weight_map": {"a": "/etc/passwd"}}), "ValueError"),
        "the folder above": (json.dumps({"weight_map": {"a": ".."}}), "ValueError"),
        "this folder": (json.dumps({"weight_map": {"a": "."}}), "ValueError"),
        "no name": (json.dumps({"weight_map": {"a": ""}}), "ValueError"),
        "a shard name with escapes": (json.dumps({"weight_map": {"a": "\x1b[2J.safetensors"}}), "FileNotFoundError"),
        "ten thousand shards": (json.dumps({"weight_map": {f"t{i}": f"{i}" for i in range(10_000)}}), "ValueError"),
        "a pipe": (json.dumps({"weight_map": {"a": "pipe"}}), "FileNotFoundError"),
        "a loop of links": (json.dumps({"weight_map": {"a": "loop"}}), "FileNotFoundError"),
        "a device": (json.dumps({"weight_map": {"a": "zero"}}), "FileNotFoundError"),
        "a map that is a list": (json.dumps({"weight_map": [name]}), "ValueError"),
        "shards that are numbers": (json.dumps({"weight_map": {"a": 1}}), "ValueError"),
        "nested brackets": ('{"weight_map": ' + "[" * 100_000, "ValueError"),
        "a tensor twice": (f'{{"weight_map": {{"a": "{name}", "a": "{name}"}}}}', "ValueError"),
        "two megabytes": (json.dumps({"weight_map": {"a": name}}) + " " * 2**21, "ValueError"),
    }


def test_hostile_indexes_are_refused_within_a_second_and_50_mb(tmp_path):
    good, folders = save_drafter(tmp_path / "good"), []
    indexes = hostile_indexes(good)
    for name, (text, _) in indexes.items():
        folder = save_drafter(tmp_path / name)
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        (folder / INDEX).write_text(text)
        os.mkfifo(folder / "pipe")
        (folder / "loop").symlink_to("loop")
        (folder / "zero").symlink_to("/dev/zero")
        folders.append(folder)
    for (name, (_, wanted)), result in zip(indexes.items(), load_in_child(good, folders), strict=True):
        kind, message, seconds = result
        assert kind == wanted, (name, kind, message)
        assert "index.json" in message or "shard" in message
        assert len(message) < 500
        assert "\x1b" not in message
        assert seconds < SECONDS, (name, seconds)


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


# ---------------------------------------------------------------------------------------------- cut while loading

CUT = """
import shutil, sys, threading, time
from pathlib import Path
from dflash import load_draft
source, folder = map(Path, sys.argv[1:3])
load_draft(source)
begun = time.perf_counter()
load_draft(source)
duration = time.perf_counter() - begun
for attempt in range(24):
    for replaced in (False, True):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        path = folder / "model.safetensors"

        def cut():
            time.sleep(duration * attempt / 20)
            size = path.stat().st_size
            with open(path, "r+b") as file:
                file.truncate(size // 3)
                if replaced:
                    file.truncate(size)

        thread = threading.Thread(target=cut)
        thread.start()
        try:
            load_draft(folder)
            result = "loaded"
        except ValueError as error:
            result = str(error).replace(str(folder), "")
        thread.join()
        print(result, flush=True)
"""


def test_a_file_that_is_cut_while_it_is_loaded_is_named(tmp_path):
    config = published(hidden_size=1024, intermediate_size=2048)
    source = tmp_path / "source"
    save_drafter(source, config)
    save_file(random_tensors(DraftConfig.from_config(config)), source / "model.safetensors")
    done = python(CUT, source, tmp_path / "copy")
    assert done.returncode == 0, done.stderr
    results = done.stdout.splitlines()
    assert len(results) == 48
    changed = "/model.safetensors: the file was changed or cut while it was loaded; load it again"
    broken = "/model.safetensors: not a complete safetensors file"
    assert all(result.startswith((changed, broken, "loaded")) for result in results), set(results)
    assert changed in results  # some of the cuts came between the header and the last tensor


def test_a_file_that_is_replaced_while_it_is_loaded_is_named(tmp_path, monkeypatch):
    from dflash.drafter import checkpoint

    folder = save_drafter(tmp_path)
    build = checkpoint.Drafter

    def build_and_replace(*args, **kwargs):
        path = folder / "model.safetensors"
        path.with_name("new").write_bytes(path.read_bytes())
        path.with_name("new").replace(path)
        return build(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "Drafter", build_and_replace)
    with pytest.raises(ValueError, match=r"model\.safetensors: the file was changed or cut while it was loaded"):
        load_draft(folder)


# ---------------------------------------------------------------------------------------------- random damage


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory):
    return save_drafter(tmp_path_factory.mktemp("drafter"))


@pytest.mark.long
@examples(40)
@given(st.data())
def test_a_damaged_file_loads_the_same_tensors_or_is_refused(drafter_folder, data):
    good = drafter_folder / "good"
    if not good.exists():
        (drafter_folder / "model.safetensors").rename(good)
    content = bytearray(good.read_bytes())
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, header_bytes - 1))
        kind = data.draw(st.sampled_from(["replace", "insert", "delete", "digit"]))
        if kind == "delete":
            del content[at]
        elif kind == "insert":
            content.insert(at, data.draw(st.integers(0, 255)))
        else:
            content[at] = (
                data.draw(st.sampled_from(b"0123456789")) if kind == "digit" else data.draw(st.integers(0, 255))
            )
    path = drafter_folder / "model.safetensors"
    path.write_bytes(content)
    try:
        loaded, message = load_draft(drafter_folder).state_dict(), ""
    except ValueError as error:
        loaded, message = {}, str(error)
    assert len(message) < 2000
    with contextlib.suppress(SafetensorError):  # the library is stricter about metadata
        theirs = load_file(path)
        assert all(same_bits(tensor, theirs[name]) for name, tensor in loaded.items())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_every_stored_type_loads_as_safetensors_reads_it(tmp_path, stored, dtype):
    folder = save_drafter(tmp_path)
    tensors = {name: tensor.to(stored) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_draft(folder, dtype=dtype).state_dict()
    assert all(torch.equal(loaded[name], tensor.to(dtype or stored)) for name, tensor in tensors.items())
