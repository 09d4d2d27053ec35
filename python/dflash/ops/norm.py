"""RMSNorm with and without a residual, gates, and the fusion of target features."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from . import reference
from .checks import dense, expect, row_stride, unit_stride
from .linear import check_product, check_squares, linear, linears, run_kernel, skinny
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
) -> Tensor:
    """Compute ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32, rounded once.

    Args:
        x: ``[..., hidden]``, float32 or bfloat16; ``[batch, rows, hidden]`` with ``counts``.
        weight: ``[hidden]``, the dtype of ``x``.
        eps: added to the mean square.
        counts: ``[batch]`` int64. Rows at or past the count are never read and come back as zeros.
        zero_centered: multiply by ``1 + weight`` instead, as Qwen3-Next and Qwen3.5 store it.

    Returns:
        A tensor like ``x``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    check_norm("rms_norm", x, weight)
    if counts is not None:
        if x.dim() != 3:
            raise ValueError(f"rms_norm: with counts x must be [batch, rows, hidden], got {x.dim()} dimensions")
        expect("rms_norm", "counts", counts, (x.shape[0],), torch.int64, "batch")
    dtype = launch.dtype("rms_norm", "x", x)
    x, weight, counts = x.contiguous(), weight.contiguous(), dense(counts)
    out, hidden = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // hidden
    launch(
        "rms_norm", x, None, weight, counts, out, None, None, 0, rows, hidden, x.shape[-2], eps, zero_centered, dtype
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

    Returns:
        ``(rms_norm(h), h)``, both like ``x``; ``h`` is rounded to the dtype before it is normed.

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
    dtype = launch.dtype("add_rms_norm", "x", x)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total, hidden = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    rows = x.numel() // hidden
    launch(
        "rms_norm", x, residual, weight, None, out, total, tap, tap_stride, rows, hidden, rows, eps, zero_centered,
        dtype,
    )  # fmt: skip
    return out, total


@op()
def silu_mul(launch: Launcher, gate_up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` for ``gate_up = [gate, up]`` side by side, in fp32, rounded once.

    Args:
        gate_up: ``[..., 2 * width]``, float32 or bfloat16.

    Returns:
        ``[..., width]``, the dtype of ``gate_up``.

    Raises:
        ValueError: the last dimension is odd. TypeError: the dtype does not fit.
    """
    if gate_up.dim() < 2 or gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul: gate_up must be [..., 2 * width], got {list(gate_up.shape)}")
    dtype = launch.dtype("silu_mul", "gate_up", gate_up)
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    launch("silu_mul", gate_up, out, out.numel() // max(width, 1), width, dtype)
    return out


@op()
def swiglu(
    launch: Launcher, x: Tensor, gate: Tensor, up: Tensor, prefetch: bool = False, squares: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Compute ``silu(x @ gate.T) * (x @ up.T)``: `silu_mul` of `linears`, on CUDA in one kernel for up to 256 rows.

    Both products are rounded before they are multiplied. What is said of a row's bits in `linear` holds here too.

    Args:
        x: ``[..., rows, in]``, as for `linear`.
        gate: ``[out, in]``, the dtype of ``x``.
        up: like ``gate``.
        prefetch: as for `linear`.
        squares: as for `linears`.
        eps: as for `linears`.

    Returns:
        ``[..., rows, out]``, the dtype of ``x``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    for name, weight in (("gate", gate), ("up", up)):
        check_product("swiglu", x, name, weight)
    expect("swiglu", "up", up, tuple(gate.shape), x.dtype, "as gate")
    check_squares("swiglu", x, squares)
    launch.dtype("swiglu", "x", x)
    if launch.is_fake:
        return x.new_empty(*x.shape[:-1], gate.shape[0])
    out = run_kernel(launch, "swiglu", x, [gate, up], [None, None], prefetch, True, squares, eps)
    if out is None:
        return silu_mul.body(launch, linears.body(launch, x, [gate, up], (), prefetch, squares, eps))
    return out


@op()
def sigmoid_mul(launch: Launcher, x: Tensor, gate: Tensor) -> Tensor:
    """Compute ``x * sigmoid(gate)`` per head, in fp32, rounded once: attention with an output gate.

    Args:
        x: ``[rows, heads, width]``, float32 or bfloat16 (on CUDA float16 too).
        gate: like ``x``, any strides.

    Returns:
        A tensor like ``x``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    expect("sigmoid_mul", "x", x, (None, None, None), x.dtype, "rows, heads, width")
    expect("sigmoid_mul", "gate", gate, tuple(x.shape), x.dtype, "as x")
    dtype = launch.dtype("sigmoid_mul", "x", x)
    x, gate = x.contiguous(), unit_stride(gate)
    out = torch.empty_like(x)
    launch("sigmoid_mul", x, gate, out, *gate.stride()[:2], *x.shape, dtype)
    return out


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
