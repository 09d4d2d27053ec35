"""Refuse a target's folder that would cost memory or time before transformers finds out that it is broken."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..files import find_shards, open_tensors, read_architectures, read_json
from ..terminal import listed, named, printable, shortened

# Keys that decide how much transformers builds, under the names of any family, and their largest value. The largest
# published: 126 layers, of which one costs transformers a millisecond, and 16384 experts.
_SIZES = {
    r"(^|_)(n?_?layers?(_per_\w+)?|depth|num_blocks)$": 2**10,
    r"(^|_)experts$": 2**16,
    r"(_size|_dim|_rank|heads|_head|_window|_embeddings|_positions|_inner|n_embd|d_model|d_ff)$": 2**31 - 1,
}
_MAX_INTEGER = 2**63 - 1  # torch has no larger ones


def check_target_config(folder: Path) -> None:
    """Raise ValueError for a value in ``config.json``, of any family, that has transformers build too much.

    A missing file is left to transformers, here and in `check_target_weights`.
    """
    path = folder / "config.json"
    if not path.is_file():
        return
    config, source = read_json(path), printable(path)
    read_architectures(config, source)
    for key, value in _integers(config):
        limit = next((limit for pattern, limit in _SIZES.items() if re.search(pattern, key)), _MAX_INTEGER)
        if abs(value) > limit:
            raise ValueError(f"{source}: {named(key)} must be at most {limit}, got {shortened(value)}")


def check_target_weights(folder: Path) -> list[Path]:
    """Return the files of the weights. Raise ValueError if the index or a safetensors header is broken or cut.

    Empty if a file is missing: a hub's snapshot may not be complete yet.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        with contextlib.suppress(FileNotFoundError):
            files = find_shards(folder, name)
            for file in files:
                if file.suffix == ".safetensors":
                    with open_tensors(file):
                        pass  # checks its header
            return files
    return []


class Header(NamedTuple):
    """What a safetensors file says of a tensor. ``dtype`` is the file's name for it, such as ``BF16``."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    index: int | None = None  # if it is one along the first dimension of the file's tensor

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_headers(files: Sequence[Path]) -> dict[str, Header]:
    """Return what safetensors files say of their tensors, by name. Raises ValueError if one is broken."""
    found = {}
    for path in files:
        with open_tensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                part = file.get_slice(name)
                found[name] = Header(path, name, part.get_dtype(), tuple(part.get_shape()))
    return found


# Tensors without which a model writes the same: tables that follow from its config, counters, heads that draft, scales
# of a cache in 8 bits, and towers for other inputs than text.
_HARMLESS = re.compile(
    r"(^|[._])inv_freq$|num_batches_tracked$|masked_bias$|position_ids$|(^|\.)mtp[._]|[._][qkv]_scale$|"
    r"(^|\.)(visual|vision_\w+|audio_\w+|embed_(vision|audio)|\w*multi_?modal_projector|image_newline)(\.|$)"
)


def check_all_used(model: nn.Module, unused: Mapping[str, object], source: object) -> None:
    """Raise ValueError if tensors of a checkpoint have no place in the model, but for some that change nothing.

    Args:
        model: the target, perhaps on the meta device.
        unused: what the file says of each tensor, by name.
        source: the folder or file, for the error.
    """
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    first = getattr(text, "num_hidden_layers", 0)  # layers past these draft: DeepSeek, GLM
    drafting = range(first, first + (getattr(text, "num_nextn_predict_layers", None) or 0))

    def is_harmless(name: str) -> bool:
        layer = re.search(r"(^|\.)layers\.(\d+)\.", name)
        return bool(_HARMLESS.search(name)) or (layer is not None and int(layer[2]) in drafting)

    if lost := [f"{name} {what}".rstrip() for name, what in sorted(unused.items()) if not is_harmless(name)]:
        raise ValueError(
            f"{printable(source)}: every tensor must have a place in {type(model).__name__}, and these have none: "
            f"{listed(lost)}. config.json belongs to another model, or the weights are stored in a way that is not "
            "known here"
        )


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


def check_target_size(model: nn.Module, files: Sequence[Path], *, is_quantized: bool = False) -> None:
    """Raise ValueError if ``files`` hold far less than the parameters of a model on the meta device.

    Quantized, a parameter may take less than a byte, but not less than a bit.
    """
    stored = sum(file.stat().st_size for file in files)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if files and parameters > (stored * 8 if is_quantized else stored):
        values = _integers(model.config.to_dict())
        sizes = [f"{key} {value}" for key, value in values if any(re.search(pattern, key) for pattern in _SIZES)]
        raise ValueError(
            f"{printable(files[0].parent)}: config.json makes a model of {parameters} parameters, and its weights have "
            f"only {stored} bytes. One of its sizes is wrong: {listed(sizes)}"
        )
