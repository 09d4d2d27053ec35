"""Gates: SiLU of an MLP's gate, with and without its products, and the output gate of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect, unit_stride
from .linear import check_product, check_scales, linears, run_kernel
from .registry import Launcher, op


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
    launch: Launcher, x: Tensor, gate: Tensor, up: Tensor, prefetch: bool = False,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``silu(x @ gate.T) * (x @ up.T)``: `silu_mul` of `linears`, on CUDA in one kernel for up to 256 rows.

    Both products are rounded before they are multiplied. What is said of a row's bits in `linear` holds here too.

    Args:
        x: ``[..., rows, in]``, as for `linear`.
        gate: ``[out, in]``, the dtype of ``x``.
        up: like ``gate``.
        prefetch: as for `linear`.
        scales: ``[2 * out]``, as for `linears`.

    Returns:
        ``[..., rows, out]``, the dtype of ``x``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    for name, weight in (("gate", gate), ("up", up)):
        check_product("swiglu", x, name, weight, is_int8=scales is not None)
    expect("swiglu", "up", up, tuple(gate.shape), gate.dtype, "as gate")
    check_scales("swiglu", [gate, up], scales)
    launch.dtype("swiglu", "x", x)
    if launch.is_fake:
        return x.new_empty(*x.shape[:-1], gate.shape[0])
    out = run_kernel(launch, "swiglu", x, [gate, up], [None, None], prefetch, True, scales)
    if out is None:
        return silu_mul.body(launch, linears.body(launch, x, [gate, up], (), prefetch, scales))
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
    if x.dim() != 3:
        expect("sigmoid_mul", "x", x, (None, None, None), x.dtype, "rows, heads, width")
    expect("sigmoid_mul", "gate", gate, tuple(x.shape), x.dtype, "as x")
    dtype = launch.dtype("sigmoid_mul", "x", x)
    x, gate = x.contiguous(), unit_stride(gate)
    out = torch.empty_like(x)
    launch("sigmoid_mul", x, gate, out, *gate.stride()[:2], *x.shape, dtype)
    return out
