"""RMSNorm with and without a residual, and the fusion of target features."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from . import reference
from .checks import dense, expect, row_stride
from .linear import linear, skinny
from .registry import Launcher, op


def check_norm(op: str, x: Tensor, weight: Tensor) -> None:
    """Raise unless ``weight`` scales the last dimension of ``x``."""
    if x.dim() < 2 or weight.shape != x.shape[-1:] or x.shape[-1] == 0:
        raise ValueError(
            f"{op}: weight must be [hidden] for x [..., hidden], got {list(weight.shape)} for {list(x.shape)}"
        )
    if weight.dtype != x.dtype:
        raise TypeError(f"{op}: weight must be {x.dtype} as x is, got {weight.dtype}")


@op()
def rms_norm(
    launch: Launcher,
    x: Tensor,
    weight: Tensor,
    eps: float,
    counts: Tensor | None = None,
    zero_centered: bool = False,
    front: Tensor | None = None,
) -> Tensor:
    """Compute ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32, rounded once.

    Args:
        x: ``[..., hidden]``, float32 or bfloat16; ``[batch, rows, hidden]`` with ``counts``.
        weight: ``[hidden]``, the dtype of ``x``.
        eps: added to the mean square.
        counts: ``[batch]`` int64. Rows at or past the count are never read and come back as zeros.
        zero_centered: multiply by ``1 + weight`` instead, as Qwen3-Next and Qwen3.5 store it.
        front: ``[batch, front_rows, hidden]``, the dtype of ``x [batch, rows, hidden]``, or None: rows that come in
            front of the normed ones, as they are.

    Returns:
        A tensor like ``x``; with ``front`` ``[batch, front_rows + rows, hidden]``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    check_norm("rms_norm", x, weight)
    if counts is not None:
        if x.dim() != 3:
            raise ValueError(f"rms_norm: with counts x must be [batch, rows, hidden], got {x.dim()} dimensions")
        expect("rms_norm", "counts", counts, (x.shape[0],), torch.int64, "batch")
    sizes = front_sizes("rms_norm", x, front)
    dtype = launch.dtype("rms_norm", "x", x)
    x, weight, counts = x.contiguous(), weight.contiguous(), dense(counts)
    out, hidden = new_behind(x, front), x.shape[-1]
    rows = x.numel() // hidden
    launch(
        "rms_norm", x, None, weight, counts, dense(front), out, None, None, 0, rows, hidden, x.shape[-2], *sizes, eps,
        zero_centered, dtype,
    )  # fmt: skip
    return out


@op(mutates=("tap",))
def add_rms_norm(
    launch: Launcher,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    tap: Tensor | None = None,
    zero_centered: bool = False,
    front: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``h = x + residual`` and its RMSNorm.

    Args:
        x: ``[..., hidden]``, float32 or bfloat16.
        residual: like ``x``.
        weight: ``[hidden]``, the dtype of ``x``.
        eps: added to the mean square.
        tap: like ``x``, or None; written with ``h``. Its rows may be any one stride apart, as the columns of one tap
            among several are.
        zero_centered: as in `rms_norm`.
        front: as in `rms_norm`.

    Returns:
        ``(rms_norm(h), h)``, both like ``x`` but for ``front``; ``h`` is rounded to the dtype before it is normed.

    Raises:
        ValueError: a shape does not fit, or the tap's rows are unevenly spaced. TypeError: a dtype does not fit.
    """
    check_norm("add_rms_norm", x, weight)
    if not _C.fits(False, residual, x.shape, x.dtype):
        expect("add_rms_norm", "residual", residual, tuple(x.shape), x.dtype, "as x")
    tap_stride = 0
    if tap is not None:
        expect("add_rms_norm", "tap", tap, tuple(x.shape), x.dtype, "as x")
        tap_stride = row_stride("add_rms_norm", "tap", tap)
    sizes = front_sizes("add_rms_norm", x, front)
    dtype = launch.dtype("add_rms_norm", "x", x)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total, hidden = new_behind(x, front), torch.empty_like(x), x.shape[-1]
    rows = x.numel() // hidden
    launch(
        "rms_norm", x, residual, weight, None, dense(front), out, total, tap, tap_stride, rows, hidden, x.shape[-2],
        *sizes, eps, zero_centered, dtype,
    )  # fmt: skip
    return out, total


def front_sizes(op: str, x: Tensor, front: Tensor | None) -> tuple[int, int]:
    """Check rows that come in front of those of ``x``; return sequences and rows of each, 0 for None."""
    if front is None:
        return 0, 0
    if x.dim() != 3:
        raise ValueError(f"{op}: with front x must be [batch, rows, hidden], got {x.dim()} dimensions")
    batch, _, hidden = x.shape
    expect(op, "front", front, (batch, None, hidden), x.dtype, "batch, front_rows, hidden")
    return batch, front.shape[1]


def new_behind(x: Tensor, front: Tensor | None) -> Tensor:
    """Return an uninitialized tensor like ``x`` with room for the rows in front."""
    if front is None:
        return torch.empty_like(x)
    batch, rows, hidden = x.shape
    return x.new_empty(batch, front.shape[1] + rows, hidden)


@op()
def fuse_features(
    launch: Launcher, context: Tensor, num_context: Tensor, fc_weight: Tensor, norm_weight: Tensor, eps: float
) -> Tensor:
    """Fuse target features for the drafter: ``rms_norm(context @ fc_weight.T)``, rounded once in between.

    Args:
        context: ``[batch, rows, taps * hidden]``, float32 or bfloat16: the tapped states side by side.
        num_context: ``[batch]`` int64. Rows at or past it may hold anything and come back as zeros.
        fc_weight: ``[hidden, taps * hidden]``, the dtype of ``context``.
        norm_weight: ``[hidden]``, the dtype of ``context``.
        eps: added to the mean square.

    Returns:
        ``[batch, rows, hidden]``, the dtype of ``context``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    name = "fuse_features"
    if fc_weight.dim() != 2:
        raise ValueError(f"{name}: fc_weight must be [hidden, taps * hidden], got {fc_weight.dim()} dimensions")
    hidden, width = fc_weight.shape
    expect(name, "context", context, (None, None, width), fc_weight.dtype, "batch, rows, taps * hidden")
    expect(name, "num_context", num_context, (context.shape[0],), torch.int64, "batch")
    expect(name, "norm_weight", norm_weight, (hidden,), fc_weight.dtype, "hidden")
    launch.dtype(name, "context", context)
    if launch.is_cpu and not skinny(context.shape[:-1].numel(), context.dtype):
        context = reference.live_rows(context, num_context)  # torch's product may let rows meet: see reference.linear
    fused = linear.body(launch, context, fc_weight)
    return rms_norm.body(launch, fused, norm_weight, eps, num_context)
