"""The target's features: of the running model (`TargetFeatures`), or cached on disk (`cache_features`).

A cache is a folder of safetensors shards, each of consecutive rows, and ``features.json``, which names the target, the
rows and the taps. It takes ``taps * hidden`` numbers per token.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dflash.internals import files, targets

from .batches import group_by_length, pad
from .files import one_line_errors, save_tensors

_INDEX = "features.json"
_DTYPES = ("bfloat16", "float16", "float32")
_OPEN_SHARDS = 32
_READ_ROWS = 1024
# Not cuDNN's, which on an H100 spends 30 ms on a plan for every new length.
_ATTENTIONS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class TargetFeatures:
    """Features of full sequences from the frozen target, with its embeddings and head.

    Runs a structural copy of the model, without the layers after the last tap.

    Args:
        target: a causal language model of transformers that the engine supports.
        layer_ids: tapped layers. The last layer's output is read after the final norm.

    Raises:
        UnsupportedTargetError: the engine does not support the target.
    """

    def __init__(self, target: nn.Module, layer_ids: tuple[int, ...]) -> None:
        self.model = targets.structural_copy(targets.check_target(target, spread=False))
        self.layer_ids = tuple(layer_ids)
        layers, self._taps = targets.find_layers(self.model), targets.tap_(self.model, self.layer_ids)
        if len(layers) - 1 not in self.layer_ids:
            del layers[max(self.layer_ids) + 1 :]
        self._is_recurrent = targets.has_recurrent_layers(self.model)

    @property
    def embedding_weight(self) -> Tensor:
        """The embedding matrix, ``[vocab, hidden]``."""
        return self.model.get_input_embeddings().weight

    def head(self, hidden: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to ``[..., vocab]``, without the model family's logit scaling."""
        return self.model.get_output_embeddings()(hidden)

    @torch.no_grad()
    def __call__(self, input_ids: Tensor) -> Tensor:
        """Return ``[batch, length, taps * hidden]`` of right-padded ids ``[batch, length]``, which need no mask."""
        # Autocast would round the products inside a recurrence, which the target computes in float32.
        exact = torch.autocast(input_ids.device.type, enabled=False) if self._is_recurrent else nullcontext()
        with exact, sdpa_kernel(_ATTENTIONS):
            self.model.get_decoder()(input_ids=input_ids, use_cache=False)
        taps = torch.cat(self._taps, -1)
        self._taps[:] = [None] * len(self._taps)
        return taps


# ---------------------------------------------------------------------------------------------- the cache


