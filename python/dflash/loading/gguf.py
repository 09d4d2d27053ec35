"""Find and read GGUF files. Their header is parsed here: the ``gguf`` package takes seconds for a vocabulary."""

from __future__ import annotations

import functools
import math
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops import BLOCKS, PackedWeight
from ..terminal import listed, named, printable

DRAFT_ARCHITECTURES = ("dflash", "dflash-draft", "qwen35-dflash-draft", "gemma4-dflash-draft")
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # of values
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_SAMPLING = {  # our names, those of keys and llama.cpp's defaults
    "temperature": ("temp", 0.8), "top_k": ("top_k", 40), "top_p": ("top_p", 0.95), "min_p": ("min_p", 0.05),
    "repetition_penalty": ("penalty_repeat", 1.0),
}  # fmt: skip
PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


def find_gguf(
    name: str | os.PathLike, *, is_draft: bool = False, revision: str | None = None, local_files_only: bool = False
) -> Path | None:
    """Return the file that ``name`` means, downloading it if need be; None if it means none.

    That is a file ``*.gguf``, a folder that holds one and no safetensors, or ``owner/name:FILE.gguf`` on the hub, at
    ``revision``. Of a folder's files that of a drafter counts if ``is_draft``, else that of a target.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the folder holds several.
    """
    path, (repository, colon, file) = Path(name).expanduser(), os.fspath(name).partition(":")
    if path.is_dir():
        has_weights = any(any(path.glob(f"{kind}*")) for kind in ("*.safetensors", "pytorch_model.bin"))
        found = [] if has_weights else sorted(file for file in path.glob("*.gguf") if "mmproj" not in file.name)
        if len(found) > 1:
            found = [file for file in found if read_gguf(file).is_draft == is_draft] or found
        if len(found) > 1:
            raise ValueError(
                f"{printable(path)} holds several GGUF files: name one of {listed([f.name for f in found])}"
            )
        return found[0] if found else None
    is_gguf = path.suffix.lower() == ".gguf"
    if path.exists() or not (is_gguf or colon or repository.lower().endswith("-gguf")):
        return path if is_gguf else None
    if not is_gguf or not colon or repository.count("/") != 1 or repository.startswith((".", "/", "~")):
        raise FileNotFoundError(f"there is no file {printable(name)}; one on the hub is owner/name:FILE.gguf")
    import huggingface_hub

    try:
        options: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
        return Path(huggingface_hub.hf_hub_download(repository, file, **options))
    except (OSError, ValueError) as error:  # not found, gated, offline, nothing cached
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise FileNotFoundError(f"{printable(name)} is not a reachable file of a hub repository: {reason}") from error


def shortest(number: float) -> float:
    """Return the decimal number that a float32 was written as, such as 1e-05 for 9.9999997e-06."""
    return float(str(np.float32(number)))


def require_gguf() -> Any:
    """Import the ``gguf`` package, or raise ``ValueError``."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError("a GGUF file needs the gguf package: pip install '.[gguf]'") from error
    return gguf


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file.

    Attributes:
        metadata: every key, such as ``general.architecture``. Numbers are as `shortest` has them.
        shapes: of the tensors, in torch's order.
        types: of the metadata, as numbers of the format; of a list also that of its items.
    """

    path: Path
    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    _places: dict[str, tuple[Any, int, int]]  # type, first byte, bytes
    types: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def is_draft(self) -> bool:
        return self.architecture in DRAFT_ARCHITECTURES

    @property
    def dtype(self) -> torch.dtype:
        """That of most of the file's numbers; bfloat16 if they are quantized."""
        sizes: dict[str, int] = {}
        for name, (kind, _, _) in self._places.items():
            sizes[kind.name] = sizes.get(kind.name, 0) + math.prod(self.shapes[name])
        found = PLAIN.get(max(sizes, key=sizes.__getitem__, default=""))
        return torch.bfloat16 if found is None or not found.is_floating_point else found

    @property
    def sampling(self) -> dict[str, float]:
        """How llama.cpp samples from the file, by our names: its keys ``general.sampling.*``, else the defaults."""
        found = {name: self.metadata.get(f"general.sampling.{key}", value) for name, (key, value) in _SAMPLING.items()}
        return {**found, "top_k": max(0, found["top_k"])}  # -1 is off there

    def kind(self, name: str) -> str:
        """Return the type of a tensor, as GGML calls it."""
        return self._places[name][0].name

    @functools.cached_property
    def _bytes(self) -> mmap.mmap:
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def rows(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor where they lie in the file, ``[..., out, bytes]``."""
        _, start, size = self._places[name]
        return np.frombuffer(self._bytes, np.uint8, size, start).reshape(*self.shapes[name][:-1], -1)

    def give_back(self, name: str) -> None:
        """Free the memory of a tensor's mapped pages, where the system can."""
        _, start, size = self._places[name]
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED, first, start + size - first)

    def tensor(self, name: str) -> Tensor:
        """Read a tensor. Quantized ones become float32."""
        kind, start, size = self._places[name]
        data = np.fromfile(self.path, np.uint8, size, offset=start)
        if kind.name in PLAIN:
            return torch.from_numpy(data).view(PLAIN[kind.name]).view(self.shapes[name])
        rows = data.reshape(*self.shapes[name][:-1], -1)
        try:
            return torch.from_numpy(require_gguf().quants.dequantize(rows, kind))
        except NotImplementedError:
            what = f"tensor {named(name)} is stored as {kind.name}, which the gguf package cannot read"
            raise ValueError(f"{printable(self.path)}: {what}") from None


