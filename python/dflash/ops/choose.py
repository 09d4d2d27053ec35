"""Choosing tokens and accepting them."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from .checks import emission_fits, expect, expect_emission
from .registry import Launcher, op

ROW_STATES: tuple[int, int, int, int] = _C.ROW_STATES
"""Values of ``done``: running; a stop token was emitted; the limit is reached; the target's logits are NaN."""


@op()
def select_tokens(
    launch: Launcher,
    logits: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    sharpness: Tensor,
) -> Tensor:
    """Choose tokens by keyed noise: ``argmax(sharpness * filter(logits / temperature) + gumbel(seed, position, id))``.

    A row's choice is a function of its logits, position and parameters, with the same bits on every device: a
    Gumbel-max sample of the filtered softmax when ``sharpness`` is 1, independent between positions and seeds.
    Ties go to the lowest id. Filters run in the order top-k, top-p, min-p, each on the survivors of the one before;
    every token equal to the threshold is kept, and the best token always is. Probabilities enter top-p as fixed point
    (2^-38 of the best token's): their sum has no order. The noise is `dflash.ops.reference.gumbel_noise`.

    Logits may be -inf: such a token is chosen only when all are, and then it is id 0. Of several logits that are +inf,
    or become so when divided by the temperature, the lowest id wins. Nothing is read on the host.

    Args:
        logits: ``[batch, rows, vocab]``, float32 or bfloat16.
        positions: ``[batch, rows]`` int64: the index of the token that each row chooses. Or ``[batch]``: that of the
            last token before; row i then chooses token ``positions[b] + 1 + i``.
        seeds: ``[batch]`` int64.
        temperature: ``[batch]`` float32; 0, a negative one or NaN is plain argmax of the logits, and infinity counts as
            the largest float.
        top_k: ``[batch]`` int64; 0, a negative one or at least vocab is off.
        top_p: ``[batch]`` float32; 1, more or NaN is off.
        min_p: ``[batch]`` float32: least probability as a fraction of the best token's; 0, less or NaN is off.
        sharpness: ``[batch]`` float32: 1 for a target; a drafter may use more, infinity being plain argmax. A negative
            one or NaN counts as 0.

    Returns:
        ``[batch, rows]`` int64; -1 for a row with a NaN logit.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    parameters = (seeds, temperature, top_k, top_p, min_p, sharpness)
    _check_select(logits, positions, *parameters)
    dtype = launch.dtype("select_tokens", "logits", logits)
    inputs = (logits, positions, *parameters)
    if not all(map(Tensor.is_contiguous, inputs)):
        inputs = [x.contiguous() for x in inputs]
    batch, rows, vocab = logits.shape
    ids = positions.new_empty(batch, rows)
    workspace = launch.scratch("select_tokens", logits.device, batch * rows, vocab)
    launch("select_tokens", *inputs, ids, workspace, batch, rows, vocab, positions.dim() == 1, dtype)
    return ids


def _check_select(
    logits: Tensor, positions: Tensor, seeds: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    sharpness: Tensor,
) -> None:  # fmt: skip
    op = "select_tokens"
    if logits.dim() != 3 or logits.shape[-1] == 0:
        raise ValueError(f"{op}: logits must be [batch, rows, vocab] with vocab >= 1, got {list(logits.shape)}")
    batch, rows, _ = logits.shape
    one, real, integer = (batch,), torch.float32, torch.int64
    shape, names = (one, "batch") if positions.dim() == 1 else ((batch, rows), "batch, rows")
    if _C.fits(
        False, positions, shape, integer, (seeds, top_k), one, integer,
        (temperature, top_p, min_p, sharpness), one, real,
    ):  # fmt: skip
        return
    expect(op, "positions", positions, shape, integer, names)
    for name, tensor, dtype in (
        ("seeds", seeds, integer),
        ("temperature", temperature, real),
        ("top_k", top_k, integer),
        ("top_p", top_p, real),
        ("min_p", min_p, real),
        ("sharpness", sharpness, real),
    ):
        expect(op, name, tensor, one, dtype, "batch")


@op(mutates=("tokens", "length", "num_context", "done"))
def accept_prefix_(
    launch: Launcher,
    block_ids: Tensor,
    posterior: Tensor,
    stop_token_ids: Tensor,
    limits: Tensor,
    tokens: Tensor,
    length: Tensor,
    num_context: Tensor,
    done: Tensor,
) -> None:
    """Emit the longest matching prefix and one more token of every running row, and advance its state.

    Before, ``tokens[b, : length + 1]`` are emitted and ``tokens[b, length]`` is the anchor ``block_ids[b, 0]``. With n
    the number of leading proposals ``block_ids[b, j + 1]`` that equal ``posterior[b, j]``, m = n + 1 tokens of the
    posterior are emitted, but none past the first stop token and none past the room that ``limits`` and the capacity of
    ``tokens`` leave. Then ``length += m`` and ``num_context = m``. A row that is done stays as it is, with
    ``num_context`` 0, whatever its ids hold.

    Args:
        block_ids: ``[batch, rows]`` int64: the anchor, then proposals for the positions after it; -1 never matches.
        posterior: ``[batch, rows]`` int64: the target's choice for the position after each row; -1: its logits held
            NaN. Such a choice is never emitted; the row is done where it would have been.
        stop_token_ids: ``[batch, n]`` int64, the ids that end each row; n may be 0, and negative ids pad.
        limits: ``[batch]`` int64: how many tokens the row may hold in all.
        tokens: ``[batch, capacity]`` int64, written, contiguous.
        length: ``[batch]`` int64, advanced in place, contiguous. A row whose length is negative or not below its limit
            and the capacity has no room: it emits nothing and is done.
        num_context: ``[batch]`` int64, written, contiguous: how many tokens were emitted.
        done: ``[batch]`` int64, written, contiguous: 0 running, 1 a stop token was emitted, 2 the limit is reached,
            3 the target's logits were NaN.

    Raises:
        ValueError: a shape or device does not fit, or a written tensor is not contiguous. TypeError: not int64.
        RuntimeError: the CUDA kernel could not be launched.
    """
    counters = (length, num_context, done)
    if not emission_fits((block_ids, posterior), stop_token_ids, limits, tokens, counters):
        block = {"block_ids": block_ids, "posterior": posterior}
        expect_emission("accept_prefix_", block, stop_token_ids, limits, tokens, counters)
    launch(
        "accept_prefix", *[x.contiguous() for x in (block_ids, posterior, stop_token_ids, limits)], tokens, *counters,
        *block_ids.shape, stop_token_ids.shape[1], tokens.shape[1],
    )  # fmt: skip
