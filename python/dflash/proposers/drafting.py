"""One pass of the drafter over a block of masks, and how tokens are drawn from what it predicts."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..drafter import Drafter, PairWeights, scale_logits
from ..sampling import LogitRules, RejectionAcceptance, Sampling
from ..state import State
from ..targets import Target


class Predictions:
    """Logits of each position, from which its token is drawn independently of the others.

    Args:
        logits: ``[batch, drafts, vocab]``, rules applied.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def fix(self, known: Tensor, drafts: Tensor) -> Predictions:  # noqa: ARG002
        """Return predictions given the tokens ``drafts`` where ``known``, both ``[batch, drafts]``."""
        return self

    def draw(self, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw ``[batch, drafts]`` int64 with keyed noise at ``positions`` like it; -1 where a logit is NaN."""
        return sampling.select(self.logits, positions, sampling.sharpness)

    def draw_for(self, acceptance: RejectionAcceptance, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw from the drafter's own distribution, which ``acceptance`` remembers."""
        return acceptance.draft(self.logits, positions, sampling)


class LinkedPredictions(Predictions):
    """Candidates of each position, scored also by the token drawn before: those of a DFlash 2 drafter's selector.

    Args:
        logits: ``[batch, drafts, vocab]``, rules applied.
        pairs: what scores a candidate by the token before it.
        anchor: ``[batch]`` int64, the token before the first.
        top_k: candidates per position.
    """

    def __init__(self, logits: Tensor, pairs: PairWeights, anchor: Tensor, top_k: int) -> None:
        super().__init__(logits)
        self.pairs, self.anchor, self.top_k = pairs, anchor, top_k

    def fix(self, known: Tensor, drafts: Tensor) -> Predictions:
        """Return predictions in which a known token is its position's only candidate, and precedes the next."""
        ids = torch.arange(self.logits.shape[-1], device=drafts.device)
        others = known[..., None] & (ids != drafts[..., None])
        logits = self.logits.masked_fill(others, -torch.inf)
        return LinkedPredictions(logits, self.pairs, self.anchor, self.top_k)

    def draw(self, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw a path ``[batch, drafts]``, -1 from a NaN on.

        Candidates are those with the best noisy logits, since the target's choice is made with the same noise: on a
        trained pair more of them are accepted. A selector that adds nothing draws what `Predictions` draw.
        """
        sharpness = sampling.sharpness[:, None]
        candidates = self._candidates(positions, sampling, sharpness)
        return self._walk(candidates, positions, sampling, sharpness, stream=0)[0][:, 0]

    def draw_for(self, acceptance: RejectionAcceptance, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw from the selector's distribution, which ``acceptance`` remembers."""
        # The candidates are plain: the noise of the draw must not choose them too, which would bias the output.
        ones = torch.ones_like(sampling.sharpness)[:, None]
        ids, logits = self._candidates(positions, sampling, math.inf * ones)
        path, scores = self._walk((ids, logits), positions, sampling, ones, stream=acceptance.STREAM)
        acceptance.remember_(path[:, 0], ids[:, 0], scores[:, 0])
        return path[:, 0]

    def _candidates(self, positions: Tensor, sampling: Sampling, sharpness: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and logits of the candidates, each ``[batch, 1, drafts, top_k]``."""
        return ops.top_candidates(self.logits, positions, sampling.seeds, sampling.temperature, sharpness, self.top_k)

    def _walk(
        self, candidates: tuple[Tensor, Tensor], positions: Tensor, s: Sampling, sharpness: Tensor, stream: int
    ) -> tuple[Tensor, Tensor]:
        """Return the path ``[batch, 1, drafts]`` and the scores of the candidates along it."""
        return ops.walk_candidates(
            self.pairs.queries, self.pairs.predecessors, self.pairs.successors, self.anchor, *candidates, positions,
            s.seeds, s.temperature, s.top_k, s.top_p, s.min_p, sharpness, stream,
        )  # fmt: skip


class DraftRows(NamedTuple):
    """The input of one pass of the drafter over a block.

    Attributes:
        embeds: ``[batch, rows, hidden]``, of the anchor, then of what is known of the drafts and masks.
        anchor: ``[batch]`` int64.
        positions: ``[batch, drafts]`` int64, of the drafts.
    """

    embeds: Tensor
    anchor: Tensor
    positions: Tensor


class DraftPass:
    """Runs a DFlash drafter (arXiv 2602.06036, section 4): what chains and trees of drafts share.

    Args:
        draft: the drafter.
        target: whose embeddings and head the drafter shares.
        block_size: rows of a block of masks, the anchor included.

    Attributes:
        num_drafts: positions that are drafted.
        rules: of the call; those that certainly change the target's choice are applied to the drafter's logits too.
    """

    def __init__(self, draft: Drafter, target: Target, block_size: int) -> None:
        self.draft, self.target, self.num_drafts = draft, target, block_size - 1
        self.rules: LogitRules | None = None
        draft.share_(target.embedding_weight, target.head)
        self._multiplier, self._softcap = _scales(target.config) if draft.config.scales_like_target else (1.0, 0.0)

    def rows_for(self, state: State, num_drafts: int, drafts: Tensor | None = None) -> DraftRows:
        """Embed a block after each row's last token, with ``drafts [batch, num_drafts]`` int64 or masks."""
        return DraftRows(*self.draft.embed_block(
            state.tokens, state.length, num_drafts, self.target.embedding_weight, drafts
        ))  # fmt: skip

    def predict(self, block: DraftRows, features: Tensor, state: State) -> Predictions:
        """Run the drafter once; ``features [batch, context_rows, hidden]``, fused, go into its cache."""
        hidden = self.draft(features, state.num_context, block.embeds, state.length, state.draft_cache)
        # One matrix: for rows that are not dense torch makes a product per sequence, and each reads the whole head.
        rows = (hidden if self.draft.config.predicts_from_anchor else hidden[:, 1:]).flatten(0, 1)
        logits = self.draft.logits(rows, self.target.draft_head).unflatten(0, (len(hidden), -1))
        logits = scale_logits(logits, self._multiplier, self._softcap)
        logits = logits if self.rules is None else self.rules.apply_to_drafts(logits, state)
        if (selector := self.draft.selector) is None:
            return Predictions(logits)
        pairs = selector.pair_weights(rows.unflatten(0, (len(hidden), -1)))
        return LinkedPredictions(logits, pairs, block.anchor, selector.top_k)


def _scales(config: Any) -> tuple[float, float]:
    """Return multiplier and softcap of a target's logits; 1 and 0 for none."""
    multiplier, cap = getattr(config, "output_multiplier", None), getattr(config, "final_logit_softcapping", None)
    return float(1.0 if multiplier is None else multiplier), float(cap or 0.0)
