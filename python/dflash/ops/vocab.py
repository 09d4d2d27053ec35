"""Ops on logits: tokens chosen by keyed noise, and the candidates of a drafted token."""

from __future__ import annotations

from torch import Tensor

from .. import _C
from .contract import Scope
from .registry import Launcher, on_cpu, op

MAX_CANDIDATES: int = _C.MAX_CANDIDATES
"""The most candidates per token."""

ROW_PARAMETERS = "seeds[batch]:i64 temperature[batch]:f32 top_k[batch]:i64 top_p[batch]:f32 min_p[batch]:f32 "
_POSITIONS = "logits[batch, rows, vocab] positions[batch, rows]:i64 seeds[batch]:i64 temperature[batch]:f32 "


def _select_scratch(launch: Launcher, s: Scope) -> None:
    s.workspace = launch.scratch("select_tokens", s.logits.device, s.batch * s.rows, s.vocab)


@op(
    "logits[batch, rows, vocab] positions[batch, rows?]:i64 " + ROW_PARAMETERS + "sharpness[batch]:f32",
    "ids[batch, rows]:i64",
    where="vocab >= 1",
    derived="consecutive = ndim(positions) == 1",
    prepare=_select_scratch,
)
def select_tokens(
    logits: Tensor, positions: Tensor, seeds: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    sharpness: Tensor,
) -> Tensor:  # fmt: skip
    """Choose one token per row: the argmax of ``sharpness * filter(logits / temperature)`` plus keyed Gumbel noise.

    A row's choice is a function of its logits, position and parameters, with the same bits on every device: a sample of
    the filtered softmax when ``sharpness`` is 1, independent between positions and seeds. Ties go to the lowest id.
    Filters run in the order top-k, top-p, min-p; every token equal to the threshold is kept, and the best token always
    is. Probabilities enter top-p as fixed point (2^-38 of the best token's). The noise is
    `dflash.ops.reference.gumbel_noise`. A token at -inf is chosen only when all are (id 0).

    Args:
        logits: ``[batch, rows, vocab]``.
        positions: ``[batch, rows]``: the index of the token that each row chooses. Or ``[batch]``: that of the last
            token before; row i then chooses token ``positions[b] + 1 + i``.
        seeds: ``[batch]``, as is what follows.
        temperature: 0, less or NaN is plain argmax of the logits, and infinity counts as the largest float.
        top_k: 0, less or at least vocab is off.
        top_p: 1, more or NaN is off.
        min_p: least probability as a fraction of the best token's; 0, less or NaN is off.
        sharpness: 1 for a target; infinity is plain argmax, and less than 0 or NaN counts as 0.

    Returns:
        ``[batch, rows]``; -1 for a row with a NaN logit.
    """


@op("logits[rows.., vocab]", "out[rows..]:f32", where="ndim(logits) >= 2; vocab >= 1", prepare=on_cpu)
def log_sum_exp(logits: Tensor) -> Tensor:
    """Compute ``ln(sum(exp(logits)))`` of each row in fp32; NaN for a row that holds NaN.

    On CPU a row has the same bits with every instruction set and any number of rows and threads, which torch's sum does
    not promise. On CUDA it is torch's.

    Args:
        logits: ``[..., rows, vocab]``.

    Returns:
        ``[..., rows]`` float32.
    """


def _top_scratch(launch: Launcher, s: Scope) -> None:
    s.workspace = launch.scratch("top_candidates", s.logits.device, s.batch * s.rows, s.vocab)


