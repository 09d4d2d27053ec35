"""Read safetensors files of unknown origin: their headers first, then one tensor at a time.

Files are read, not mapped into memory: a mapped file that is cut while it is loaded kills the process (SIGBUS).
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from .files import parse_json, read_json
from .terminal import named, printable, shortened

__all__ = ["FLOATING", "StoredTensor", "find_shards", "read_header", "read_tensor_", "read_torch_file"]

# What safetensors calls the floating types that torch computes in.
FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
_BYTES |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_MAX_ELEMENTS = 2**62  # of one tensor: torch counts in 64 bits
_MAX_NAME_BYTES = 255  # of a file, on every file system of Linux
_PREFIX_BYTES = 8  # the length of the header


class StoredTensor(NamedTuple):
    """Where a tensor is stored, and what its file was when the header was read."""

    path: Path
    shape: tuple[int, ...]
    kind: str  # as in `FLOATING`
    start: int  # the first byte, from the beginning of the file
    num_bytes: int
    file_state: tuple[int, ...]


def find_shards(folder: Path, max_bytes: int, max_shards: int, single_name: str = "model.safetensors") -> list[Path]:
    """Return the files that hold a model's weights: one file, or those that an index names.

    Args:
        folder: of the model.
        max_bytes: size of the index at most.
        max_shards: number of files at most.
        single_name: name of the one file; that of the index is derived from it.

    Raises:
        FileNotFoundError: there is neither, or a file that the index names is missing.
        ValueError: the index is broken, or names a file outside of the folder.
    """
    single, index = folder / single_name, folder / f"{single_name}.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(f"{printable(folder)} has neither {single.name} nor {index.name}")
    where = printable(index)
    mapping = read_json(index, max_bytes, unique_keys=True).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise ValueError(f"{where}: weight_map must map tensor names to files")
    names = sorted(set(mapping.values()))
    if len(names) > max_shards:
        raise ValueError(f"{where}: weight_map must name at most {max_shards} files, got {len(names)}")
    for name in names:
        if Path(name).name != name or name in ("", "..") or len(os.fsencode(name)) > _MAX_NAME_BYTES or "\0" in name:
            raise ValueError(f"{where}: weight_map names {shortened(name)}, which is not a file in the same folder")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{printable(folder)}: shard {named(name)} is missing, but {index.name} names it")
    return [folder / name for name in names]


def read_header(path: Path, max_bytes: int) -> tuple[dict[str, StoredTensor], int]:
    """Read which tensors a safetensors file holds, and check that the file has exactly their bytes.

    Args:
        path: the file.
        max_bytes: length of the header at most. A longer one is not read.

    Returns:
        The tensors by name, and the header's length in bytes.

    Raises:
        ValueError: the header is too long or not a header, or the file was cut.
    """
    where = f"{printable(path)}: not a complete safetensors file (truncated or corrupt?)"
    try:
        with open(path, "rb") as file:
            state = _file_state(file)
            prefix, num_bytes = file.read(_PREFIX_BYTES), state[1] - _PREFIX_BYTES
            length = int.from_bytes(prefix, "little")
            if len(prefix) < _PREFIX_BYTES or length > num_bytes:
                raise ValueError(f"{where}: it has {state[1]} bytes")
            if length > max_bytes:
                raise ValueError(f"{printable(path)}: its header must have at most {max_bytes} bytes, got {length}")
            header = parse_json(file.read(length), where, unique_keys=True)
    except OSError as error:
        raise ValueError(f"{printable(path)}: cannot be read: {error.strerror or error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{where}: its header must be an object, got {shortened(header)}")
    spans = {name: _read_entry(entry, name, where) for name, entry in header.items() if name != "__metadata__"}
    _expect_tiled(spans, num_bytes - length, where)
    begin = _PREFIX_BYTES + length
    stored = {
        name: StoredTensor(path, shape, kind, begin + start, end - start, state)
        for name, (shape, kind, start, end) in spans.items()
    }
    return stored, length


def _read_entry(entry: Any, name: str, where: str) -> tuple[tuple[int, ...], str, int, int]:
    """Return shape, kind, first byte and last byte + 1 of a header's entry. Raise if they contradict each other."""
    entry = entry if isinstance(entry, Mapping) else {}
    shape, kind, offsets = (entry.get(key) for key in ("shape", "dtype", "data_offsets"))
    is_list = all(isinstance(value, list) for value in (shape, offsets))
    if not is_list or not isinstance(kind, str) or len(offsets) != 2 or len(shape) > 64:
        raise ValueError(f"{where}: the entry of {named(name)} has no dtype, shape and two data_offsets")
    if not all(type(size) is int and 0 <= size <= _MAX_ELEMENTS for size in [*shape, *offsets]):
        raise ValueError(f"{where}: sizes and offsets of {named(name)} must be integers >= 0, got {shortened(entry)}")
    elements, (start, end) = math.prod(shape), offsets
    num_bytes = elements * _BYTES[kind] if kind in _BYTES else end - start
    if elements > _MAX_ELEMENTS or start > end or num_bytes != end - start:
        raise ValueError(f"{where}: {named(name)} cannot be {named(kind)} {shortened(shape)} in {end - start} bytes")
    return tuple(shape), kind, start, end


