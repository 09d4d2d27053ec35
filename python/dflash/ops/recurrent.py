"""Recurrent layers over a block of rows, of which only some will be kept."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from .checks import dense, expect, expect_contiguous, unit_stride
from .registry import Launcher, op


@op(mutates=("state", "saved_k", "saved_d", "saved_a"))
def gated_recurrence_(
    launch: Launcher,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    state: Tensor,
    saved_k: Tensor,
    saved_d: Tensor,
    saved_a: Tensor,
    pending: Tensor,
    keep: Tensor,
) -> Tensor:
    """Run a linear recurrence over rows and keep its state from before the rows that are still to be accepted.

    Per head and row, with ``a = exp(log_decay)``: ``S' = a S``, ``d = beta (v - S'^T k)`` (``d = v`` without beta),
    ``S = S' + k d^T``, ``out = S^T q``. That is the gated delta rule (arXiv 2412.06464, eq. 10; with a decay per
    channel KDA, arXiv 2510.26692), and without beta Mamba-2 (arXiv 2405.21060).

    First the ``pending`` accepted rows of the last pass are applied to the state from what was saved of them, to the
    very bits that it had when they ran. Then the rows run. The state takes up the first ``keep`` of them now; of the
    first ``min(rows, block)`` k, d and a are saved, for the next pass to apply. A row's bits depend on the state and
    the rows in front of it, never on how they were divided into passes. Rows that are not kept may hold NaN.

    Args:
        q: ``[batch, rows, key_heads, key_dim]`` float32, scaled.
        k: like ``q``; head h uses key head ``h // (heads / key_heads)``.
        v: ``[batch, rows, heads, value_dim]`` float32.
        log_decay: ``[batch, rows, heads]`` or ``[batch, rows, heads, key_dim]`` float32.
        beta: ``[batch, rows, heads]`` float32, or None.
        state: ``[batch, heads, key_dim, value_dim]`` float32, contiguous; written.
        saved_k: ``[batch, block, key_heads, key_dim]`` float32, contiguous; written.
        saved_d: ``[batch, block, heads, value_dim]`` float32, contiguous; written.
        saved_a: ``[batch, block, heads]`` or ``[batch, block, heads, key_dim]`` float32, contiguous; written.
        pending: ``[batch]`` int64, clamped to ``0 .. block``.
        keep: ``[batch]`` int64, clamped to ``0 .. rows``.

    Returns:
        ``[batch, rows, heads, value_dim]`` float32.

    Raises:
        ValueError: a shape or device does not fit, a written tensor is not contiguous, or key_dim is over 256 on a GPU.
        TypeError: a dtype does not fit.
    """
    if not _recurrence_fits(q, k, v, log_decay, beta, state, saved_k, saved_d, saved_a, pending, keep):
        _check_recurrence(q, k, v, log_decay, beta, state, saved_k, saved_d, saved_a, pending, keep)
    (batch, rows, key_heads, key_dim), (heads, value_dim) = q.shape, v.shape[2:]
    if key_dim > _C.MAX_RECURRENT_KEYS and not (launch.is_cpu or launch.is_fake):
        raise ValueError(
            f"gated_recurrence_: key_dim must be at most {_C.MAX_RECURRENT_KEYS} on a GPU, got {key_dim}. Use the CPU"
        )
    out = torch.empty_like(v, memory_format=torch.contiguous_format)  # half the time of new_empty
    inputs = [dense(x) for x in (q, k, v, log_decay, beta)]
    launch(
        "gated_recurrence", *inputs, state, saved_k, saved_d, saved_a, pending.contiguous(), keep.contiguous(), out,
        batch, rows, key_heads, heads, key_dim, value_dim, 1 if log_decay.dim() == 3 else key_dim, saved_k.shape[1],
        launch.counters(v.device),
    )  # fmt: skip
    return out


def _recurrence_fits(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, saved_k: Tensor,
    saved_d: Tensor, saved_a: Tensor, pending: Tensor, keep: Tensor,
) -> bool:  # fmt: skip
    """Return True if a call is right: the short way past `_check_recurrence`."""
    if not q.dim() == v.dim() == saved_k.dim() == 4:
        return False
    (batch, rows, key_heads, key_dim), (heads, value_dim), block = q.shape, v.shape[2:], saved_k.shape[1]
    decays, betas = (heads,) if log_decay.dim() == 3 else (heads, key_dim), () if beta is None else (beta,)
    return (
        min(key_heads, key_dim, heads, value_dim) > 0
        and heads % key_heads == 0
        and _C.fits(
            False, (q, k), (batch, rows, key_heads, key_dim), torch.float32, v, (batch, rows, heads, value_dim),
            torch.float32, log_decay, (batch, rows, *decays), torch.float32, betas, (batch, rows, heads),
            torch.float32, (pending, keep), (batch,), torch.int64,
        )
        and _C.fits(
            True, state, (batch, heads, key_dim, value_dim), torch.float32, saved_k,
            (batch, block, key_heads, key_dim), torch.float32, saved_d, (batch, block, heads, value_dim),
            torch.float32, saved_a, (batch, block, *decays), torch.float32,
        )
    )  # fmt: skip


def _check_recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, saved_k: Tensor,
    saved_d: Tensor, saved_a: Tensor, pending: Tensor, keep: Tensor,
) -> None:  # fmt: skip
    op = "gated_recurrence_"
    expect(op, "q", q, (None, None, None, None), torch.float32, "batch, rows, key_heads, key_dim")
    batch, rows, key_heads, key_dim = q.shape
    expect(op, "v", v, (batch, rows, None, None), torch.float32, "batch, rows, heads, value_dim")
    heads, value_dim = v.shape[2:]
    if min(key_heads, key_dim, value_dim) == 0 or heads == 0 or heads % key_heads:
        raise ValueError(
            f"{op}: v must have a multiple of the heads of q, none of them empty, "
            f"got q {list(q.shape)} and v {list(v.shape)}"
        )
    expect(op, "saved_k", saved_k, (batch, None, key_heads, key_dim), torch.float32, "batch, block, key_heads, key_dim")
    block = saved_k.shape[1]
    channels, names = ((), "") if log_decay.dim() == 3 else ((key_dim,), ", key_dim")
    for name, tensor, shape, words in (
        ("k", k, q.shape, "batch, rows, key_heads, key_dim"),
        ("log_decay", log_decay, (batch, rows, heads, *channels), f"batch, rows, heads{names}"),
        ("beta", beta, (batch, rows, heads), "batch, rows, heads"),
        ("state", state, (batch, heads, key_dim, value_dim), "batch, heads, key_dim, value_dim"),
        ("saved_d", saved_d, (batch, block, heads, value_dim), "batch, block, heads, value_dim"),
        ("saved_a", saved_a, (batch, block, heads, *channels), f"batch, block, heads{names}"),
    ):
        if tensor is not None:
            expect(op, name, tensor, tuple(shape), torch.float32, words)
    for name, tensor in (("state", state), ("saved_k", saved_k), ("saved_d", saved_d), ("saved_a", saved_a)):
        expect_contiguous(op, name, tensor)
    expect(op, "pending", pending, (batch,), torch.int64, "batch")
    expect(op, "keep", keep, (batch,), torch.int64, "batch")


@op(mutates=("window",))
def causal_conv_(
    launch: Launcher,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    window: Tensor,
    pending: Tensor,
    keep: Tensor,
) -> Tensor:
    """Convolve rows with the inputs in front of them, channel by channel, and keep those inputs.

    ``y[t] = bias + sum_j weight[:, j] * input[t - width + 1 + j]``, in fp32 and in this order, then SiLU if asked for,
    rounded once. The window holds the ``width - 1`` inputs in front of the last pass' rows and then the first of these
    rows: the context of this pass starts at slot ``pending``. The context that is kept is what is in front of
    row ``keep``, and the first ``min(rows, block)`` rows are stored after it. Rows that are not kept may hold NaN.

    Args:
        x: ``[batch, rows, channels]``, float32 or bfloat16 (float16 on CUDA), any strides.
        weight: ``[channels, width]``, the dtype of ``x``; the last column meets the row itself.
        bias: ``[channels]``, the dtype of ``x``, or None.
        silu: apply ``y / (1 + exp(-y))``.
        window: ``[batch, width - 1 + block, channels]``, the dtype of ``x``, contiguous; written.
        pending: ``[batch]`` int64, clamped to ``0 .. block``: rows of the last pass that were accepted since.
        keep: ``[batch]`` int64, clamped to ``0 .. rows``.

    Returns:
        ``[batch, rows, channels]``, the dtype of ``x``.

    Raises:
        ValueError: a shape or device does not fit, or the window is not contiguous. TypeError: a dtype does not fit.
    """
    if not _convolution_fits(x, weight, bias, window, pending, keep):
        _check_convolution(x, weight, bias, window, pending, keep)
    (batch, rows, channels), width = x.shape, weight.shape[1]
    dtype = launch.dtype("causal_conv_", "x", x)
    x = unit_stride(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(
        "causal_conv", x, weight.contiguous(), dense(bias), window, pending.contiguous(), keep.contiguous(), out,
        *x.stride()[:2], batch, rows, channels, width, window.shape[1] - width + 1, silu, dtype,
    )  # fmt: skip
    return out


def _convolution_fits(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, pending: Tensor, keep: Tensor
) -> bool:
    """Return True if a call is right: the short way past `_check_convolution`."""
    if not (x.dim() == window.dim() == 3 and weight.dim() == 2):
        return False
    (batch, _, channels), (_, slots, _), width, dtype = x.shape, window.shape, weight.shape[1], x.dtype
    return (
        0 < width <= slots + 1
        and _C.fits(
            False, weight, (channels, width), dtype, () if bias is None else (bias,), (channels,), dtype,
            (pending, keep), (batch,), torch.int64,
        )
        and _C.fits(True, window, (batch, slots, channels), dtype)
    )  # fmt: skip


def _check_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, window: Tensor, pending: Tensor, keep: Tensor
) -> None:
    op = "causal_conv_"
    expect(op, "x", x, (None, None, None), x.dtype, "batch, rows, channels")
    batch, _, channels = x.shape
    expect(op, "weight", weight, (channels, None), x.dtype, "channels, width")
    width = weight.shape[1]
    if bias is not None:
        expect(op, "bias", bias, (channels,), x.dtype, "channels")
    expect(op, "window", window, (batch, None, channels), x.dtype, "batch, width - 1 + block, channels")
    expect_contiguous(op, "window", window)
    if width == 0:
        raise ValueError(f"{op}: weight must have a width of at least 1, got {list(weight.shape)}")
    if window.shape[1] < width - 1:
        raise ValueError(
            f"{op}: window must have at least the {width} - 1 inputs in front of a row, got {list(window.shape)}"
        )
    expect(op, "pending", pending, (batch,), torch.int64, "batch")
    expect(op, "keep", keep, (batch,), torch.int64, "batch")
