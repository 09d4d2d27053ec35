"""Say from the headers of a target's files what its weights become here. See `examine_weights`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dflash.internals import files, ops, read_headers, sources, targets

_BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16}  # all others have 8
_EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"
_EMBEDDINGS = "token_embd.weight", "embed_tokens.weight"


@dataclass
class TensorKind:
    """All tensors of one type of the files.

    Attributes:
        type: as the files call it.
        becomes: what they are in memory.
        tensors: how many there are.
        stored: their bytes in the files, ``memory`` those in memory, ``read`` those that a token reads.
    """

    type: str
    becomes: str
    tensors: int = 0
    stored: float = 0.0
    memory: float = 0.0
    read: float = 0.0


@dataclass(frozen=True)
class WeightsReport:
    """What the weights of a target become here.

    Attributes:
        kinds: the largest first.
        refused: why the target cannot be run; empty if it can.
        memory: bytes of all weights, without caches.
        read: bytes that a token reads.
        tokens_per_second: the most that this machine's memory allows without drafts.
    """

    kinds: list[TensorKind]
    refused: str
    memory: float
    read: float
    tokens_per_second: float


class _Stored(NamedTuple):
    name: str
    type: str
    shape: tuple[int, ...]
    size: int  # bytes


def examine_weights(source: sources.Source, dtype: str) -> WeightsReport:
    """Report on a GGUF file or a folder for CPUs. Reads headers, and runs nothing but a measurement of memory.

    Raises:
        ValueError: a file is broken, or there are no weights.
    """
    # 1. What is refused, as when it is loaded.
    refused, config, is_packed = "", None, False
    asked = None if dtype == "auto" else getattr(torch, dtype)
    if source.gguf is not None:
        asked = asked or source.gguf.dtype
    else:
        config = source.load_config()
        parts = config, config.get_text_config(decoder=True)
        is_quantized = any(getattr(part, "quantization_config", None) is not None for part in parts)
        if is_quantized or source.find("hf_quant_config.json") is not None:
            raise ValueError(
                f"{source.name} was quantized by another library: only GGUF files and plain folders are listed. "
                "docs/quantized.md says what stays packed of others"
            )
    try:
        config = source.load_config()
        refused = targets.refusal(source.load_empty_target(config), loaded=False) or ""
        is_packed = source.gguf is not None and source.packs(asked, "cpu")
    except ValueError as error:
        refused = str(error)
    # 2. What each tensor becomes.
    tensors, kinds = list(_tensors(source)), dict[tuple[str, str], TensorKind]()
    if not tensors:
        raise ValueError(f"{source.name} holds no weights: name a GGUF file, or a folder with safetensors")
    has_head = any(tensor.name == "output.weight" or tensor.name.endswith("lm_head.weight") for tensor in tensors)
    chosen = _share_of_experts(config)
    for tensor in tensors:
        made = torch.float32 if asked is None and tensor.type == "F16" else asked  # kernels do not take float16
        becomes = str(made or tensor.type).removeprefix("torch.")
        memory = tensor.size if made is None else math.prod(tensor.shape) * made.itemsize
        if is_packed and len(tensor.shape) > 1 and tensor.type not in ("F32", "F16", "BF16"):
            stays = tensor.type in ops.BLOCKS
            becomes = "stays packed" if stays else "Q8_0"
            form = ops.FORMATS[ops.BLOCKS[tensor.type if stays else "Q8_0"]]
            memory = math.prod(tensor.shape[:-1]) * form.size(tensor.shape[-1])
        kind = kinds.setdefault((tensor.type, becomes), TensorKind(tensor.type, becomes))
        is_looked_up = tensor.name.endswith(_EMBEDDINGS) and has_head
        share = 0.0 if is_looked_up else chosen if "_exps." in tensor.name or ".experts." in tensor.name else 1.0
        kind.tensors += 1
        kind.stored += tensor.size
        kind.memory += memory
        kind.read += share * memory
    # 3. All of them.
    found = sorted(kinds.values(), key=lambda kind: -kind.stored)
    memory, read = sum(kind.memory for kind in found), sum(kind.read for kind in found)
    return WeightsReport(found, refused, memory, read, sources.memory_bytes_per_second() / read)


def _tensors(source: sources.Source) -> Iterator[_Stored]:
    """Yield the tensors of the files."""
    if (gguf := source.gguf) is not None:
        for name, shape in gguf.shapes.items():
            yield _Stored(name, gguf.kind(name), shape, gguf.rows(name).size)
    elif source.folder:
        for header in read_headers(files.find_shards(source.folder)).values():
            size = math.prod(header.shape) * _BITS.get(header.dtype, 8) // 8
            yield _Stored(header.name, header.dtype, header.shape, size)


def _share_of_experts(config: Any) -> float:
    """Return the share of a mixture's experts that a token reads."""

    def count(*keys: str) -> Any:
        text = config.get_text_config(decoder=True)
        return next((value for key in keys for value in targets.config_values(text, key)), None)

    chosen, every = (None, None) if config is None else (count(*targets.CHOSEN_EXPERTS), count(*_EXPERTS))
    return chosen / every if isinstance(chosen, int) and isinstance(every, int) else 1.0