def _expect_tiled(spans: Mapping[str, tuple[Any, str, int, int]], num_bytes: int, where: str) -> None:
    """Raise unless the tensors follow each other without a gap or an overlap, and fill the file."""
    position = 0
    for name, (_, _, start, end) in sorted(spans.items(), key=lambda item: item[1][2:]):
        if start != position:
            raise ValueError(f"{where}: {named(name)} starts at byte {start} of the data instead of {position}")
        position = end
    if position != num_bytes:
        raise ValueError(f"{where}: its tensors have {position} bytes, the file has {num_bytes}")


def _file_state(file: BinaryIO) -> tuple[int, ...]:
    state = os.fstat(file.fileno())
    return state.st_ino, state.st_size, state.st_mtime_ns


@torch.no_grad()
def read_tensor_(stored: StoredTensor, destination: Tensor) -> None:
    """Copy a stored floating or int64 tensor into ``destination``, of the same shape, on any device, in any dtype.

    Raises:
        ValueError: the file changed after its header was read.
    """
    dtype = torch.int64 if stored.kind == "I64" else FLOATING[stored.kind]
    is_direct = destination.dtype == dtype and destination.device.type == "cpu" and destination.is_contiguous()
    staging = destination if is_direct else torch.empty(stored.shape, dtype=dtype, device="cpu")
    try:
        with open(stored.path, "rb", buffering=0) as file:
            is_same = _file_state(file) == stored.file_state
            is_whole = is_same and _fill_(staging, file, stored.start)
            is_same = is_whole and _file_state(file) == stored.file_state
    except OSError as error:
        raise ValueError(f"{printable(stored.path)}: cannot be read: {error.strerror or error}") from error
    if not is_same:
        raise ValueError(f"{printable(stored.path)}: the file was changed or cut while it was loaded; load it again")
    if not is_direct:
        destination.copy_(staging)


def _fill_(tensor: Tensor, file: BinaryIO, start: int) -> bool:
    """Read the bytes of a contiguous CPU tensor from ``file``. Returns False if the file ends before."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return True
    memory = memoryview((ctypes.c_char * num_bytes).from_address(tensor.data_ptr())).cast("B")
    file.seek(start)
    done = 0
    while done < num_bytes and (count := file.readinto(memory[done:])):
        done += count
    return done == num_bytes


def read_torch_file(path: Path) -> Any:
    """Read tensors and numbers of ``torch.save``. Never runs code of the file, and never expands it."""
    with zipfile.ZipFile(path) as file:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
            raise ValueError(f"{path.name} is compressed, which torch.save never does")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # torch's message recommends to load it nevertheless
        raise ValueError(f"{path.name} holds other things than tensors and numbers") from error
