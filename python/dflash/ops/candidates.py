"""The candidates of each drafted token, and the path that a DFlash 2 drafter takes through them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from .checks import expect
from .registry import Launcher, op

MAX_CANDIDATES: int = _C.MAX_CANDIDATES
"""The most candidates per token."""


@op()
def top_candidates(
    launch: Launcher,
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    sharpness: Tensor,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Return the ``count`` tokens with the best scores per row, best first, ties to the lower id.

    A token's score is ``sharpness * logits / temperature + gumbel(seed, position, id)``, with the bits that
    `select_tokens` maximizes if nothing is filtered: its choice is the first candidate. At temperature 0 or a sharpness
    of infinity the score is the logit. Each level of sharpness has its own candidates.

    Args:
        logits: ``[batch, rows, vocab]``, float32 or bfloat16. A token at -inf is never a candidate.
        positions: ``[batch, rows]`` int64: the index of the token that each row drafts.
        seeds: ``[batch]`` int64.
        temperature: ``[batch]`` float32; 0, a negative one or NaN takes only the logits, and infinity counts as the
            largest float.
        sharpness: ``[batch, levels]`` float32; infinity takes only the logits, and a negative one or NaN counts as 0.
        count: from 1 to `MAX_CANDIDATES`.

    Returns:
        ``ids [batch, levels, rows, count]`` int64 and their ``logits [batch, levels, rows, count]`` float32. Where
        there are fewer tokens, and everywhere in a row that holds NaN: id -1 and logit -inf.

    Raises:
        ValueError: a shape or ``count`` does not fit. TypeError: a dtype does not fit.
    """
    _check_top(logits, positions, seeds, temperature, sharpness, count)
    dtype = launch.dtype("top_candidates", "logits", logits)
    inputs = (logits, positions, seeds, temperature, sharpness)
    if not all(map(Tensor.is_contiguous, inputs)):
        inputs = [x.contiguous() for x in inputs]
    (batch, rows, vocab), levels = logits.shape, sharpness.shape[1]
    ids = logits.new_empty(batch, levels, rows, count, dtype=torch.int64)
    chosen = logits.new_empty(batch, levels, rows, count, dtype=torch.float32)
    workspace = launch.scratch("top_candidates", logits.device, batch * levels * rows, vocab)
    launch("top_candidates", *inputs, ids, chosen, workspace, batch, levels, rows, vocab, count, dtype)
    return ids, chosen


def _check_top(
    logits: Tensor, positions: Tensor, seeds: Tensor, temperature: Tensor, sharpness: Tensor, count: int
) -> None:
    op = "top_candidates"
    if logits.dim() != 3 or logits.shape[-1] == 0:
        raise ValueError(f"{op}: logits must be [batch, rows, vocab] with vocab >= 1, got {list(logits.shape)}")
    if not 1 <= count <= MAX_CANDIDATES:
        raise ValueError(f"{op}: count must be from 1 to {MAX_CANDIDATES}, got {count}")
    batch, rows, _ = logits.shape
    one, integer, real = (batch,), torch.int64, torch.float32
    if _C.fits(
        False, positions, (batch, rows), integer, seeds, one, integer, temperature, one, real,
        sharpness, (batch, sharpness.shape[-1] if sharpness.dim() else 0), real,
    ):  # fmt: skip
        return
    expect(op, "positions", positions, (batch, rows), integer, "batch, rows")
    expect(op, "seeds", seeds, one, integer, "batch")
    expect(op, "temperature", temperature, one, real, "batch")
    expect(op, "sharpness", sharpness, (batch, None), real, "batch, levels")