@dataclass(frozen=True, eq=False)
class BlocksOfFile:
    """A quantized tensor of a file, read when it is needed."""

    file: GgufFile
    name: str

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.file.shapes[self.name])

    def dense(self) -> Tensor:
        """Return the values in float32."""
        return self.file.tensor(self.name)

    @functools.cached_property
    def _packed(self) -> PackedWeight | None:
        if (kind := self.file.kind(self.name)) not in BLOCKS:
            return None
        rows = torch.from_numpy(self.file.rows(self.name).copy())
        return PackedWeight.of_blocks(rows, BLOCKS[kind], self.shape[-1])

    def pack(self) -> PackedWeight | None:
        return self._packed  # the same for all parameters that it is


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file. Raises ValueError if it is none, truncated, or of another version."""
    gguf, where = require_gguf(), printable(path)
    try:
        data, total = np.memmap(path, np.uint8, "r").data, path.stat().st_size
    except (OSError, ValueError) as error:
        raise ValueError(f"{where}: cannot be read: {error}") from error
    if bytes(data[:4]) != b"GGUF":
        raise ValueError(f"{where} is not a GGUF file: it does not begin with GGUF")
    place, length = 4, struct.Struct("<Q").unpack_from

    def take(form: str, count: int = 1) -> tuple[Any, ...]:
        nonlocal place
        if count * struct.calcsize(form) > total - place:  # before anything is allocated for it
            raise struct.error
        values = struct.unpack_from(f"<{count}{form}", data, place)
        place += struct.calcsize(form) * count
        return values

    def string() -> str:  # vocabularies have hundreds of thousands
        nonlocal place
        start = place + 8
        if (end := start + length(data, place)[0]) > total:
            raise struct.error
        place = end
        return str(data[start:end], "utf-8", "replace")

    def value(kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return string()
        if kind != _ARRAY or depth:
            number = take(_FORMATS[kind])[0]
            return shortest(number) if kind == _FLOAT else number
        (kind, count) = (*take("I"), *take("Q"))
        return list(take(_FORMATS[kind], count)) if kind in _FORMATS else [value(kind, 1) for _ in range(count)]

    metadata, shapes, places, types = {}, {}, {}, {}
    try:
        version, tensors, keys = (*take("I"), *take("Q", 2))
        if version not in (2, 3):
            raise ValueError(f"{where}: GGUF version {version} is not supported: 2 and 3 are")
        for _ in range(keys):
            key, (kind,) = string(), take("I")
            types[key] = (kind, *(struct.unpack_from("<I", data, place) if kind == _ARRAY else ()))
            metadata[key] = value(kind)
        infos = [(string(), take("Q", take("I")[0]), *take("I"), *take("Q")) for _ in range(tensors)]
        start = -(-place // (align := metadata.get("general.alignment", 32))) * align
        for name, shape, number, offset in infos:
            kind = gguf.GGMLQuantizationType(number)
            block, size = gguf.GGML_QUANT_SIZES[kind]
            if shape and shape[0] % block:
                raise ValueError(
                    f"{where}: tensor {named(name)} has rows of {shape[0]} numbers, and {kind.name} {block}"
                )
            shapes[name] = shape[::-1]
            places[name] = kind, start + offset, math.prod(shape) // block * size
            if not shape or sum(places[name][1:]) > total:
                raise struct.error
    except (struct.error, KeyError, ArithmeticError, TypeError) as error:
        raise ValueError(f"{where}: not a complete GGUF file (truncated or corrupt?)") from error
    except ValueError as error:
        if where in str(error):
            raise
        raise ValueError(f"{where}: a tensor has a type that the gguf package does not know: {error}") from error
    if (parts := metadata.get("split.count", 1)) > 1:
        raise ValueError(f"{where} is one of {parts} parts of a model: merge them with llama-gguf-split --merge")
    return GgufFile(path, metadata, shapes, places, types)