def fingerprint(target: nn.Module, rows: Any, layer_ids: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
    """Return what a cache depends on, digests of all weights (1 s per GB) and of the rows among it."""
    target, tokens = targets.unwrap(target), hashlib.sha256()
    weights = hashlib.sha256(f"{targets.describe_config(target)} {targets.weights_digest(target)}".encode())
    for ids in _ids(rows):
        tokens.update(len(ids).to_bytes(8, "little"))
        tokens.update(torch.tensor(ids, dtype=torch.int64, device="cpu").numpy().tobytes())
    if (name := str(dtype).removeprefix("torch.")) not in _DTYPES:
        raise ValueError(f"features are stored as {', '.join(_DTYPES)}, got {dtype}")
    digests = {"target": weights.hexdigest(), "rows": tokens.hexdigest()}
    return {**digests, "target_layer_ids": list(layer_ids), "dtype": name}


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
    progress: Callable[[int, int, float], None] | None = None,
) -> FeatureCache | None:
    """Compute the missing shards of a feature cache for ``rows``, and open it.

    A shard is either complete or absent, so an interrupted run loses only the shard that it was computing.

    Args:
        target: the model.
        compute: from right-padded ids ``[batch, length]`` to features, as `TargetFeatures`; None runs the target.
        rows: a ``datasets.Dataset`` with ``input_ids``.
        layer_ids: tapped layers, in the drafter's order.
        folder: created if it is missing.
        dtype: bfloat16, float16 or float32.
        batch_tokens: tokens per forward pass, padding included. A longer row gets its own pass.
        shard_bytes: bytes per shard, which is assembled in memory. A longer row gets its own shard.
        rank: number of this process, of ``world`` that share the work.
        world: see ``rank``.
        progress: called after every forward pass with rows done, rows in total, and tokens per second of this call.

    Returns:
        The cache; None if shards of other processes are still missing.

    Raises:
        ValueError: the folder is a cache of something else, or the disk is too small. Nothing is computed then.
        OSError: a shard could not be written; the others are complete.
    """
    # 1. Describe the cache, or continue an earlier one of the same features
    folder, target = Path(folder), targets.unwrap(target)
    if compute is None:
        compute = TargetFeatures(target, tuple(layer_ids))
    width = len(layer_ids) * targets.text_config(target).hidden_size
    token_bytes = width * dtype.itemsize
    lengths = [len(ids) for ids in _ids(rows)]
    expected = fingerprint(target, rows, layer_ids, dtype)
    index = {"fingerprint": expected, "width": width, "lengths": lengths}
    if (folder / _INDEX).is_file():
        index = _read_index(folder, expected)
    else:
        index["shards"] = _shard_rows(lengths, max(1, shard_bytes // token_bytes))
    # 2. See what is missing, and whether there is room for it
    shards, missing = index["shards"], _missing(folder, index)
    needed = sum(sum(lengths[slice(*shards[number])]) for number in missing) * token_bytes
    parent = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if needed > (free := shutil.disk_usage(parent).free):
        sizes = f"need {needed / 1e9:.1f} GB more, and {parent} has {free / 1e9:.1f} GB free"
        raise ValueError(f"features of {len(lengths)} rows {sizes}: train without a cache, or on fewer rows")
    if missing and not (folder / _INDEX).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder / _INDEX, lambda path: path.write_text(json.dumps(index)))
    # 3. Compute this process's share of the missing shards, in batches of rows of similar length
    device = target.get_input_embeddings().weight.device
    done = len(lengths) - sum(end - start for start, end in (shards[number] for number in missing))
    tokens, began = 0, time.perf_counter()
    for number in (number for number in missing if number % world == rank):
        ids = rows[slice(*shards[number])]["input_ids"]
        sizes = list(map(len, ids))
        offsets = [0, *accumulate(sizes)]
        features = torch.zeros(offsets[-1], width, dtype=dtype, device="cpu")
        for batch in group_by_length(range(len(ids)), sizes, batch_tokens):
            with torch.no_grad():
                computed = compute(pad(ids[row] for row in batch).to(device)).to("cpu", dtype)
            for row, found in zip(batch, computed, strict=True):
                features[offsets[row] : offsets[row + 1]] = found[: sizes[row]]
            done, tokens = done + len(batch), tokens + sum(sizes[row] for row in batch)
            if progress is not None:
                progress(done, len(lengths), tokens / (time.perf_counter() - began))
        _write(_shard(folder, number), functools.partial(save_tensors, {"features": features}))
    return None if _missing(folder, index) else FeatureCache(folder)


class FeatureCache:
    """A complete cache, open for reading.

    Raises:
        FileNotFoundError: the folder is not a feature cache.
        ValueError: shards are missing, or the cache is not of what the `fingerprint` ``expected`` says.
    """

    def __init__(self, folder: str | os.PathLike, expected: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        index = _read_index(self.folder, expected or {})
        shards = index["shards"]
        if missing := len(_missing(self.folder, index)):
            raise ValueError(f"{self.folder} is incomplete: compute {missing} of {len(shards)} shards")
        self.fingerprint: dict[str, Any] = index["fingerprint"]
        self.lengths: list[int] = index["lengths"]
        self.target_layer_ids = tuple(self.fingerprint["target_layer_ids"])
        self.dtype = getattr(torch, self.fingerprint["dtype"])
        self._places: list[tuple[int, int]] = []  # per row, its shard and first token there
        for number, (start, end) in enumerate(shards):
            self._places += [(number, first) for first in accumulate(self.lengths[start : end - 1], initial=0)]
        self._open = functools.lru_cache(_OPEN_SHARDS)(self._open_shard)

    def __len__(self) -> int:
        return len(self.lengths)

    def check(self, lengths: Sequence[int], target_layer_ids: Sequence[int]) -> None:
        """Raise ``ValueError`` unless the cache has these row lengths and these taps."""
        if list(self.lengths) != list(lengths):
            raise ValueError(f"{self.folder} holds features of other rows")
        if (have := list(self.target_layer_ids)) != (taps := list(target_layer_ids)):
            raise ValueError(f"{self.folder} holds features of layers {have}, the drafter taps {taps}")

    def _open_shard(self, number: int) -> Any:
        path = _shard(self.folder, number)
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): remove it, and it is computed again") from error

    def features(self, indices: Sequence[int]) -> Tensor:
        """Return ``[batch, length, taps * hidden]`` of some rows, on the CPU, padded with 0 on the right."""
        places = [(self._places[row], self.lengths[row]) for row in indices]
        found = [self._open(number).get_slice("features")[start : start + length] for (number, start), length in places]
        return nn.utils.rnn.pad_sequence(found, batch_first=True)


def _ids(rows: Any) -> Iterator[list[int]]:
    for start in range(0, len(rows), _READ_ROWS):
        yield from rows[start : start + _READ_ROWS]["input_ids"]


def _shard_rows(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Split the rows into ranges ``[start, end)`` of up to ``most`` tokens. A longer row gets its own range."""
    shards, tokens = [[0, 0]], 0
    for row, length in enumerate(lengths):
        if tokens and tokens + length > most:
            shards.append([row, row])
            tokens = 0
        shards[-1][1], tokens = row + 1, tokens + length
    return shards


def _shard(folder: Path, number: int) -> Path:
    return folder / f"features-{number:06d}.safetensors"


def _missing(folder: Path, index: dict[str, Any]) -> list[int]:
    return [number for number in range(len(index["shards"])) if not _shard(folder, number).is_file()]


def _read_index(folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """Return a cache's index; raise ``ValueError`` if it is of something else than ``expected``."""
    if not (folder / _INDEX).is_file():
        raise FileNotFoundError(f"{folder} is not a feature cache: {_INDEX} is missing")
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        have = {key: index["fingerprint"].get(key) for key in expected}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / _INDEX}: not what cache_features writes: remove the folder") from error
    what = {"target": "another target's", "rows": "of other rows"}
    for key, value in expected.items():
        if have[key] != value:
            why = what.get(key, f"{key} {have[key]}, not {value}")
            raise ValueError(f"{folder} holds features that are {why}: name another folder, or remove it")
    return index


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    with one_line_errors(f"{path} could not be written (the files next to it are complete)"):
        files.write_atomically(path, write)