@op(
    _POSITIONS + "sharpness[batch]:f32",
    "ids[batch, rows, count]:i64 candidate_logits[batch, rows, count]:f32",
    where=f"vocab >= 1; 1 <= count <= {MAX_CANDIDATES}",
    prepare=_top_scratch,
)
def top_candidates(
    logits: Tensor, positions: Tensor, seeds: Tensor, temperature: Tensor, sharpness: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Return the tokens with the best scores of each row, best first, ties to the lower id, and their logits.

    A token's score is what `select_tokens` maximizes if nothing is filtered, with the same bits: its choice is the
    first candidate. A token at -inf is never one.

    Args:
        logits: ``[batch, rows, vocab]``; ``positions [batch, rows]`` and the rest are as in `select_tokens`.
        count: from 1 to `MAX_CANDIDATES`.

    Returns:
        ``(ids, logits)``, both ``[batch, rows, count]``. Where there are fewer tokens, and everywhere in a row
        that holds NaN: id -1 and logit -inf.
    """


@op(
    "hidden[batch, slots, rank] predecessors[codes, rank] successors[codes, rank] anchor[batch]:i64 "
    "ids[batch, slots, count]:i64 logits[batch, slots, count]:f32 positions[batch, slots]:i64 "
    + ROW_PARAMETERS + "sharpness[batch]:f32",
    "path[batch, slots]:i64 scores[batch, slots, count]:f32",
    where="rank >= 1; codes >= 1; "
    f"1 <= count <= {MAX_CANDIDATES}; 0 <= stream <= 3",
)  # fmt: skip
def walk_candidates(
    hidden: Tensor, predecessors: Tensor, successors: Tensor, anchor: Tensor, ids: Tensor, logits: Tensor,
    positions: Tensor, seeds: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
    sharpness: Tensor, stream: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose a path through the candidates of each slot, where a token's score depends on the token before.

    Candidate c of slot j scores ``S = logit(c) + sum_r predecessors[a, r] hidden[j, r] successors[c, r]`` after token
    a, in float32. The slot takes the token that `select_tokens` would with S as logits of the candidates, by the keyed
    noise of their token ids.

    Args:
        hidden: ``[batch, slots, rank]``: the projected hidden state of each slot.
        predecessors, successors: ``[codes, rank]``.
        anchor: ``[batch]``: the token before the first slot. One outside the codebook adds nothing.
        ids: ``[batch, slots, count]``, no token twice in a slot. An id outside ``[0, codes)`` is no candidate.
        logits: ``[batch, slots, count]``. A candidate whose score is -inf is left out.
        positions: ``[batch, slots]``: the index of the token in each slot.
        seeds: ``[batch]``. It and the settings from ``temperature`` to ``sharpness`` are as in `select_tokens`.
        stream: of the noise, from 0 to 3; 0 is the target's own.

    Returns:
        ``path [batch, slots]``: -1 from the first slot on that has no candidate or a score of NaN. ``scores
        [batch, slots, count]``: ``S / temperature`` of what the filters keep (S itself for argmax), else -inf,
        and -inf where the path is -1.
    """


@op(
    "hidden[batch, slots, rank] predecessors[codes, rank] successors[codes, rank] anchor[batch]:i64 "
    "ids[batch, slots, count]:i64 scores[batch, slots, count]:f32",
    "links[batch, slots, count, count]:f32 order[batch, slots, count, count]:u8",
    where=f"rank >= 1; codes >= 1; 1 <= count <= {MAX_CANDIDATES}",
)
def link_candidates(
    hidden: Tensor, predecessors: Tensor, successors: Tensor, anchor: Tensor, ids: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log probabilities of each slot's candidates after each candidate of the slot before, best first.

    With the pairs' scores of `walk_candidates`, ``links = score(c) + pair(a, c) - log(rest + sum of exp(score + pair)
    over c)`` in float32. ``rest`` is the probability that the scores leave to other tokens, which have no pairs.

    Args:
        hidden, predecessors, successors, anchor, ids: as in `walk_candidates`.
        scores: ``[batch, slots, count]``: log probabilities, as `tree_candidates` returns them. One of -inf or NaN is
            no candidate.

    Returns:
        ``(links, order)``, both ``[batch, slots, count, count]``: for each candidate of the slot before (in slot 0 all
        are the anchor) descending scores, ties to the lower id, and their tokens' places among the slot's. Where a
        score of a list is NaN or +inf, or a candidate before is outside ``[0, codes)``: all -inf.
    """
