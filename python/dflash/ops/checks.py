"""Checks of the tensors that an op is given. Each error says what must hold and what came."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from types import NoneType

import torch
from torch import Tensor

from .. import _C


def tensors_of(names: Sequence[str], arguments: Sequence) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors among an op's arguments with their names, those in lists as ``name[i]``."""
    for name, argument in zip(names, arguments, strict=False):  # torch leaves out defaults at the end
        if isinstance(argument, Tensor):
            yield name, argument
        elif isinstance(argument, (list, tuple)):
            yield from ((f"{name}[{i}]", x) for i, x in enumerate(argument) if isinstance(x, Tensor))


def expect_memory(op: str, name: str, tensor: Tensor) -> None:
    """Raise unless the tensor's storage holds all its elements. Storages are freed by FSDP and by offloading."""
    held = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    if (needed := bytes_reached(tensor)) > held:
        raise ValueError(
            f"{op}: {name} must be in memory, but its storage holds {held} of the "
            f"{needed} bytes that {list(tensor.shape)} of {tensor.dtype} reaches: it was freed or cut (by FSDP "
            f"or offloading?). Gather or load it before the call"
        )


_KINDS = {  # annotation -> what an argument may be, in words
    Tensor: (Tensor, "a tensor"),
    Tensor | None: ((Tensor, NoneType), "a tensor or None"),
    float: ((float, int), "a number"),
    int: (int, "an integer in 64 bits"),
    bool: (int, "True or False"),
    str: (str, "a string"),
}


def explain_failure(
    op: str, parameters: Sequence[inspect.Parameter], written: Sequence[str], arguments: Sequence
) -> None:
    """Raise for an argument of a wrong type, or a negative view that torch cannot write through.

    Called where a call has failed; the reason may be another.
    """
    names = [parameter.name for parameter in parameters]
    for name, tensor in tensors_of(names, arguments):
        if name.split("[")[0] in written and tensor.is_neg():
            raise ValueError(
                f"{op}: {name} is written in place and must not be a negative view. Pass {name}.resolve_neg()"
            ) from None
    for parameter, argument in zip(parameters, arguments, strict=True):
        kinds, words = _KINDS.get(parameter.annotation, ((list, tuple), "a list of tensors"))
        fits = isinstance(argument, kinds)
        if fits and words == "a list of tensors":
            fits = all(isinstance(x, Tensor) for x in argument)
        if fits and parameter.annotation is int:
            fits = -(2**63) <= argument < 2**63
        if not fits:
            found = argument if isinstance(argument, (int, str, NoneType)) else type(argument).__name__
            raise TypeError(f"{op}: {parameter.name} must be {words}, got {found!r}") from None


def expect_strided(op: str, names: Sequence[str], arguments: Sequence) -> None:
    """Raise for the first tensor that is not plain dense memory with strides."""
    for name, tensor in tensors_of(names, arguments):
        found = "a nested tensor" if tensor.is_nested else "a quantized one" if tensor.is_quantized else tensor.layout
        if found != torch.strided:
            raise TypeError(f"{op}: {name} must be a dense tensor (torch.strided), got {found}. Convert it first")


