"""Cache the target's features on disk, so that training need not run the target: `cache_features`.

A cache is a folder of safetensors shards and ``features.json``. A shard holds the features of consecutive rows;
``features.json`` names the target, the rows and the taps.

A cache is large: ``taps * hidden`` numbers per token (`cache_size`). Five taps of a target of width 2560 take 25.6 kB
per token in bf16. Without a cache, training computes the features itself.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...files import parse_json, save_tensors, write_atomically
from ...targets import describe_config, text_config, unwrap
from ...terminal import printable
from ..model import TargetFeatures

__all__ = ["FeatureCache", "FeatureProgress", "cache_features", "cache_size", "fingerprint"]

_INDEX = "features.json"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_STORED = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}  # names in safetensors
_OPEN_SHARDS = 32
_READ_ROWS = 1024


@dataclass
class FeatureProgress:
    """Progress of `cache_features`: rows done, rows in total, and tokens and seconds of this call."""

    rows: int
    total_rows: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens computed per second by this call."""
        return self.tokens / self.seconds if self.seconds else 0.0


def fingerprint(target: nn.Module, rows: Any, layer_ids: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    """Return what the features depend on: digests of the target and of the rows' tokens, the taps and the dtype.

    Reads every weight once, which takes about a second per gigabyte.

    Args:
        target: a causal language model of transformers.
        rows: a ``datasets.Dataset`` with ``input_ids``.
        layer_ids: tapped layers, in the drafter's order.
        dtype: dtype of the stored features.
    """
    target, weights, tokens = unwrap(target), hashlib.sha256(), hashlib.sha256()
    weights.update(describe_config(target).encode())
    for name, tensor in sorted(target.state_dict().items()):
        weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    for ids in _ids(rows):
        tokens.update(
            len(ids).to_bytes(8, "little") + torch.tensor(ids, dtype=torch.int64, device="cpu").numpy().tobytes()
        )
    return {
        "target": weights.hexdigest(),
        "rows": tokens.hexdigest(),
        "target_layer_ids": list(layer_ids),
        "dtype": _name(dtype),
    }


def cache_size(rows: Any, width: int, dtype: torch.dtype) -> int:
    """Return the size in bytes of a cache of ``rows``, at ``width`` numbers per token."""
    return sum(map(len, _ids(rows))) * width * dtype.itemsize


def cache_features(  # noqa: PLR0913 - public, each documented
    target: nn.Module,
    compute: Callable[[Tensor], Tensor] | None,
    rows: Any,
    layer_ids: Sequence[int],
    folder: str | os.PathLike,
    *,
    dtype: torch.dtype = torch.bfloat16,
    batch_tokens: int = 8192,
    shard_bytes: int = 2**30,
    rank: int = 0,
    world: int = 1,
    progress: Callable[[FeatureProgress], None] | None = None,
) -> FeatureCache | None:
    """Compute the missing shards of a feature cache for ``rows``, and open it.

    A shard is either complete or absent, so an interrupted run loses only the shard that it was computing.

    Args:
        target: the model.
        compute: right-padded ids ``[batch, length]`` on the target's device to features ``[batch, length, taps *
            hidden]``; None runs the target (`dflash.train.model.TargetFeatures`).
        rows: a ``datasets.Dataset`` with ``input_ids``.
        layer_ids: tapped layers, in the drafter's order.
        folder: created if it is missing.
        dtype: bfloat16, float16 or float32.
        batch_tokens: tokens per forward pass, padding included. A longer row gets its own pass.
        shard_bytes: bytes per shard, which is assembled in memory. A longer row gets its own shard.
        rank: number of this process. It computes the missing shards with number ``rank`` modulo ``world``.
        world: number of processes that share the work.
        progress: called after every forward pass.

    Returns:
        The cache; None if shards of other processes are still missing.

    Raises:
        ValueError: the folder is a cache of another target, other rows, other taps or another dtype, or the disk is
            too small. Nothing is computed in either case.
        OSError: a shard could not be written; the others are complete.
    """
    # 1. Describe the cache
    folder, target = Path(folder), unwrap(target)
    compute = _target_features(target, layer_ids) if compute is None else compute
    width = len(layer_ids) * text_config(target).hidden_size
    lengths = [len(ids) for ids in _ids(rows)]
    if not lengths or not min(lengths):
        raise ValueError("features need rows of at least one token each")
    index = {
        "fingerprint": fingerprint(target, rows, layer_ids, dtype),
        "width": width,
        "shards": _shard_rows(lengths, max(1, shard_bytes // (width * dtype.itemsize))),
        "lengths": lengths,
    }
    # 2. Continue an earlier cache of the same features
    missing = _missing_shards(folder, index)
    left = [sum(lengths[slice(*index["shards"][number])]) for number in missing]
    _check_room(folder, sum(left) * width * dtype.itemsize, len(lengths))
    if missing and not (folder / _INDEX).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / _INDEX, lambda path: path.write_text(json.dumps(index)))
    # 3. Compute this process's share of the missing shards
    device = target.get_input_embeddings().weight.device
    rows_left = sum(end - start for start, end in (index["shards"][number] for number in missing))
    state = FeatureProgress(len(lengths) - rows_left, len(lengths), 0, 0.0)
    began = time.perf_counter()

    def count(rows: int, tokens: int) -> None:
        state.rows, state.tokens, state.seconds = state.rows + rows, state.tokens + tokens, time.perf_counter() - began
        if progress is not None:
            progress(state)

    for number in missing:
        if number % world == rank:
            ids = rows[slice(*index["shards"][number])]["input_ids"]
            features = _compute_shard(compute, ids, width, dtype, batch_tokens, device, count)
            _write(_shard(folder, number), functools.partial(save_tensors, {"features": features}))
    return None if _missing_shards(folder, index) else FeatureCache(folder)


def _target_features(target: nn.Module, layer_ids: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return a function that runs the target on token ids and gives its features."""
    tapped = TargetFeatures(target, tuple(layer_ids))
    return lambda ids: tapped(ids)[0]


def _missing_shards(folder: Path, index: dict[str, Any]) -> list[int]:
    """Return the shards to compute. ``index`` takes the shard layout of an earlier run, if there is one.

    Raises:
        ValueError: the folder is a cache of something else.
    """
    if (folder / _INDEX).is_file():
        have = _read(folder)
        _compare(folder, have["fingerprint"], index["fingerprint"])
        if have["lengths"] != index["lengths"] or have["width"] != index["width"]:
            raise ValueError(f"{folder} holds features of other rows: name another folder, or remove it")
        index["shards"] = have["shards"]
    return [number for number in range(len(index["shards"])) if not _shard(folder, number).is_file()]


def _compute_shard(
    compute: Callable[[Tensor], Tensor],
    ids: Sequence[Sequence[int]],
    width: int,
    dtype: torch.dtype,
    batch_tokens: int,
    device: torch.device,
    count: Callable[[int, int], None],
) -> Tensor:
    """Return the features of some rows, concatenated: ``[tokens, width]``. ``count`` gets rows and tokens."""
    lengths = list(map(len, ids))
    offsets = [0, *accumulate(lengths)]
    features = torch.zeros(offsets[-1], width, dtype=dtype, device="cpu")
    for batch in _batches(lengths, batch_tokens):
        # 1. Run the target over rows of similar length
        padded = nn.utils.rnn.pad_sequence(
            [torch.tensor(ids[row], dtype=torch.int64, device="cpu") for row in batch], batch_first=True
        ).to(device)
        with torch.no_grad():
            out = compute(padded)
        if tuple(out.shape) != (*padded.shape, width):
            raise ValueError(f"features must be [batch, length, {width}], compute gave {list(out.shape)}")
        # 2. Copy them into place without the padding
        for row, found in zip(batch, out.to("cpu", dtype), strict=True):
            features[offsets[row] : offsets[row + 1]] = found[: lengths[row]]
        count(len(batch), sum(lengths[row] for row in batch))
    return features


class FeatureCache:
    """A complete cache, open for reading.

    Args:
        folder: the folder that `cache_features` wrote.
        expected: a `fingerprint` to compare with; None skips the comparison.

    Raises:
        FileNotFoundError: the folder is not a feature cache.
        ValueError: shards are missing, or the cache is of something else. The message names the difference.
    """

    def __init__(self, folder: str | os.PathLike, expected: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        index = _read(self.folder)
        if expected is not None:
            _compare(self.folder, index["fingerprint"], expected)
        shards = self._shards = index["shards"]
        missing = sum(not _shard(self.folder, number).is_file() for number in range(len(shards)))
        if missing:
            raise ValueError(
                f"{self.folder} is incomplete: {missing} of {len(shards)} shards are missing; compute them first"
            )
        self.fingerprint: dict[str, Any] = index["fingerprint"]
        self.target_layer_ids = tuple(self.fingerprint["target_layer_ids"])
        self.width, self.lengths = index["width"], index["lengths"]
        self.dtype = _DTYPES[self.fingerprint["dtype"]]
        self._places: list[tuple[int, int]] = []  # per row, its shard and first token there
        for number, (start, end) in enumerate(shards):
            offsets = accumulate(self.lengths[start:end], initial=0)
            self._places += [(number, offset) for _, offset in zip(range(start, end), offsets, strict=False)]
        self._open = functools.lru_cache(_OPEN_SHARDS)(self._open_shard)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    def check(self, lengths: Sequence[int], target_layer_ids: Sequence[int]) -> None:
        """Raise ``ValueError`` unless the cache has these row lengths and these taps."""
        if list(self.lengths) != list(lengths):
            raise ValueError(f"{self.folder} holds features of other rows")
        if tuple(self.target_layer_ids) != tuple(target_layer_ids):
            raise ValueError(
                f"{self.folder} holds features of layers {list(self.target_layer_ids)}, the drafter taps "
                f"{list(target_layer_ids)}"
            )

    def _open_shard(self, number: int) -> Any:
        from safetensors import SafetensorError, safe_open

        path = _shard(self.folder, number)
        wanted = [sum(self.lengths[slice(*self._shards[number])]), self.width]
        try:
            features = safe_open(path, framework="pt").get_slice("features")
            found = features.get_shape()
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): remove it, and it is computed again") from error
        if found != wanted or features.get_dtype() != _STORED[self.dtype]:
            raise ValueError(f"{path} must hold features {wanted}, got {found}: remove it, and it is computed again")
        return features

    def features(self, indices: Sequence[int]) -> Tensor:
        """Return ``[batch, length, taps * hidden]`` of some rows, on the CPU, padded with 0 on the right."""
        found = []
        for row in indices:
            number, start = self._places[row]
            found.append(self._open(number)[start : start + self.lengths[row]])
        return nn.utils.rnn.pad_sequence(found, batch_first=True)


def _ids(rows: Any) -> Any:
    for start in range(0, len(rows), _READ_ROWS):
        yield from rows[start : start + _READ_ROWS]["input_ids"]


def _name(dtype: torch.dtype) -> str:
    for name, known in _DTYPES.items():
        if dtype == known:
            return name
    raise ValueError(f"features are stored as {', '.join(_DTYPES)}, got {dtype}")


def _shard_rows(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Split the rows into ranges ``[start, end)`` of up to ``most`` tokens. A longer row gets its own range."""
    shards, tokens = [[0, 0]], 0
    for row, length in enumerate(lengths):
        if tokens and tokens + length > most:
            shards.append([row, row])
            tokens = 0
        shards[-1][1], tokens = row + 1, tokens + length
    return shards


def _batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Group rows of similar length, longest first, into batches of up to ``most`` tokens with padding."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= most:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _shard(folder: Path, number: int) -> Path:
    return folder / f"features-{number:06d}.safetensors"


def _read(folder: Path) -> dict[str, Any]:
    path = folder / _INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a feature cache: {_INDEX} is missing")
    index = parse_json(path.read_bytes(), printable(path))
    if not _is_index(index):
        raise ValueError(f"{printable(path)}: not what cache_features writes: remove the folder")
    return index


def _is_index(index: Any) -> bool:
    """True if ``index`` has the types and sizes of what `cache_features` writes."""
    if not isinstance(index, dict) or not isinstance(index.get("fingerprint"), dict):
        return False
    lengths, shards, width = (index.get(name) for name in ("lengths", "shards", "width"))
    taps, dtype = (index["fingerprint"].get(name) for name in ("target_layer_ids", "dtype"))
    if not isinstance(lengths, list) or not all(type(length) is int and length > 0 for length in lengths):
        return False
    if not isinstance(shards, list) or not all(isinstance(rows, list) and len(rows) == 2 for rows in shards):
        return False
    edges = [0, *(end for _, end in shards)]
    return (
        all(type(end) is int for end in edges)
        and [start for start, _ in shards] == edges[:-1]
        and edges == sorted(edges)
        and edges[-1] == len(lengths)
        and type(width) is int
        and isinstance(taps, list)
        and dtype in list(_DTYPES)
    )


def _compare(folder: Path, have: dict[str, Any], wanted: dict[str, Any]) -> None:
    what = {"target": "another target's", "rows": "of other rows"}
    for key, value in wanted.items():
        if have.get(key) != value:
            why = what.get(key, f"{key} {have.get(key)}, not {value}")
            raise ValueError(f"{folder} holds features that are {why}: name another folder, or remove it")


def _check_room(folder: Path, needed: int, rows: int) -> None:
    parent = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ValueError(
            f"features of {rows} rows need {needed / 1e9:.1f} GB more, and {parent} has {free / 1e9:.1f} GB free: "
            "train without a cache, or on fewer rows"
        )


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file atomically."""
    try:
        write_atomically(path, write)
    except Exception as error:
        raise OSError(
            f"{path} could not be written ({' '.join(str(error).split())}); the files next to it are complete"
        ) from error
