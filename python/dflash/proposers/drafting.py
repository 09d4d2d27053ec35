"""One pass of the drafter over a block of masks, from which chains and trees are drafted."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..drafter import Drafter, scale_logits
from ..sampling import LogitRules
from ..targets import Target
from .block import State
from .predictions import LinkedPredictions, Predictions

__all__ = ["DraftPass", "DraftRows"]


class DraftRows(NamedTuple):
    """What a pass of the drafter over a block begins with.

    Attributes:
        embeds: ``[batch, rows, hidden]``, of the anchor, then of what is known of the drafts and masks.
        anchor: ``[batch]`` int64.
        positions: ``[batch, drafts]`` int64, of the drafts.
    """

    embeds: Tensor
    anchor: Tensor
    positions: Tensor


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

    def rows_for(self, state: State, num_drafts: int, drafts: Tensor | None = None) -> DraftRows:
        """Embed a block after each row's last token, with ``drafts [batch, num_drafts]`` int64 or masks."""
        return DraftRows(*self.draft.embed_block(
            state.tokens, state.length, num_drafts, self.target.embedding_weight, drafts
        ))  # fmt: skip

    def predict(self, block: DraftRows, features: Tensor, state: State) -> Predictions:
        """Run the drafter once.

        Args:
            block: its rows.
            features: ``[batch, context_rows, hidden]``, fused; written into the drafter's cache.
            state: the engine's.

        Returns:
            Predictions for the drafts, rules applied.
        """
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