def bytes_reached(tensor: Tensor) -> int:
    """Return how many bytes of its storage a tensor needs."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + count) * tensor.element_size() if count else 0


def expect_apart(op: str, name: str, written: Tensor, other_name: str, other: Tensor) -> None:
    """Raise if a tensor that the op writes shares memory with another one of its arguments."""
    begin, other_begin = written.data_ptr(), other.data_ptr()
    end = begin + bytes_reached(written) - written.storage_offset() * written.element_size()
    other_end = other_begin + bytes_reached(other) - other.storage_offset() * other.element_size()
    if not (written.numel() and other.numel() and begin < other_end and other_begin < end):
        return
    if not _interleaved(written, other):
        raise ValueError(
            f"{op}: {name} is written in place and must not share memory with {other_name}. Pass a copy of one of them"
        )


def _interleaved(first: Tensor, second: Tensor) -> bool:
    """Return True if both are columns of rows that lie equally far apart, and not the same columns."""
    if first.dtype != second.dtype or first.dim() < 2 or first.stride(-1) != 1 or second.stride(-1) != 1:
        return False
    shape, stride = first.shape, first.stride()
    step = stride[-2]
    rows = [step]
    for size in reversed(shape[1:-1]):
        rows.insert(0, rows[0] * size)
    if tuple(rows) != stride[:-1] or second.stride() != stride or second.shape[:-1] != shape[:-1]:
        return False
    apart = (second.data_ptr() - first.data_ptr()) // first.element_size() % step if step else 0
    return apart >= shape[-1] and apart + second.shape[-1] <= step


def expect_one_device(op: str, arguments: Iterable) -> None:
    """Raise unless all tensors are where the first is: a kernel would read another device's addresses."""
    first = None
    for argument in arguments:
        for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
            if not isinstance(tensor, Tensor):
                continue
            first = tensor if first is None else first
            if tensor.device != first.device:
                found = f"{list(tensor.shape)} on {tensor.device}"
                raise ValueError(f"{op}: all tensors must be on {first.device} as the first is, got {found}")


def expect(op: str, name: str, tensor: Tensor, shape: tuple, dtype: torch.dtype, names: str) -> None:
    """Raise unless ``tensor`` has this shape (None: any size) and dtype; ``names`` spells the shape for the message."""
    if tensor.shape == shape and tensor.dtype is dtype:  # the usual case; the checks below take a microsecond
        return
    if tensor.dim() != len(shape):
        raise ValueError(f"{op}: {name} must be [{names}], got {tensor.dim()} dimensions")
    for have, want in zip(tensor.shape, shape, strict=True):
        if want is not None and have != want:
            wanted = ", ".join("*" if size is None else str(size) for size in shape)
            raise ValueError(f"{op}: {name} must be [{names}] = [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")


