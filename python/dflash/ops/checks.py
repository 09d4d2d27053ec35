"""Checks of the tensors that an op is given. Each error says what must hold and what came."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


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
    if tensor.dim() != len(shape):
        raise ValueError(f"{op}: {name} must be [{names}], got {tensor.dim()} dimensions")
    for have, want in zip(tensor.shape, shape, strict=True):
        if want is not None and have != want:
            wanted = ", ".join("*" if size is None else str(size) for size in shape)
            raise ValueError(f"{op}: {name} must be [{names}] = [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")


def fit(*wanted: tuple[Tensor, tuple, torch.dtype]) -> bool:
    """Return True if every tensor has its shape and dtype: the short way past `expect`, which names misfits."""
    for tensor, shape, dtype in wanted:  # noqa: SIM110, a generator costs more than the checks
        if tensor.shape != shape or tensor.dtype is not dtype:
            return False
    return True


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


def expect_rope(op: str, positions: Tensor, cos: Tensor, sin: Tensor, batch: int, rows: int, head_dim: int) -> None:
    """Raise unless positions and angles fit ``[batch, rows]`` rows with heads of ``head_dim``."""
    expect(op, "positions", positions, (batch, rows), torch.int64, "batch, rows")
    expect(op, "cos", cos, (batch, rows, None), torch.float32, "batch, rows, rotary / 2")
    expect(op, "sin", sin, (batch, rows, cos.shape[-1]), torch.float32, "batch, rows, rotary / 2")
    if 2 * cos.shape[-1] > head_dim:
        raise ValueError(f"{op}: cos may have at most head_dim / 2 = {head_dim // 2} columns, got {cos.shape[-1]}")


def dense(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor itself if it is contiguous (or None), else a copy."""
    return None if tensor is None else tensor.contiguous()


def unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor itself if its last dimension is dense, whatever the other strides; else a copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
