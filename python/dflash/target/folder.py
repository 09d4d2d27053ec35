"""Refuse a target's folder that would cost memory or time before transformers finds out that it is broken."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..files import read_json
from ..limits import (
    MAX_EXPERTS,
    MAX_POSITIONS,
    MAX_TARGET_CONFIG_BYTES,
    MAX_TARGET_JSON_BYTES,
    MAX_TARGET_LAYERS,
    MAX_TARGET_SHARDS,
)
from ..terminal import listed, named, printable, shortened
from ..weight_files import find_shards, read_header

__all__ = ["check_target_folder", "check_target_size"]

# Keys that decide how much transformers builds, in any family's words, and their largest value.
_SIZES = (
    (re.compile(r"(^|_)n?_?layers?$"), MAX_TARGET_LAYERS),
    (re.compile(r"(^|_)experts$"), MAX_EXPERTS),
    (
        re.compile(r"(_size|_dim|_rank|heads|_head|_window|_embeddings|_positions|_inner|n_embd|d_model|d_ff)$"),
        MAX_POSITIONS,
    ),
)
_MAX_INTEGER = 2**63 - 1  # a larger one is no number for torch


def check_target_folder(folder: Path) -> None:
    """Check ``config.json`` and the headers of the weights. Files that are missing are left to transformers.

    Raises:
        ValueError: a value is of the wrong type or beyond every real model's, or a file is broken or cut; it is named.
    """
    path = folder / "config.json"
    if path.is_file():
        check_target_config(read_json(path, MAX_TARGET_CONFIG_BYTES), printable(path))
    try:
        shards = find_shards(folder, MAX_TARGET_JSON_BYTES, MAX_TARGET_SHARDS)
    except FileNotFoundError:  # weights of another kind
        return
    room = MAX_TARGET_JSON_BYTES
    for shard in shards:
        _, length = read_header(shard, room)
        room -= length


def check_target_config(config: Mapping[str, Any], source: str) -> None:
    """Check the values of a parsed ``config.json``, of any family, that decide how much transformers builds."""
    architectures = config.get("architectures")
    is_list = isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    if architectures is not None and not is_list:
        raise ValueError(f"{source}: architectures must be a list of names, got {shortened(architectures)}")
    for key, value in _integers(config):
        limit = next((limit for pattern, limit in _SIZES if pattern.search(key)), _MAX_INTEGER)
        if abs(value) > limit:
            raise ValueError(f"{source}: {named(key)} must be at most {limit}, got {shortened(value)}")


def _integers(content: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Yield every integer inside parsed JSON with the innermost key that leads to it."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            yield from _integers(value, name)
    elif isinstance(content, list):
        for value in content:
            yield from _integers(value, key)
    elif isinstance(content, int) and not isinstance(content, bool):
        yield key, content


def check_target_size(model: nn.Module, folder: Path) -> None:
    """Compare a model on the meta device with the bytes of its weights, before it is allocated.

    Raises:
        ValueError: the files hold far less than the model's parameters.
    """
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    stored = sum(file.stat().st_size for file in files if file.is_file())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # A parameter takes a byte or more, or a bit or more if it is quantized.
    most = stored * 8 if getattr(model.config, "quantization_config", None) else stored
    if files and parameters > most:
        sizes = [f"{key} {value}" for key, value in _integers(model.config.to_dict()) if _is_size(key)]
        raise ValueError(
            f"{printable(folder)}: config.json makes a model of {parameters} parameters, and its weights have only "
            f"{stored} bytes. One of its sizes is wrong: {listed(sizes)}"
        )


def _is_size(key: str) -> bool:
    return any(pattern.search(key) for pattern, _ in _SIZES)
