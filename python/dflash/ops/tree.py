"""Draft trees: the best tokens per depth, and the tree of the best prefixes."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from .checks import expect
from .registry import Launcher, op

MAX_TREE_ROWS: int = _C.MAX_TREE_ROWS
"""The most rows of a tree, its root included."""


@op()
def tree_candidates(
    launch: Launcher,
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    count: int,
    noise_weight: float = 0.1,
) -> tuple[Tensor, Tensor]:
    """Return the ``count`` best tokens at each depth of a draft, best first, ties to the lower id.

    A token's score is ``log softmax(z)`` at temperature 0 and ``log((1 - w) softmax(z) + w softmax(z / T + noise))``
    above, with z the raw logits, w the noise weight, and the noise by which `select_tokens` chooses at that position.
    The target chooses with it too, which the second part foresees; the first allows for the drafter's errors.

    Scores come from float32 sums: tokens whose scores differ in their last bits may change places between devices.

    Args:
        logits: ``[batch, depths, vocab]``, float32 or bfloat16. Of several that are +inf, each has an equal share.
        positions: ``[batch, depths]`` int64: the position of the token at each depth.
        seeds: ``[batch]`` int64.
        temperature: ``[batch]`` float32; 0, a negative one or NaN leaves out the noise, and infinity counts as the
            largest float.
        count: from 1 to `MAX_TREE_ROWS`.
        noise_weight: w, from 0 to 1.

    Returns:
        ``ids [batch, depths, count]`` int64 and ``scores [batch, depths, count]`` float32, at most 0. Where there are
        fewer tokens with a score above -inf, and everywhere in a row that holds NaN: id -1 and score -inf.

    Raises:
        ValueError: a shape or a number does not fit. TypeError: a dtype does not fit.
    """
    _check_candidates(logits, positions, seeds, temperature, count, noise_weight)
    dtype = launch.dtype("tree_candidates", "logits", logits)
    inputs = (logits, positions, seeds, temperature)
    if not all(map(Tensor.is_contiguous, inputs)):
        inputs = [x.contiguous() for x in inputs]
    batch, depths, vocab = logits.shape
    ids = logits.new_empty(batch, depths, count, dtype=torch.int64)
    scores = logits.new_empty(batch, depths, count, dtype=torch.float32)
    workspace = launch.scratch("tree_candidates", logits.device, batch * depths, vocab)
    launch("tree_candidates", *inputs, ids, scores, workspace, batch, depths, vocab, count, noise_weight, dtype)
    return ids, scores


def _check_candidates(
    logits: Tensor, positions: Tensor, seeds: Tensor, temperature: Tensor, count: int, noise_weight: float
) -> None:
    op = "tree_candidates"
    if logits.dim() != 3 or logits.shape[-1] == 0:
        raise ValueError(f"{op}: logits must be [batch, depths, vocab] with vocab >= 1, got {list(logits.shape)}")
    if not 1 <= count <= MAX_TREE_ROWS:
        raise ValueError(f"{op}: count must be from 1 to {MAX_TREE_ROWS}, got {count}")
    if not 0 <= noise_weight <= 1:
        raise ValueError(f"{op}: noise_weight must be from 0 to 1, got {noise_weight}")
    batch, depths, _ = logits.shape
    one, integer, real = (batch,), torch.int64, torch.float32
    if _C.fits(False, positions, (batch, depths), integer, seeds, one, integer, temperature, one, real):
        return
    expect(op, "positions", positions, (batch, depths), integer, "batch, depths")
    expect(op, "seeds", seeds, one, integer, "batch")
    expect(op, "temperature", temperature, one, real, "batch")


@op()
def build_tree(
    launch: Launcher, anchor: Tensor, ids: Tensor, scores: Tensor, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Build the tree of the best prefixes of a draft, best first.

    Row 0 is the anchor, with score 0. A node's score is its parent's plus its candidate's, in float32. Rows 1, 2, ...
    are the nodes by descending score, then the shallower, then the lower token id, then the lower parent row: a parent
    comes before its children, and the first n rows are the tree of n rows. Rows for which there are no candidates left
    are pads, which no row sees but themselves.

    Args:
        anchor: ``[batch]`` int64.
        ids: ``[batch, depths, count]`` int64: the candidates at depth 1, 2, ..., no token twice at one depth. A depth
            ends at the first negative id, and at the first score of -inf or NaN.
        scores: ``[batch, depths, count]`` float32, descending and at most 0, as `tree_candidates` returns them.
        rows: rows of the tree, from 1 to `MAX_TREE_ROWS`.

    Returns:
        ``ids [batch, rows]`` (pads: -1), ``parents [batch, rows]`` (root and pads: -1), ``depth [batch, rows]`` (pads:
        0) and ``ancestors [batch, rows, ceil(rows / 64)]``, int64: bit ``j % 64`` of word ``j // 64`` of row i is set
        if j is i or an ancestor of i. Then ``scores [batch, rows]`` float32 (pads: -inf).

    Raises:
        ValueError: a shape or ``rows`` does not fit. TypeError: a dtype does not fit.
    """
    _check_build(anchor, ids, scores, rows)
    batch, depths, count = ids.shape
    tree = [anchor.new_empty(batch, rows) for _ in range(3)]
    ancestors = anchor.new_empty(batch, rows, -(-rows // 64))
    tree_scores = scores.new_empty(batch, rows)
    inputs = (anchor, ids, scores)
    if not all(map(Tensor.is_contiguous, inputs)):
        inputs = [x.contiguous() for x in inputs]
    launch("build_tree", *inputs, *tree, ancestors, tree_scores, batch, depths, count, rows)
    return (*tree, ancestors, tree_scores)


def _check_build(anchor: Tensor, ids: Tensor, scores: Tensor, rows: int) -> None:
    op = "build_tree"
    if ids.dim() != 3 or 0 in ids.shape[1:]:
        raise ValueError(f"{op}: ids must be [batch, depths, count] with depths and count >= 1, got {list(ids.shape)}")
    if not 1 <= rows <= MAX_TREE_ROWS:
        raise ValueError(f"{op}: rows must be from 1 to {MAX_TREE_ROWS}, got {rows}")
    shape, one, integer = tuple(ids.shape), (ids.shape[0],), torch.int64
    if _C.fits(False, anchor, one, integer, ids, shape, integer, scores, shape, torch.float32):
        return
    expect(op, "anchor", anchor, one, integer, "batch")
    expect(op, "ids", ids, shape, integer, "batch, depths, count")
    expect(op, "scores", scores, shape, torch.float32, "batch, depths, count")