def expect_contiguous(op: str, name: str, tensor: Tensor) -> None:
    """Raise unless ``tensor``, which the op writes, is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{op}: {name} is written in place and must be contiguous, got strides {tensor.stride()}")


def expect_cache(
    op: str, names: tuple[str, str], k_cache: Tensor, v_cache: Tensor, batch: int, heads: int | None,
    dims: tuple[int | None, int | None], dtype: torch.dtype, mutated: bool = True,
) -> None:  # fmt: skip
    """Raise unless both are caches ``[batch, heads, capacity, dim]`` of this dtype; contiguous where ``mutated``."""
    k_name, v_name = names
    expect(op, k_name, k_cache, (batch, heads, None, dims[0]), dtype, "batch, num_kv_heads, capacity, head_dim")
    wanted = (batch, k_cache.shape[1], k_cache.shape[2], dims[1])
    expect(op, v_name, v_cache, wanted, dtype, "batch, num_kv_heads, capacity, v_head_dim")
    if k_cache.shape[2] == 0:
        raise ValueError(f"{op}: {k_name} must have a capacity of at least 1, got {list(k_cache.shape)}")
    for name, cache in ((k_name, k_cache), (v_name, v_cache)):
        if mutated:
            expect_contiguous(op, name, cache)


def emission_fits(
    block: tuple[Tensor, ...], stop_token_ids: Tensor, limits: Tensor, tokens: Tensor, counters: tuple[Tensor, ...],
    paths: tuple[Tensor, ...] = (),
) -> bool:  # fmt: skip
    """Return True if a call that accepts a block is right: the short way past `expect_emission`, for every step."""
    shape, integer = block[0].shape, torch.int64
    if not (len(shape) == tokens.dim() == 2 and stop_token_ids.dim() == 2 and shape[1] > 0):
        return False
    batch = shape[0]
    written = (tokens, (batch, tokens.shape[1]), integer, counters, (batch,), integer)
    if paths:
        written += (paths, (batch, paths[0].shape[-1]), integer)
    stops = (batch, stop_token_ids.shape[1])
    read = (block, shape, integer, limits, (batch,), integer, stop_token_ids, stops, integer)
    return _C.fits(False, *read) and _C.fits(True, *written)


def expect_emission(
    op: str, block: dict[str, Tensor], stop_token_ids: Tensor, limits: Tensor, tokens: Tensor,
    counters: tuple[Tensor, Tensor, Tensor], paths: dict[str, Tensor] | None = None,
) -> None:  # fmt: skip
    """Raise unless these are a block ``[batch, rows]``, the state that accepting it advances, and ``paths`` in it."""
    (name, ids), paths = next(iter(block.items())), paths or {}
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise ValueError(f"{op}: {name} must be [batch, rows] with rows >= 1, got {list(ids.shape)}")
    written = {"tokens": tokens, **dict(zip(("length", "num_context", "done"), counters, strict=True)), **paths}
    per_row = (ids.shape[0],)
    words = {"stop_token_ids": ((*per_row, None), "batch, n"), "tokens": ((*per_row, None), "batch, capacity")}
    words |= dict.fromkeys(block, ((*ids.shape,), "batch, rows"))
    words |= {name: ((*per_row, next(iter(paths.values())).shape[1]), "batch, path_rows") for name in paths}
    for name, tensor in {**block, "stop_token_ids": stop_token_ids, "limits": limits, **written}.items():
        shape, names = words.get(name, (per_row, "batch"))
        expect(op, name, tensor, shape, torch.int64, names)
    for name, tensor in written.items():
        expect_contiguous(op, name, tensor)


def expect_rope(op: str, positions: Tensor, cos: Tensor, sin: Tensor, batch: int, rows: int, head_dim: int) -> None:
    """Raise unless positions and angles fit ``[batch, rows]`` rows with heads of ``head_dim``."""
    expect(op, "positions", positions, (batch, rows), torch.int64, "batch, rows")
    expect(op, "cos", cos, (batch, rows, None), torch.float32, "batch, rows, rotary / 2")
    expect(op, "sin", sin, (batch, rows, cos.shape[-1]), torch.float32, "batch, rows, rotary / 2")
    if 2 * cos.shape[-1] > head_dim:
        raise ValueError(f"{op}: cos may have at most head_dim / 2 = {head_dim // 2} columns, got {cos.shape[-1]}")


def expect_rope_table(op: str, cos: Tensor, sin: Tensor, head_dim: int) -> None:
    """Raise unless these are angles ``[positions, rotary / 2]`` of one position or more, for heads of ``head_dim``."""
    if not (cos.dim() == 2 and cos.shape == sin.shape and cos.dtype is sin.dtype is torch.float32):
        expect(op, "cos", cos, (None, None), torch.float32, "positions, rotary / 2")
        expect(op, "sin", sin, tuple(cos.shape), torch.float32, "positions, rotary / 2")
    if cos.shape[0] == 0 or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"{op}: cos must be [positions, at most head_dim / 2 = {head_dim // 2}], got {list(cos.shape)}"
        )


def dense(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor itself if it is contiguous (or None), else a copy."""
    return None if tensor is None else tensor.contiguous()


def unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its last dimension is dense, whatever the other strides; else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def row_stride(op: str, name: str, tensor: Tensor) -> int:
    """Return the stride between the rows of a written tensor ``[..., hidden]``, which must be the same for all."""
    sizes, strides = tensor.shape[:-1], tensor.stride()
    stride = next((strides[i] for i in reversed(range(len(sizes))) if sizes[i] > 1), tensor.shape[-1])
    expected, even = stride, strides[-1] == 1 or tensor.shape[-1] == 1
    for size, have in zip(reversed(sizes), reversed(strides[:-1]), strict=True):
        even &= size <= 1 or have == expected
        expected *= size
    if tensor.numel() and (not even or (stride < tensor.shape[-1] and tensor.shape[:-1].numel() > 1)):
        raise ValueError(f"{op}: the rows of {name} must be dense and evenly spaced, got strides {strides}")
    return stride
