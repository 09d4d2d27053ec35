"""Draft trees: the best tokens per depth, the tree of the best prefixes, and what a step accepts of a block."""

from __future__ import annotations

from torch import Tensor

from .. import _C
from .contract import Scope
from .registry import Launcher, op

MAX_TREE_ROWS: int = _C.MAX_TREE_ROWS
"""The most rows of a tree, its root included."""

ROW_STATES: tuple[int, int, int, int] = _C.ROW_STATES
"""The values of ``done`` in `accept_prefix_`: running, a stop token, the limit, logits that held NaN."""

_STATE = (
    "stop_token_ids[batch, num_stop_tokens]:i64 limits[batch]:i64 tokens[batch, capacity]:i64! length[batch]:i64! "
    "num_context[batch]:i64! done[batch]:i64! "
)


def _tree_scratch(launch: Launcher, s: Scope) -> None:
    s.workspace = launch.scratch("tree_candidates", s.logits.device, s.batch * s.depths, s.vocab)


@op(
    "logits[batch, depths, vocab] positions[batch, depths]:i64 seeds[batch]:i64 temperature[batch]:f32",
    "ids[batch, depths, count]:i64 scores[batch, depths, count]:f32",
    where=f"vocab >= 1; 1 <= count <= {MAX_TREE_ROWS}; "
    "at_least(noise_weight, 0) and at_most(noise_weight, 1): noise_weight must be from 0 to 1",
    prepare=_tree_scratch,
)
def tree_candidates(
    logits: Tensor, positions: Tensor, seeds: Tensor, temperature: Tensor, count: int, noise_weight: float = 0.1
) -> tuple[Tensor, Tensor]:
    """Return the best tokens at each depth of a draft and their scores, best first, ties to the lower id.

    A token's score is ``log softmax(z)`` at temperature 0 and ``log((1 - w) softmax(z) + w softmax(z / T + noise))``
    above, with z the raw logits, w the noise weight, and the noise with which `select_tokens` chooses at that position.
    Scores come from float32 sums: tokens whose scores differ in their last bits may change places between devices.

    Args:
        logits: ``[batch, depths, vocab]``. Of several that are +inf, each has an equal share.
        positions: ``[batch, depths]``: the position of the token at each depth.
        seeds, temperature: ``[batch]``, as in `select_tokens`.
        count: from 1 to `MAX_TREE_ROWS`; ``noise_weight`` is w, from 0 to 1.

    Returns:
        ``(ids, scores)``, both ``[batch, depths, count]``. Where there are fewer tokens with a score above -inf, and
        everywhere in a row that holds NaN: id -1 and score -inf.
    """


