"""Chains of drafts from one pass of the drafter over a block of masks, or from several."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..drafter import Drafter, PairWeights, scale_logits
from ..sampling import LogitRules, RejectionAcceptance, Sampling
from ..state import RUNNING, Block, State, scatter_rows
from ..targets import Target
from .lookup import look_up

if TYPE_CHECKING:
    from ..grammar import GrammarMasks


Ban = tuple[int, int, Tensor]  # row, place among the drafts, and which tokens a grammar bans there


@dataclass
class Predictions:
    """Logits ``[batch, drafts, vocab]``, rules applied, from which tokens are drawn independently of each other."""

    logits: Tensor

    def fix(self, known: Tensor, drafts: Tensor) -> Predictions:  # noqa: ARG002
        """Return predictions given the tokens ``drafts`` where ``known``, both ``[batch, drafts]``."""
        return self

    def draw(self, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw ``[batch, drafts]`` int64 with keyed noise at ``positions`` like it; -1 where a logit is NaN."""
        return sampling.select(self.logits, positions, sampling.sharpness)

    def draw_for(self, acceptance: RejectionAcceptance, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw from the drafter's own distribution, which ``acceptance`` remembers."""
        return acceptance.draft(self.logits, positions, sampling)

    def link(self, ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor | None]:  # noqa: ARG002
        """Return `dflash.ops.build_tree`'s ``scores`` and ``order`` for what `dflash.ops.tree_candidates` found."""
        return scores, None


@dataclass
class LinkedPredictions(Predictions):
    """Candidates of each position, which a DFlash 2 drafter's selector scores by the token drawn before, too."""

    pairs: PairWeights  # scores a candidate by the token before it
    anchor: Tensor  # [batch] int64, the token before the first
    top_k: int  # candidates per position

    def fix(self, known: Tensor, drafts: Tensor) -> Predictions:
        """Return predictions in which a known token is its position's only candidate, and precedes the next."""
        ids = torch.arange(self.logits.shape[-1], device=drafts.device)
        others = known[..., None] & (ids != drafts[..., None])
        return replace(self, logits=self.logits.masked_fill(others, -torch.inf))

    def draw(self, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw a path ``[batch, drafts]``, -1 from a NaN on.

        The best noisy logits become candidates, since the target's choice is made with the same noise: with a trained
        pair more of them are accepted. A selector that adds nothing draws what `Predictions` draw.
        """
        return self._walk(positions, sampling, sampling.sharpness, sampling.sharpness, stream=0)[0]

    def draw_for(self, acceptance: RejectionAcceptance, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw from the selector's distribution, which ``acceptance`` remembers."""
        # The candidates are plain: the noise of the draw must not choose them too, which would bias the output.
        ones = sampling.ones
        path, ids, scores = self._walk(positions, sampling, math.inf * ones, ones, stream=acceptance.STREAM)
        acceptance.remember_(path, ids, scores)
        return path

    def link(self, ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scores of each candidate after each of the position before, and their order."""
        pairs = self.pairs
        return ops.link_candidates(pairs.queries, pairs.predecessors, pairs.successors, self.anchor, ids, scores)

    def _walk(
        self, positions: Tensor, s: Sampling, candidate_sharpness: Tensor, sharpness: Tensor, stream: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the path ``[batch, drafts]``, and the candidates' ids and scores along it, each ``[..., top_k]``."""
        by = s.seeds, s.temperature, candidate_sharpness
        ids, logits = ops.top_candidates(self.logits, positions, *by, self.top_k)
        path, scores = ops.walk_candidates(
            self.pairs.queries, self.pairs.predecessors, self.pairs.successors, self.anchor, ids, logits, positions,
            s.seeds, s.temperature, s.top_k, s.top_p, s.min_p, sharpness, stream,
        )  # fmt: skip
        return path, ids, scores


class DraftRows(NamedTuple):
    """The input of one pass of the drafter over a block.

    Attributes:
        embeds: ``[batch, rows, hidden]``, of the anchor, then of known drafts and masks.
        anchor: ``[batch]`` int64.
        positions: ``[batch, drafts]`` int64, of the drafts.
    """

    embeds: Tensor
    anchor: Tensor
    positions: Tensor


class DraftPass:
    """Passes of a DFlash drafter (arXiv 2602.06036, section 4), for chains and trees of drafts.

    Args:
        draft: the drafter.
        target: whose embeddings and head the drafter shares.
        block_size: rows of a block of masks, the anchor included.

    Attributes:
        num_drafts: positions that are drafted.
        rules: of the call; bans and other decisive rules are applied to the drafter's logits too.
    """

    def __init__(self, draft: Drafter, target: Target, block_size: int) -> None:
        self.draft, self.target, self.num_drafts = draft, target, block_size - 1
        self.rules: LogitRules | None = None
        draft.share_(target.embedding_weight, target.head)
        self._multiplier, self._softcap = _scales(target.config) if draft.config.scales_like_target else (1.0, 0.0)

    def advance(self, state: State) -> Block:
        """Return a block of one row, which drafts nothing; the drafter's cache takes up what was emitted."""
        self.follow_(state.waiting_features(), state, slice(0, len(state.length)))
        return Block(state.anchor)

    def follow_(self, context: Tensor, state: State, rows: slice) -> None:
        """Let the drafter's cache take up ``context``, the waiting features of ``rows`` of the batch."""
        self.draft.follow_(context, state.num_context[rows], state.length[rows], state.draft_cache.rows(rows))

    def follow_prompt_(self, features: Tensor, past: Tensor, live: Tensor, state: State, rows: slice) -> None:
        """Let the drafter's cache take up a chunk of the prompts of ``rows``.

        Args:
            features: ``[prompts, tokens, taps * hidden]``, the target's.
            past: ``[prompts]`` int64, positions before the chunk.
            live: ``[prompts]`` int64, how many of the tokens belong to each prompt.
            state: whose drafter's cache is written.
            rows: of the batch.
        """
        offsets = torch.arange(features.shape[1], device=features.device)
        positions = torch.where(offsets < live[:, None], past[:, None] + offsets, -1)
        self.draft.inject_(self.draft.fuse(features, live), positions, state.draft_cache.rows(rows))

    def wait_or_advance(self, state: State) -> Block:
        """Return a block of one row, which drafts nothing. If its features may wait, many are taken up at once."""
        return Block(state.anchor, waits=True) if state.can_wait() else self.advance(state)

    def rows_for(self, state: State, num_drafts: int, drafts: Tensor | None = None) -> DraftRows:
        """Embed a block after each row's last token, with ``drafts [batch, num_drafts]`` int64 or masks."""
        table = self.target.embedding_rows
        return DraftRows(*self.draft.embed_block(state.tokens, state.length, num_drafts, table, drafts))

    def predict(self, block: DraftRows, features: Tensor, state: State) -> Predictions:
        """Run the drafter once; ``features [batch, context_rows, hidden]``, fused, go into its cache."""
        inputs, cache, live = (features, state.num_context, block.embeds, state.length), state.draft_cache, None
        if state.live is not None:
            # The features of a row's last tokens still go into the cache after it has ended
            live = (state.num_context > 0).index_fill(0, state.live, True).nonzero()[:, 0]
            if self.draft.can_leave_out(len(live) * (features.shape[1] + block.embeds.shape[1])):
                inputs, cache = tuple(x[live] for x in inputs), cache.only(live)
            else:
                live = None
        hidden = self.draft(*inputs, cache)
        # One matrix: with strided rows torch would make a product per sequence, and each reads the whole head.
        rows = (hidden if self.draft.config.predicts_from_anchor else hidden[:, 1:]).flatten(0, 1)
        logits = self.draft.logits(rows, self.target.draft_head).unflatten(0, (len(hidden), -1))
        logits = scale_logits(logits, self._multiplier, self._softcap)
        if live is not None:
            logits = scatter_rows(logits, live, len(block.embeds), -torch.inf)
        logits = logits if self.rules is None else self.rules.apply_to_drafts(logits, state)
        if (selector := self.draft.selector) is None:
            return Predictions(logits)
        pairs = selector.pair_weights(rows.unflatten(0, (len(hidden), -1)))
        if live is not None:
            pairs = pairs._replace(queries=scatter_rows(pairs.queries, live, len(block.embeds), 0.0))
        return LinkedPredictions(logits, pairs, block.anchor, selector.top_k)


def _scales(config: Any) -> tuple[float, float]:
    """Return multiplier and softcap of a target's logits; 1 and 0 for none."""
    multiplier, cap = getattr(config, "output_multiplier", None), getattr(config, "final_logit_softcapping", None)
    return float(1.0 if multiplier is None else multiplier), float(cap or 0.0)


# ---------------------------------------------------------------------------------------------- chains


def chain_widths(block_size: int) -> tuple[int, ...]:
    """Return the rows among which ``block_size="auto"`` chooses: one, which drafts nothing, and quarters of a block."""
    return 1, *sorted({max(2, -(-block_size * quarters // 4)) for quarters in (1, 2, 3, 4)})


class ChainProposer(DraftPass):
    """Drafts the tokens after each row's anchor with a DFlash drafter (arXiv 2602.06036, section 4).

    With several passes, each but the last keeps the tokens that it is most sure of, masks the others, and runs the
    drafter once more. The numbers of kept tokens are fixed in advance: no shape and no branch depends on data.

    Where a grammar bans a draft, the block is drawn again without it, at most `ROUNDS` times. With the package's pair
    (T = 0, tokens per step) 8 rounds left JSON that it writes anyway at 15.17. They raised keys in another order from
    3.03 to 4.38, keys that the pair never saw from 1.84 to 5.65, and sums as JSON from 1.13 to 2.02. More rounds gained
    nothing (`bench/bench_grammar.py`).

    Args:
        draft: the drafter.
        target: whose embeddings and head the drafter shares.
        block_size: the most rows of a block, the anchor included.
        ngram: if this many of the last tokens stood in the text before, draft the tokens that followed (`look_up`)
            instead of the drafter's; 0 for never. Rejection sampling always uses the drafter's. On a CPU the drafter
            is skipped if every row finds drafts, unless the step is compiled.

    Attributes:
        rows: of the next block.
        passes: of the drafter over each block.
    """

    ROUNDS = 8

    def __init__(self, draft: Drafter, target: Target, block_size: int, ngram: int = 0) -> None:
        super().__init__(draft, target, block_size)
        self.rows = self.block_size = block_size
        self._ngram = ngram
        self.passes, self._rejection, self._masks = 1, None, None

    def configure(
        self, rules: LogitRules, passes: int, rejection: RejectionAcceptance | None = None,
        masks: GrammarMasks | None = None,
    ) -> None:  # fmt: skip
        """Choose how to draft from now on.

        Args:
            rules: the logit rules of all rows.
            passes: of the drafter over each block.
            rejection: remembers the drafter's distribution, from which drafts are drawn; None for keyed noise.
            masks: what the rows' grammars allow; None for none.
        """
        self.rows, self.passes, self.rules = self.block_size, passes, rules
        self._rejection, self._masks = rejection, masks

    @property
    def kind(self) -> Hashable:
        """Key of the branches of `propose`, apart from the rules."""
        return self._rejection is None, self._masks is None, self.passes, self.rows

    def propose(self, state: State) -> Block:
        """Return a drafted block for every row."""
        if self.rows == 1:
            return self.wait_or_advance(state)
        found = None
        if self._ngram and self._rejection is None:
            found = look_up(state.tokens, state.length, self._ngram, self.rows - 1)
        if found is not None and _is_all_found(found, state):
            anchor, drafts, is_checked = self.advance(state).ids, found, False
        else:
            anchor, drafts, is_checked = self._draft(state)
            if found is not None:
                drafts, is_checked = torch.where(found < 0, drafts, found), False
        is_whole = self.rows == state.block.shape[1]
        return Block(torch.cat([anchor, drafts], 1, out=state.block if is_whole else None), is_checked=is_checked)

    def _draft(self, state: State) -> tuple[Tensor, Tensor, bool]:
        """Return anchors ``[batch, 1]``, drafts ``[batch, drafts]``, and True if these were checked by the grammars."""
        block, known, drafts = self.rows_for(state, self.rows - 1), None, None
        features = self.draft.fuse(state.waiting_features(), state.num_context)
        schedule = keep_schedule(self.rows - 1, self.passes) if self.passes > 1 else ()
        for keep in (*schedule, None):
            # 1. One pass over known tokens and masks.
            predictions = self.predict(block, features, state)
            linked = predictions if known is None else predictions.fix(known, drafts)
            drawn, is_checked = self._draw(linked, block.positions, state.sampling)
            drafts = drawn if known is None else torch.where(known, drafts, drawn)
            # 2. Before another pass, keep the surest tokens; the context is in the drafter's cache by now.
            if keep is not None:
                known = most_confident(predictions.logits, drafts, known, keep)
                masked = torch.where(known, drafts.clamp(min=0), self.draft.config.mask_token_id)
                block = self.rows_for(state, self.rows - 1, masked)
                features = features[:, :0]
        return block.anchor[:, None], drafts, is_checked and known is None

    def _draw(self, predictions: Predictions, positions: Tensor, sampling: Sampling) -> tuple[Tensor, bool]:
        """Return drafts, and True if no grammar bans one."""
        if self._rejection is not None:
            return predictions.draw_for(self._rejection, positions, sampling), False

        def draw(bans: list[Ban]) -> Tensor:
            for row, place, banned in bans:
                predictions.logits[row, place].masked_fill_(banned, -torch.inf)
            return predictions.draw(positions, sampling)

        return self._draw_allowed(draw, predictions.logits.shape[-1])

    def _draw_allowed(self, draw: Callable[[list[Ban]], Tensor], vocab: int) -> tuple[Tensor, bool]:
        """Return drafts, and True if no grammar bans one; where one does, ``draw`` them again. Waits for the device."""
        drafts = draw([])
        for _ in range(0 if self._masks is None else self.ROUNDS):
            if not (found := self._masks.banned_drafts(drafts, vocab)):
                return drafts, True
            drafts = draw(found)
        return drafts, False


def _is_all_found(found: Tensor, state: State) -> bool:
    """Return True if no running row needs the drafter. False where the host must not look."""
    if not state.is_readable:
        return False
    running = found[state.done == RUNNING]  # none while costs are measured
    return len(running) > 0 and bool(running.ge(0).all())


def keep_schedule(drafts: int, passes: int) -> tuple[int, ...]:
    """Return how many of ``drafts`` tokens stay after each pass but the last: equal parts, at least one each.

    More passes than tokens would add nothing and are not made.
    """
    passes = min(passes, drafts)
    return tuple(drafts * done // passes for done in range(1, passes))


def most_confident(logits: Tensor, drafts: Tensor, known: Tensor | None, count: int) -> Tensor:
    """Extend ``known`` to ``count`` tokens per row by the drafter's most probable ones.

    A selector's or Markov head's scores do not count.

    Args:
        logits: ``[batch, rows, vocab]``, the drafter's, any floating dtype.
        drafts: ``[batch, rows]`` int64, the token chosen in each row; -1 (NaN logits) goes last.
        known: ``[batch, rows]`` bool, rows that stay whatever their logits; None for none.
        count: at least as many as any row of ``known`` holds.

    Returns:
        ``[batch, rows]`` bool, ``count`` of each row true.
    """
    wide = logits.to(torch.float32)
    chosen = wide.gather(-1, drafts.clamp(min=0)[..., None])[..., 0]
    confidence = (chosen - wide.logsumexp(-1)).nan_to_num(nan=-torch.inf)
    confidence = torch.where(drafts < 0, -torch.inf, confidence)
    if known is not None:
        confidence = torch.where(known, torch.inf, confidence)
    return torch.zeros_like(drafts, dtype=torch.bool).scatter_(-1, confidence.topk(count, -1).indices, True)