@op()
def walk_candidates(
    launch: Launcher,
    hidden: Tensor,
    predecessors: Tensor,
    successors: Tensor,
    anchor: Tensor,
    ids: Tensor,
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    sharpness: Tensor,
    stream: int = 0,
) -> tuple[Tensor, Tensor]:
    """Take a path through the candidates of each slot, in which every token depends on the one before.

    Candidate c of slot j scores ``S = logit(c) + sum_r predecessors[a, r] hidden[j, r] successors[c, r]`` after token
    a: the token that the path takes in the slot before, and ``anchor`` for the first. The slot takes the token that
    `select_tokens` would with S as logits of the candidates, by the keyed noise of their token ids: filters are those
    of the candidates, and ties go to the lower id. Sums are in float32.

    Args:
        hidden: ``[batch, slots, rank]``, float32 or bfloat16: the projected hidden state of each slot.
        predecessors: ``[codes, rank]``, the dtype of ``hidden``.
        successors: ``[codes, rank]``, the dtype of ``hidden``.
        anchor: ``[batch]`` int64. One outside the codebook adds nothing to its successors' scores.
        ids: ``[batch, sets, slots, count]`` int64 with ``count`` from 1 to `MAX_CANDIDATES`, no token twice in a slot.
            sets is levels, or 1 for all levels to have the same. An id outside ``[0, codes)`` is not a candidate.
        logits: ``[batch, sets, slots, count]`` float32. A candidate whose score is -inf is left out.
        positions: ``[batch, slots]`` int64: the index of the token in each slot.
        seeds: ``[batch]`` int64.
        temperature: ``[batch]`` float32, as `select_tokens` takes it.
        top_k: ``[batch]`` int64, likewise.
        top_p: ``[batch]`` float32, likewise.
        min_p: ``[batch]`` float32, likewise.
        sharpness: ``[batch, levels]`` float32, likewise: each level takes its own path.
        stream: of the noise, from 0 to 3; 0 is the target's own.

    Returns:
        ``path [batch, levels, slots]`` int64: -1 from the first slot on that has no candidate or a score of NaN.
        ``scores [batch, levels, slots, count]`` float32: ``S / temperature`` of what the filters keep, else -inf, so
        that at a sharpness of 1 the softmax of a slot is the distribution that its token was drawn from. At temperature
        0 or a sharpness of infinity it is S. All -inf where the path is -1.

    Raises:
        ValueError: a shape or ``stream`` does not fit. TypeError: a dtype does not fit.
    """
    inputs = (
        hidden, predecessors, successors, anchor, ids, logits, positions, seeds, temperature, top_k, top_p, min_p,
        sharpness,
    )  # fmt: skip
    _check_walk(*inputs, stream)
    dtype = launch.dtype("walk_candidates", "hidden", hidden)
    if not all(map(Tensor.is_contiguous, inputs)):
        inputs = [x.contiguous() for x in inputs]
    (batch, levels), (codes, rank), (sets, slots, count) = sharpness.shape, predecessors.shape, ids.shape[1:]
    path = ids.new_empty(batch, levels, slots)
    scores = logits.new_empty(batch, levels, slots, count)
    sizes = (batch, levels, sets, slots, count, codes, rank)
    launch("walk_candidates", *inputs, path, scores, *sizes, stream, dtype)
    return path, scores


def _check_walk(
    hidden: Tensor, predecessors: Tensor, successors: Tensor, anchor: Tensor, ids: Tensor, logits: Tensor,
    positions: Tensor, seeds: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    sharpness: Tensor, stream: int,
) -> None:  # fmt: skip
    # 1. Sizes
    op, integer, real = "walk_candidates", torch.int64, torch.float32
    if hidden.dim() != 3 or hidden.shape[-1] == 0:
        raise ValueError(f"{op}: hidden must be [batch, slots, rank] with rank >= 1, got {list(hidden.shape)}")
    (batch, slots, rank), one = hidden.shape, (hidden.shape[0],)
    expect(op, "predecessors", predecessors, (None, rank), hidden.dtype, "codes, rank")
    expect(op, "successors", successors, tuple(predecessors.shape), hidden.dtype, "codes, rank")
    if len(predecessors) == 0:
        raise ValueError(f"{op}: the codebooks must have at least one row, got none")
    expect(op, "sharpness", sharpness, (batch, None), real, "batch, levels")
    levels = sharpness.shape[1]
    expect(op, "ids", ids, (batch, None, slots, None), integer, "batch, sets, slots, count")
    if ids.shape[1] not in (1, levels):
        raise ValueError(f"{op}: ids must have 1 or {levels} sets, one per level of sharpness, got {ids.shape[1]}")
    if not 1 <= ids.shape[3] <= MAX_CANDIDATES:
        raise ValueError(f"{op}: ids must have from 1 to {MAX_CANDIDATES} candidates per slot, got {ids.shape[3]}")
    if not 0 <= stream <= 3:
        raise ValueError(f"{op}: stream must be from 0 to 3, got {stream}")
    # 2. The rest has these sizes
    if _C.fits(
        False, logits, tuple(ids.shape), real, positions, (batch, slots), integer, (anchor, seeds, top_k), one, integer,
        (temperature, top_p, min_p), one, real,
    ):  # fmt: skip
        return
    expect(op, "logits", logits, tuple(ids.shape), real, "batch, sets, slots, count")
    expect(op, "positions", positions, (batch, slots), integer, "batch, slots")
    for name, tensor, dtype in (
        ("anchor", anchor, integer), ("seeds", seeds, integer), ("temperature", temperature, real),
        ("top_k", top_k, integer), ("top_p", top_p, real), ("min_p", min_p, real),
    ):  # fmt: skip
        expect(op, name, tensor, one, dtype, "batch")