@op(
    "anchor[batch]:i64 ids[batch, depths, count]:i64 scores[lists.., count]:f32 order[lists.., count]:u8",
    "tree_ids[batch, rows]:i64 parents[batch, rows]:i64 depth[batch, rows]:i64 "
    "ancestors[batch, rows, (rows + 63) // 64]:i64 tree_scores[batch, rows]:f32",
    where=f"depths >= 1 and count >= 1; 1 <= rows <= {MAX_TREE_ROWS}; lists == batch * depths * max(1, has(order) * "
    "count): scores must be [batch, depths, count], and with order they must both be [batch, depths, count, count]",
)
def build_tree(
    anchor: Tensor, ids: Tensor, scores: Tensor, rows: int, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Build the tree of the best prefixes of a draft's candidates, best first.

    Row 0 is the anchor, with score 0. A node's score is its parent's plus its candidate's, in float32. Rows 1, 2, ...
    are the nodes by descending score, then the shallower, then the lower token id, then the lower parent row. Rows
    without a candidate are pads, which no row sees but themselves.

    Args:
        anchor: ``[batch]``.
        ids: ``[batch, depths, count]``: the candidates at depth 1, 2, ..., no token twice. A depth ends at the first
            negative id, and at the first score of -inf or NaN.
        scores: like ``ids``, descending and at most 0, as `tree_candidates` returns them. With ``order`` they are
            ``[batch, depths, count, count]``: a list after each candidate of the depth before, at depth 1 the first.
        rows: rows of the tree, from 1 to `MAX_TREE_ROWS`.
        order: uint8 like the lists, the places of their tokens among the ``ids`` of the depth, as `link_candidates`
            returns them; None where the scores do not depend on the token before.

    Returns:
        ``(ids, parents, depth, ancestors, scores)``, all ``[batch, rows]`` but ancestors, which are as
        `block_attention` reads them. Pads have id -1, parent -1 (as the root has), depth 0 and score -inf.
    """


@op("block_ids[batch, rows]:i64 posterior[batch, rows]:i64 " + _STATE, where="rows >= 1")
def accept_prefix_(
    block_ids: Tensor, posterior: Tensor, stop_token_ids: Tensor, limits: Tensor, tokens: Tensor, length: Tensor,
    num_context: Tensor, done: Tensor,
) -> None:  # fmt: skip
    """Emit the longest matching prefix of each running row and one more token, and advance its state.

    Before, ``tokens[b, : length + 1]`` are emitted and ``tokens[b, length]`` is the anchor ``block_ids[b, 0]``. With n
    leading proposals ``block_ids[b, j + 1]`` that equal ``posterior[b, j]``, m = n + 1 tokens of the posterior are
    emitted, but none past the first stop token and none past the room that ``limits`` and the capacity leave. Then
    ``length += m`` and ``num_context = m``. A row that is done stays as it is, with ``num_context`` 0.

    Args:
        block_ids: ``[batch, rows]``: the anchor, then proposals; -1 never matches.
        posterior: ``[batch, rows]``: the target's choice after each row; -1: its logits held NaN. Such a choice is
            never emitted; the row is done where it would have been.
        stop_token_ids: ``[batch, n]``, the ids that end each row; n may be 0, and negative ids pad.
        limits: ``[batch]``, as are the next but ``tokens``: how many tokens the row may hold in all.
        tokens: ``[batch, capacity]``, written.
        length: advanced in place. One that is negative or leaves no room emits nothing, and the row is done.
        num_context: written: how many tokens were emitted.
        done: written: 0 running, 1 a stop token was emitted, 2 the limit is reached, 3 NaN.
    """


@op(
    "ids[batch, rows]:i64 parents[batch, rows]:i64 choices[batch, rows]:i64 " + _STATE
    + "path[batch, path_rows]:i64! chain_choices[batch, path_rows]:i64! chain_ids[batch, path_rows]:i64!",
    where=f"1 <= rows <= {MAX_TREE_ROWS}; path_rows >= 1",
)  # fmt: skip
def accept_path_(
    ids: Tensor, parents: Tensor, choices: Tensor, stop_token_ids: Tensor, limits: Tensor, tokens: Tensor,
    length: Tensor, num_context: Tensor, done: Tensor, path: Tensor, chain_choices: Tensor, chain_ids: Tensor,
) -> None:  # fmt: skip
    """Emit the path of a tree that the target's choices follow, and one more token, and advance the state.

    From row 0 on, the choice of a row is emitted and the walk continues at that row's child of this id; without one it
    ends, and so it does after ``path_rows`` tokens. The rest is as in `accept_prefix_`, to which a chain (``parents[b,
    j] = j - 1``) is equal, and so are the arguments that are not named here.

    Args:
        ids: ``[batch, rows]``, at most `MAX_TREE_ROWS`: the anchor, then the nodes; a negative one is never a child.
        parents: ``[batch, rows]``: the row of each node's parent, before it; with any other value a row is nobody's
            child. Of several siblings with one id the first counts.
        choices: ``[batch, rows]``: the target's choice after each row, as ``posterior`` in `accept_prefix_`.
        path: ``[batch, path_rows]``, written: the rows whose choices were emitted; from ``num_context`` on ``path[b, j]
            = j``.
        chain_choices: like ``path``: these choices; -1 from ``num_context`` on.
        chain_ids: like ``path``: the anchor, then the drafts among the emitted tokens, each one column after the choice
            that it equals; -1 elsewhere.
    """
