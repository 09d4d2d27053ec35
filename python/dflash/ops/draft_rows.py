"""What a drafter's pass over a block begins with."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from .checks import dense, expect, unit_stride
from .registry import Launcher, op


@op()
def draft_rows(
    launch: Launcher,
    tokens: Tensor,
    length: Tensor,
    drafts: Tensor | None,
    table: Tensor,
    mask_id: int,
    num_drafts: int,
    rows: int,
    mask_embedding: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Embed a block of masks after each sequence's last token.

    Row 0 is that token, the anchor, and row i is draft i - 1, or the mask where there are no drafts yet.

    Args:
        tokens: ``[batch, capacity]`` int64.
        length: ``[batch]`` int64, the place of each anchor among the tokens, clamped to 0 .. ``capacity - 1``.
        drafts: ``[batch, num_drafts]`` int64, or None for masks.
        table: ``[vocab, hidden]``, float32 or bfloat16 (float16 on CUDA). An id outside of it counts as the nearest.
        mask_id: the mask's id.
        num_drafts: positions that are drafted.
        rows: rows of the result, at most ``num_drafts + 1``.
        mask_embedding: ``[hidden]``, the dtype of ``table``, what ``mask_id`` means; None for the table's.
        scale: every embedding is multiplied by it, in fp32, and rounded.

    Returns:
        ``(embeds [batch, rows, hidden], anchor [batch] int64, positions [batch, num_drafts] int64)``: the positions of
        the drafts are ``length + 1``, ``length + 2``, ...

    Raises:
        ValueError: a shape does not fit, or there is no mask of this id. TypeError: a dtype does not fit.
    """
    batch, capacity = _check(tokens, length, drafts, table, mask_id, num_drafts, rows, mask_embedding)
    dtype, (vocab, hidden), table = launch.dtype("draft_rows", "table", table), table.shape, unit_stride(table)
    embeds = table.new_empty(batch, rows, hidden)
    anchor, positions = length.new_empty(batch), length.new_empty(batch, num_drafts)
    launch(
        "draft_rows", tokens.contiguous(), length.contiguous(), dense(drafts), table, dense(mask_embedding), embeds,
        anchor, positions, table.stride(0), batch, capacity, rows, num_drafts, vocab, hidden, mask_id, scale, dtype,
    )  # fmt: skip
    return embeds, anchor, positions


def _check(
    tokens: Tensor, length: Tensor, drafts: Tensor | None, table: Tensor, mask_id: int, num_drafts: int, rows: int,
    mask_embedding: Tensor | None,
) -> tuple[int, int]:  # fmt: skip
    """Raise unless a call is right; return the batch and the capacity of ``tokens``."""
    op = "draft_rows"
    expect(op, "tokens", tokens, (None, None), torch.int64, "batch, capacity")
    batch, capacity = tokens.shape
    expect(op, "table", table, (None, None), table.dtype, "vocab, hidden")
    vocab, hidden = table.shape
    if min(capacity, vocab, hidden) == 0:
        raise ValueError(
            f"{op}: tokens must hold a token and table an embedding, got {list(tokens.shape)} and {list(table.shape)}"
        )
    if not 0 <= rows <= num_drafts + 1:
        raise ValueError(f"{op}: rows must be 0 .. num_drafts + 1 = {num_drafts + 1}, got {rows}")
    if not _C.fits(False, length, (batch,), torch.int64):
        expect(op, "length", length, (batch,), torch.int64, "batch")
    if drafts is not None:
        expect(op, "drafts", drafts, (batch, num_drafts), torch.int64, "batch, num_drafts")
    if mask_embedding is not None:
        expect(op, "mask_embedding", mask_embedding, (hidden,), table.dtype, "hidden")
    elif not 0 <= mask_id < vocab:
        raise ValueError(f"{op}: mask_id must be below the {vocab} rows of table, got {mask_id}")
    return batch, capacity
