"""Products of a few rows with one or several weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C
from . import reference, switches
from .checks import dense, expect
from .registry import Launcher, op

_SKINNY = {getattr(torch, dtype): rows for dtype, rows in _C.SKINNY_ROWS.items()}


def skinny(rows: int, dtype: torch.dtype) -> bool:
    """Return True if a product of this many rows goes through the kernel of `linear` on CPU, not torch."""
    return rows <= _SKINNY.get(dtype, 0)


@op()
def linear(
    launch: Launcher, x: Tensor, weight: Tensor, bias: Tensor | None = None, prefetch: bool = False,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``x @ weight.T + bias`` for a few rows, sums in fp32, rounded once.

    A row's bits depend neither on its place nor on how many rows there are: on CPU up to 512 rows in float32 and 64 in
    bfloat16, on CUDA up to 256 rows in bfloat16 and float16 where ``in`` is a multiple of 8. Anything else goes through
    torch.

    Args:
        x: ``[..., rows, in]``, float32 or bfloat16 (on CUDA float16 too).
        weight: ``[out, in]``, the dtype of ``x``, or int8 with ``scales``.
        bias: ``[out]``, the dtype of ``x``, or None.
        prefetch: start to read ``weight`` before what is queued ahead on the stream has ended, on CUDA from compute
            capability 9.0. Only for weights at rest: one that an operation under way still writes may be read too
            early, and nothing would say so. ``DFLASH_PREFETCH=0`` in the environment turns it off.
        scales: ``[out]`` float32: the weight is int8, see `Int8Weight`, the rows are rounded to 8 bits, where 256
            adjacent elements share a scale (`round_rows`), and each channel's sum is multiplied by its scale before the
            bias is added. On CPU the kernel takes any number of rows, and the bits are those of every instruction set.
            None for other weights.

    Returns:
        ``[..., rows, out]``, the dtype of ``x``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    check_product("linear", x, "weight", weight, "bias", bias, is_int8=scales is not None)
    check_scales("linear", [weight], scales)
    return _products(launch, "linear", x, [weight], [bias], prefetch, scales=scales)


@op()
def linears(
    launch: Launcher, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), prefetch: bool = False,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `linear` of the same rows with several weights, the results side by side, in one kernel.

    Args:
        x: ``[..., rows, in]``, as for `linear`.
        weights: one to four of ``[out, in]``, each with an ``out`` of its own, the dtype of ``x``.
        biases: ``[out]`` for each weight, or none at all.
        prefetch: as for `linear`.
        scales: ``[sum of out]`` float32, those of all weights, which are int8 then: see `linear`.

    Returns:
        ``[..., rows, sum of out]``, the dtype of ``x``.

    Raises:
        ValueError: a shape or a number of tensors does not fit. TypeError: a dtype does not fit.
    """
    if not 1 <= len(weights) <= _C.MAX_LINEAR_WEIGHTS:
        raise ValueError(f"linears: weights must be 1 to {_C.MAX_LINEAR_WEIGHTS} tensors, got {len(weights)}")
    if len(biases) not in (0, len(weights)):
        raise ValueError(f"linears: biases must be none or one for each of {len(weights)} weights, got {len(biases)}")
    for i, weight in enumerate(weights):
        bias = biases[i] if biases else None
        check_product("linears", x, f"weights[{i}]", weight, f"biases[{i}]", bias, is_int8=scales is not None)
    check_scales("linears", weights, scales)
    return _products(launch, "linears", x, weights, biases or [None] * len(weights), prefetch, scales)


def check_scales(op: str, weights: Sequence[Tensor], scales: Tensor | None) -> None:
    """Raise unless ``scales`` is None or has one for each row of these weights."""
    if scales is not None:
        expect(
            op, "scales", scales, (sum(weight.shape[0] for weight in weights),), torch.float32, "rows of the weights"
        )


def check_product(
    op: str, x: Tensor, name: str, weight: Tensor, bias_name: str = "", bias: Tensor | None = None,
    is_int8: bool = False,
) -> None:  # fmt: skip
    """Raise unless ``x @ weight.T + bias`` is possible."""
    if weight.dim() != 2:
        raise ValueError(f"{op}: {name} must be [out, in], got {weight.dim()} dimensions")
    if x.dim() < 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{op}: x must be [..., rows, {weight.shape[1]}] as {name} says, got {list(x.shape)}")
    if is_int8 and weight.dtype != torch.int8:
        raise TypeError(f"{op}: {name} must be torch.int8 where scales are given, got {weight.dtype}")
    if not is_int8 and weight.dtype != x.dtype:
        raise TypeError(f"{op}: {name} must be {x.dtype} as x is, got {weight.dtype}")
    if bias is not None:
        expect(op, bias_name, bias, (weight.shape[0],), x.dtype, "out")


def _merged(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Return weights that lie one after another in one storage as a single one, which takes one product."""
    uneven = len({bias is None for bias in biases}) > 1
    if len(weights) == 1 or uneven or not all(map(_follows, weights, weights[1:])):
        return weights, biases
    merged = weights[0].as_strided((sum(w.shape[0] for w in weights), weights[0].shape[1]), weights[0].stride())
    return [merged], [None if biases[0] is None else torch.cat(list(biases))]


def _follows(first: Tensor, second: Tensor) -> bool:
    """Return True if ``second`` begins where ``first`` ends, both contiguous."""
    same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    end = first.storage_offset() + first.numel()
    return same and first.is_contiguous() and second.is_contiguous() and second.storage_offset() == end


def _products(
    launch: Launcher, op: str, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], prefetch: bool,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``x @ weight.T + bias`` for each, side by side, ``[..., rows, sum of out]``; the operands fit."""
    launch.dtype(op, "x", x)
    if launch.is_fake:
        return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))
    out = run_kernel(launch, op, x, weights, biases, prefetch, scales=scales)
    if out is not None:
        return out
    operands = _merged(weights, biases) if scales is None else (weights, biases)
    return reference.linears(x, *operands, scales=scales)


def run_kernel(
    launch: Launcher, op: str, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], prefetch: bool,
    gated: bool = False, scales: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Run the kernel of `linear` on operands that fit; None if it does not take them.

    Only CUDA's can be gated, and only the CPU's takes ``scales``.
    """
    # 1. See whether the kernel takes this product
    dtype, features = launch.dtype(op, "x", x), [weight.shape[0] for weight in weights]
    width, rows = x.shape[-1], x.shape[:-1].numel()
    splits, workspace = 0, None
    if launch.is_cpu:
        takes = scales is not None or skinny(rows, x.dtype)
        splits = int(takes and width > 0 and not gated)
    elif scales is None and all(weight.is_contiguous() for weight in weights):
        splits, workspace = launch.workspace("linear", x.device, dtype, rows, width, weights, features, gated)
    if splits == 0:
        return None
    # 2. Make what it reads contiguous, and run it
    x = launch.aligned(x.contiguous())
    weights, biases = [weight.contiguous() for weight in weights], [dense(bias) for bias in biases]
    weight_scales = [None] * len(weights) if scales is None else scales.contiguous().split(features)
    out_features = features[0] if gated else sum(features)
    out = x.new_empty(*x.shape[:-1], out_features)
    counters = None if workspace is None else launch.counters(x.device)
    launch(
        "linear", x, len(weights), weights, weight_scales, biases, features, out, rows, width, out_features, workspace,
        counters, splits, prefetch and switches.PREFETCH, gated, dtype,
    )  # fmt: skip
    return out
