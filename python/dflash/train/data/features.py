"""The target's features on disk, so that training need not run the target: :func:`cache_features`.

A cache is a folder of safetensors shards, each with the features of some consecutive rows, and ``features.json``, which
says of which target, rows and taps they are. It is large, ``taps * hidden`` numbers a token (:func:`cache_size`): five
taps of a target 2560 wide are 25.6 kB a token in bf16. Where that does not fit, training computes the features itself.
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

from ...files import save_tensors, whole_file
from ...target import describe_config, text_config, unwrap
from ..model import TargetFeatures

__all__ = ["FeatureCache", "FeatureProgress", "cache_features", "cache_size", "fingerprint"]

_INDEX = "features.json"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_OPEN_SHARDS = 32
_READ_ROWS = 1024


@dataclass
class FeatureProgress:
    """How far :func:`cache_features` is: rows done and in all, tokens of this call, seconds of this call."""

    rows: int
    total_rows: int
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def fingerprint(target: nn.Module, rows: Any, layer_ids: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    """What features are a function of: digests of the target (weights, config) and of the rows' tokens, taps and dtype.

    Reads every weight once, which takes about a second a gigabyte.

    Args:
        target: a causal language model of transformers.
        rows: a ``datasets.Dataset`` with ``input_ids``.
        layer_ids: tapped layers, in the drafter's order.
        dtype: in which the features are stored.
    """
    target, weights, tokens = unwrap(target), hashlib.sha256(), hashlib.sha256()
    weights.update(describe_config(target).encode())
    for name, tensor in sorted(target.state_dict().items()):
        weights.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        weights.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    for ids in _ids(rows):
        tokens.update(len(ids).to_bytes(8, "little") + torch.tensor(ids, dtype=torch.int64).numpy().tobytes())
    return {
        "target": weights.hexdigest(),
        "rows": tokens.hexdigest(),
        "target_layer_ids": list(layer_ids),
        "dtype": _name(dtype),
    }


def cache_size(rows: Any, width: int, dtype: torch.dtype) -> int:
    """Bytes of a cache of ``rows``, at ``width`` numbers a token."""
    return sum(map(len, _ids(rows))) * width * dtype.itemsize


def cache_features(
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
    """Compute what is missing of a cache of ``rows``' features, and open it.

    A shard counts once it is whole, so that a run that was stopped loses the shard it was at.

    Args:
        target: the model.
        compute: right-padded ids ``[batch, length]`` on the target's device to features ``[batch, length, taps *
            hidden]``; None runs the target (:class:`dflash.train.model.TargetFeatures`).
        rows: a ``datasets.Dataset`` with ``input_ids``.
        layer_ids: tapped layers, in the drafter's order.
        folder: made if need be.
        dtype: bfloat16, float16 or float32.
        batch_tokens: of one forward pass, padding counted; a longer row stands alone.
        shard_bytes: of a shard, which is put together in memory; a longer row is a shard of its own.
        rank, world: this process computes the missing shards whose number is ``rank`` modulo ``world``.
        progress: called after every forward pass.

    Returns:
        The cache; None if shards of other processes are still missing.

    Raises:
        ValueError: the folder is a cache of another target, other rows, taps or another dtype, or the disk has not
            enough room; nothing is computed then. OSError: a shard could not be written; the others are whole.
    """
    folder, target = Path(folder), unwrap(target)
    if compute is None:
        tapped = TargetFeatures(target, tuple(layer_ids))
        compute = lambda ids: tapped(ids)[0]  # noqa: E731
    width = len(layer_ids) * text_config(target).hidden_size
    lengths = [len(ids) for ids in _ids(rows)]
    if not lengths or not min(lengths):
        raise ValueError("features need rows of at least one token each")
    index = {
        "fingerprint": fingerprint(target, rows, layer_ids, dtype),
        "width": width,
        "shards": _plan(lengths, max(1, shard_bytes // (width * dtype.itemsize))),
        "lengths": lengths,
    }
    if (folder / _INDEX).is_file():
        have = _read(folder)
        _compare(folder, have["fingerprint"], index["fingerprint"])
        index["shards"] = have["shards"]
    missing = [number for number in range(len(index["shards"])) if not _shard(folder, number).is_file()]
    tokens = sum(sum(lengths[slice(*index["shards"][number])]) for number in missing)
    _check_room(folder, tokens * width * dtype.itemsize, len(lengths))
    if missing and not (folder / _INDEX).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / _INDEX, lambda path: path.write_text(json.dumps(index)))
    state = FeatureProgress(0, len(lengths), 0, 0.0)
    state.rows = len(lengths) - sum(end - start for start, end in (index["shards"][number] for number in missing))
    began = time.perf_counter()
    for number in (number for number in missing if number % world == rank):
        start, end = index["shards"][number]
        features = torch.zeros(sum(lengths[start:end]), width, dtype=dtype)
        offsets = [0, *accumulate(lengths[start:end])]
        for batch in _batches(lengths[start:end], batch_tokens):
            ids = [torch.tensor(row) for row in rows[[start + place for place in batch]]["input_ids"]]
            padded = nn.utils.rnn.pad_sequence(ids, batch_first=True).to(target.get_input_embeddings().weight.device)
            with torch.no_grad():
                out = compute(padded)
            if tuple(out.shape) != (*padded.shape, width):
                raise ValueError(f"features must be [batch, length, {width}], compute gave {list(out.shape)}")
            for place, row in zip(batch, out.to("cpu", dtype), strict=True):
                features[offsets[place] : offsets[place + 1]] = row[: lengths[start + place]]
            state.rows += len(batch)
            state.tokens += sum(lengths[start + place] for place in batch)
            state.seconds = time.perf_counter() - began
            if progress is not None:
                progress(state)
        _write(_shard(folder, number), functools.partial(save_tensors, {"features": features}))
    return FeatureCache(folder) if all(_shard(folder, n).is_file() for n in range(len(index["shards"]))) else None


class FeatureCache:
    """A whole cache, open for reading.

    Args:
        folder: of :func:`cache_features`.
        expected: a :func:`fingerprint` to hold it against; None trusts it.

    Raises:
        FileNotFoundError: it is no cache. ValueError: it is not whole, or it is of something else; the difference is
            named.
    """

    def __init__(self, folder: str | os.PathLike, expected: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        index = _read(self.folder)
        if expected is not None:
            _compare(self.folder, index["fingerprint"], expected)
        shards = index["shards"]
        missing = sum(not _shard(self.folder, number).is_file() for number in range(len(shards)))
        if missing:
            raise ValueError(
                f"{self.folder} is not whole: {missing} of {len(shards)} shards are missing; go on with it"
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
        return len(self.lengths)

    def _open_shard(self, number: int) -> Any:
        from safetensors import safe_open

        return safe_open(_shard(self.folder, number), framework="pt").get_slice("features")

    def features(self, indices: Sequence[int]) -> Tensor:
        """``[batch, length, taps * hidden]`` of these rows, on the CPU, in the cache's dtype, right-padded with 0."""
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


def _plan(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Consecutive rows ``[start, end)`` of ``most`` tokens or fewer, or one row each."""
    shards, tokens = [[0, 0]], 0
    for row, length in enumerate(lengths):
        if tokens and tokens + length > most:
            shards.append([row, row])
            tokens = 0
        shards[-1][1], tokens = row + 1, tokens + length
    return shards


def _batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Rows of like length together, the longest first, ``most`` tokens a batch with their padding."""
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
        raise FileNotFoundError(f"{folder} is no cache of features: it has no {_INDEX}")
    return json.loads(path.read_text())


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
    """Through a file of another name, so that ``path`` is whole or not there."""
    try:
        whole_file(path, write)
    except Exception as error:
        raise OSError(
            f"{path} could not be written ({' '.join(str(error).split())}); what is beside it is whole"
        ) from error
