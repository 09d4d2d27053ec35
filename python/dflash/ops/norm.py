"""RMSNorm, the convolutions over the rows of a block, and what a drafter's pass over a block begins with."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .contract import Scope
from .formats import DENSE
from .linear import linear
from .registry import Launcher, op, skinny


@op(
    "x[batch.., rows_per_sequence, hidden] weight[hidden] counts[batch]:i64 front[batch, front_rows, hidden]",
    "out[batch.., front_rows + rows_per_sequence, hidden]",
    where="hidden >= 1; ndim(x) == 3 or not (has(counts) or has(front))",
    derived="rows = batch * rows_per_sequence; sequences = batch",
)
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, counts: Tensor | None = None, zero_centered: bool = False,
    front: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32, rounded once.

    Args:
        x: ``[..., hidden]``; ``[batch, rows, hidden]`` with ``counts`` or ``front``.
        weight: ``[hidden]``; ``eps`` is added to the mean square.
        counts: ``[batch]``. Rows at or past the count are never read and come back as zeros.
        zero_centered: multiply by ``1 + weight`` instead, as Qwen3-Next and Qwen3.5 store it.
        front: ``[batch, front_rows, hidden]``: rows that come before the normed ones, as they are.

    Returns:
        A tensor like ``x``; with ``front`` ``[batch, front_rows + rows, hidden]``.
    """


