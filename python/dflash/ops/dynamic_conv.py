"""Convolutions over the rows of a block, whose weights depend on the row: those of a DFlash 2 layer."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from .checks import dense, expect, row_stride
from .norm import check_norm, front_sizes, new_behind
from .registry import Launcher, op


@op()
def dynamic_conv(launch: Launcher, x: Tensor, base: Tensor, dynamic: Tensor, front: Tensor | None = None) -> Tensor:
    """Convolve the rows of each block, in fp32, rounded once.

    ``out[t, c] = sum over i <= t of (base[i, c] + dynamic[t, i, c // size]) * x[t - i, c]`` with groups of
    ``size = hidden / groups`` channels. The rows of a sequence are one block, with zeros in front of it. A weight of
    zero adds nothing, not even a NaN or the sign of a zero: with weights of 1, 0, 0, ... the result is ``x``, bit for
    bit. A row's bits depend on the rows up to it in its block only.

    Args:
        x: ``[batch, rows, hidden]``, float32 or bfloat16 (float16 on CUDA).
        base: ``[width, hidden]``, the dtype of ``x``.
        dynamic: ``[batch, rows, width, groups]``, the dtype of ``x``; batch and rows may have any strides.
        front: as in `rms_norm`; no part of the convolution.

    Returns:
        A tensor like ``x``; with ``front`` ``[batch, front_rows + rows, hidden]``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    if not _convolution_fits(x, base, dynamic):
        _check_convolution("dynamic_conv", x, base, dynamic)
    sizes = front_sizes("dynamic_conv", x, front)
    dtype = launch.dtype("dynamic_conv", "x", x)
    x, base, dynamic = x.contiguous(), launch.aligned(base.contiguous()), _dense_weights(dynamic)
    (batch, rows, hidden), (width, groups) = x.shape, dynamic.shape[2:]
    out = new_behind(x, front)
    launch(
        "dynamic_conv", x, base, dynamic, dense(front), out, *dynamic.stride()[:2], batch * rows, rows, hidden, width,
        groups, *sizes, dtype,
    )  # fmt: skip
    return out


@op(mutates=("tap",))
def conv_add_rms_norm(
    launch: Launcher,
    x: Tensor,
    base: Tensor,
    dynamic: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    tap: Tensor | None = None,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute ``h = dynamic_conv(x) + residual`` and its RMSNorm: the bits of `dynamic_conv`, then `add_rms_norm`.

    Args:
        x: ``[batch, rows, hidden]``, float32 or bfloat16 (float16 on CUDA).
        base: ``[width, hidden]``, the dtype of ``x``.
        dynamic: ``[batch, rows, width, groups]``, as `dynamic_conv` takes it.
        residual: like ``x``.
        weight: ``[hidden]``, the dtype of ``x``: the norm's.
        eps: added to the mean square.
        tap: like ``x``, or None; written with ``h``. Its rows may be any one stride apart.
        zero_centered: as in `rms_norm`.

    Returns:
        ``(rms_norm(h), h)``, both like ``x``.

    Raises:
        ValueError: a shape does not fit, or the tap's rows are unevenly spaced. TypeError: a dtype does not fit.
    """
    name = "conv_add_rms_norm"
    if not _convolution_fits(x, base, dynamic):
        _check_convolution(name, x, base, dynamic)
    check_norm(name, x, weight)
    if not _C.fits(False, residual, x.shape, x.dtype):
        expect(name, "residual", residual, tuple(x.shape), x.dtype, "as x")
    tap_stride = 0
    if tap is not None:
        expect(name, "tap", tap, tuple(x.shape), x.dtype, "as x")
        tap_stride = row_stride(name, "tap", tap)
    dtype = launch.dtype(name, "x", x)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    base, dynamic = launch.aligned(base.contiguous()), _dense_weights(dynamic)
    (batch, rows, hidden), (width, groups) = x.shape, dynamic.shape[2:]
    out, total = torch.empty_like(x), torch.empty_like(x)
    launch(
        name, x, base, dynamic, residual, weight, out, total, tap, tap_stride, *dynamic.stride()[:2], batch * rows,
        rows, hidden, width, groups, eps, zero_centered, dtype,
    )  # fmt: skip
    return out, total


def _dense_weights(dynamic: Tensor) -> Tensor:
    """Return the tensor itself if the weights of a row are dense, whatever the other strides; else a copy."""
    (width, groups), (width_stride, group_stride) = dynamic.shape[2:], dynamic.stride()[2:]
    is_dense = (group_stride == 1 or groups == 1) and (width_stride == groups or width == 1)
    return dynamic if is_dense else dynamic.contiguous()


def _convolution_fits(x: Tensor, base: Tensor, dynamic: Tensor) -> bool:
    """Return True if a call is right: the short way past `_check_convolution`."""
    if not (x.dim() == 3 and dynamic.dim() == 4):
        return False
    (batch, rows, hidden), (width, groups), dtype = x.shape, dynamic.shape[2:], x.dtype
    return (
        min(width, groups, hidden) > 0
        and hidden % groups == 0
        and _C.fits(False, base, (width, hidden), dtype, dynamic, (batch, rows, width, groups), dtype)
    )


def _check_convolution(op: str, x: Tensor, base: Tensor, dynamic: Tensor) -> None:
    expect(op, "x", x, (None, None, None), x.dtype, "batch, rows, hidden")
    batch, rows, hidden = x.shape
    expect(op, "base", base, (None, hidden), x.dtype, "width, hidden")
    width = base.shape[0]
    if min(width, hidden) == 0:
        raise ValueError(f"{op}: base must be [width, hidden], neither 0, got {list(base.shape)}")
    expect(op, "dynamic", dynamic, (batch, rows, width, None), x.dtype, "batch, rows, width, groups")
    groups = dynamic.shape[3]
    if groups == 0 or hidden % groups:
        raise ValueError(f"{op}: dynamic must have a number of groups that divides hidden = {hidden}, got {groups}")
