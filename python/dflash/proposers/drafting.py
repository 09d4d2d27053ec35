"""One pass of the drafter over a block of masks, from which chains and trees are drafted."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..drafter import Drafter, scale_logits
from ..sampling import LogitRules
from ..target import Target
from .block import State
from .predictions import LinkedPredictions, Predictions

__all__ = ["DraftPass"]


class DraftPass:
    """Runs a DFlash drafter (arXiv 2602.06036, section 4).

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

    def retarget(self, target: Target) -> None:
        """Share the embeddings and the head of another twin of the same model."""
        self.target = target

    def predict(self, block: Tensor, features: Tensor, state: State) -> Predictions:
        """Run the drafter once.

        Args:
            block: ``[batch, rows]`` int64, the anchor, then known drafts and masks.
            features: ``[batch, context_rows, hidden]``, fused; written into the drafter's cache.
            state: the engine's.

        Returns:
            Predictions for ``rows - 1`` positions, rules applied.
        """
        from_anchor = self.draft.config.predicts_from_anchor
        embeds = self.draft.embed(block[:, :-1] if from_anchor else block, self.target.embedding_weight)
        hidden = self.draft(features, state.num_context, embeds, state.length, state.draft_cache)
        # One matrix: for rows that are not dense torch makes a product per sequence, and each reads the whole head.
        rows = (hidden if from_anchor else hidden[:, 1:]).flatten(0, 1)
        logits = self.draft.logits(rows, self.target.draft_head).unflatten(0, (len(block), -1))
        logits = scale_logits(logits, self._multiplier, self._softcap)
        logits = logits if self.rules is None else self.rules.apply_to_drafts(logits, state)
        if (selector := self.draft.selector) is None:
            return Predictions(logits)
        pairs = selector.pair_weights(rows.unflatten(0, (len(block), -1)))
        return LinkedPredictions(logits, pairs, block[:, 0], selector.top_k)


def _scales(config: Any) -> tuple[float, float]:
    """Return multiplier and softcap of a target's logits; 1 and 0 for none."""
    multiplier, cap = getattr(config, "output_multiplier", None), getattr(config, "final_logit_softcapping", None)
    return float(1.0 if multiplier is None else multiplier), float(cap or 0.0)