@op(
    "x[batch.., rows_per_sequence, hidden] residual[batch.., rows_per_sequence, hidden] weight[hidden] "
    "tap[batch.., rows_per_sequence, hidden]!= front[batch, front_rows, hidden]",
    "out[batch.., front_rows + rows_per_sequence, hidden] residual_out[batch.., rows_per_sequence, hidden]",
    where="hidden >= 1; ndim(x) == 3 or not has(front)",
    derived="rows = batch * rows_per_sequence; sequences = batch; tap_stride = row_stride(tap)",
    kernel="rms_norm",
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, tap: Tensor | None = None, zero_centered: bool = False,
    front: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``h = x + residual``, rounded to the dtype, and its RMSNorm.

    Args:
        x, residual: ``[..., hidden]``. ``weight``, ``eps``, ``zero_centered`` and ``front`` are as in `rms_norm`.
        tap: like ``x``; written with ``h``. Its rows may be any one stride apart, as the columns of one tap are.

    Returns:
        ``(rms_norm(h), h)``, both like ``x`` but for ``front``.
    """


_CONVOLUTION = "x[batch, block_rows, hidden] base[width, hidden] dynamic[batch, block_rows, width, groups]~2 "
_CONVOLVES = "width >= 1 and groups >= 1 and hidden >= 1; hidden % groups == 0"
_STRIDES = (
    "rows = batch * block_rows; dynamic_stride_block = stride(dynamic, 0); dynamic_stride_row = stride(dynamic, 1);"
)


def _align_base(launch: Launcher, s: Scope) -> None:
    s.base = launch.aligned(s.base)


@op(
    _CONVOLUTION + "front[batch, front_rows, hidden]",
    "out[batch, front_rows + block_rows, hidden]",
    where=_CONVOLVES,
    derived=_STRIDES + "sequences = batch",
    prepare=_align_base,
)
def dynamic_conv(x: Tensor, base: Tensor, dynamic: Tensor, front: Tensor | None = None) -> Tensor:
    """Convolve the rows of each block with weights that depend on the row (DFlash 2), in fp32, rounded once.

    ``out[t, c] = sum over i <= t of (base[i, c] + dynamic[t, i, c // size]) * x[t - i, c]`` with groups of ``size =
    hidden / groups`` channels; before the first row are zeros. A weight of zero adds nothing, not even a NaN or the
    sign of a zero.

    Args:
        x: ``[batch, rows, hidden]``, one block per sequence.
        base: ``[width, hidden]``.
        dynamic: ``[batch, rows, width, groups]``; batch and rows may have any strides.
        front: as in `rms_norm`; no part of the convolution.

    Returns:
        A tensor like ``x``; with ``front`` ``[batch, front_rows + rows, hidden]``.
    """


@op(
    _CONVOLUTION + "residual[batch, block_rows, hidden] weight[hidden] tap[batch, block_rows, hidden]!=",
    "out[batch, block_rows, hidden] residual_out[batch, block_rows, hidden]",
    where=_CONVOLVES,
    derived=_STRIDES + "tap_stride = row_stride(tap)",
    prepare=_align_base,
)
def conv_add_rms_norm(
    x: Tensor, base: Tensor, dynamic: Tensor, residual: Tensor, weight: Tensor, eps: float, tap: Tensor | None = None,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``h = dynamic_conv(x) + residual`` and its RMSNorm: the bits of `dynamic_conv`, then `add_rms_norm`.

    Args:
        x, residual: ``[batch, rows, hidden]``. ``base`` and ``dynamic`` are as in `dynamic_conv`, the rest as in
            `add_rms_norm`.

    Returns:
        ``(rms_norm(h), h)``, both like ``x``.
    """


def _fuse(launch: Launcher, s: Scope) -> Tensor:
    context = s.context
    if launch.is_cpu and not skinny(context.shape[:-1].numel(), context.dtype):
        context = reference.live_rows(context, s.num_context)  # torch's product may let rows meet: see reference.linear
    fused = linear.op.call(launch, context, s.fc_weight, None, False, None, DENSE.name)
    return rms_norm.op.call(launch, fused, s.norm_weight, s.eps, s.num_context, False, None)


@op(
    "context[batch, rows, width] num_context[batch]:i64 fc_weight[hidden, width] norm_weight[hidden]",
    "out[batch, rows, hidden]",
    where="hidden >= 1",
    kernel="linear",
    body=_fuse,
)
def fuse_features(context: Tensor, num_context: Tensor, fc_weight: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """Fuse target features for the drafter: ``rms_norm(context @ fc_weight.T)``, rounded once in between.

    Args:
        context: ``[batch, rows, taps * hidden]``: the tapped states side by side.
        num_context: ``[batch]``. Rows at or past it may hold anything and come back as zeros.
        fc_weight: ``[hidden, taps * hidden]``.
        norm_weight: ``[hidden]``; ``eps`` is added to the mean square.

    Returns:
        ``[batch, rows, hidden]``.
    """


@op(
    "tokens[batch, capacity]:i64 length[batch]:i64 drafts[batch, num_drafts]:i64 table[vocab, hidden]~ "
    "mask_embedding[hidden]",
    "embeds[batch, rows, hidden] anchor[batch]:i64 positions[batch, num_drafts]:i64",
    where="capacity >= 1 and vocab >= 1 and hidden >= 1; num_drafts >= 0; 0 <= rows <= num_drafts + 1; "
    "has(mask_embedding) or 0 <= mask_id < vocab",
    derived="table_stride = stride(table, 0)",
)
def draft_rows(
    tokens: Tensor, length: Tensor, drafts: Tensor | None, table: Tensor, mask_id: int, num_drafts: int, rows: int,
    mask_embedding: Tensor | None = None, scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Embed each sequence's last token, the anchor, and after it its drafts, or masks where there are none yet.

    Args:
        tokens: ``[batch, capacity]``; ``length [batch]`` is the place of each anchor, clamped to 0 .. ``capacity - 1``.
        drafts: ``[batch, num_drafts]``, or None for masks.
        table: ``[vocab, hidden]``. An id outside of it counts as the nearest.
        mask_id: the mask's id, which means ``mask_embedding [hidden]``; None for the table's.
        num_drafts: positions that are drafted; ``rows`` of the result are at most ``num_drafts + 1``.
        scale: every embedding is multiplied by it, in fp32, and rounded.

    Returns:
        ``(embeds [batch, rows, hidden], anchor [batch], positions [batch, num_drafts])``, the positions of the drafts:
        ``length + 1``, ``length + 2``, ...
    """
