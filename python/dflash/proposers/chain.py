"""A chain of drafts from one pass of the drafter over a block of masks, or from several."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ..drafter import Drafter
from ..targets import Target
from . import denoise
from .block import Block, ChainSettings, State
from .drafting import DraftPass
from .samplers import DraftSampler, FixedSharpness, MaskedDrafts, RejectionDrafts

__all__ = ["ChainProposer", "chain_widths"]


def chain_widths(block_size: int) -> tuple[int, ...]:
    """Return the rows among which ``block_size="auto"`` chooses: quarters of the drafter's own block size."""
    return tuple(sorted({max(2, -(-block_size * quarters // 4)) for quarters in (1, 2, 3, 4)}))


class ChainProposer(DraftPass):
    """Drafts the tokens after each row's anchor with a DFlash drafter (arXiv 2602.06036, section 4).

    Args:
        draft: the drafter.
        target: whose embeddings and head the drafter shares.
        block_size: the most rows of a block, the anchor included.

    Attributes:
        rows: of the next block.
        passes: of the drafter over each block.
        sampler: how the drafter's logits become proposals.
    """

    def __init__(self, draft: Drafter, target: Target, block_size: int) -> None:
        super().__init__(draft, target, block_size)
        self.rows = self.block_size = block_size
        self.passes = 1
        self._fixed = FixedSharpness()
        self.sampler: DraftSampler = self._fixed

    def configure(self, settings: ChainSettings) -> None:
        """Choose how to draft in the next call."""
        if settings.rejection is not None:
            self.sampler = RejectionDrafts(settings.rejection)
        else:
            self.sampler = self._fixed
        if settings.masks is not None:
            self.sampler = MaskedDrafts(self.sampler, settings.masks)
        self.rows, self.passes, self.rules = self.block_size, settings.passes, settings.rules

    @property
    def schedule(self) -> tuple[int, ...]:
        """For denoising in several passes, how many tokens stay after each pass but the last."""
        return denoise.schedule(self.rows - 1, self.passes)

    @property
    def way(self) -> Hashable:
        """What the branches of `propose` depend on, besides the rules and the rows."""
        return type(self.sampler), self.passes

    @property
    def kind(self) -> Hashable:
        """What the branches of `propose` depend on, besides the rules."""
        return *self.way, self.rows

    def propose(self, state: State) -> Block:
        """Return a drafted block for every row."""
        block, known, drafts = self.rows_for(state, self.rows - 1), None, None
        features = self.draft.fuse(state.context, state.num_context)
        for keep in (*self.schedule, None):
            # 1. One pass over what is known so far and masks.
            predictions = self.predict(block, features, state)
            linked = predictions if known is None else predictions.fix(known, drafts)
            drawn = self.sampler.draw(linked, block.positions, state.sampling)
            drafts = drawn if known is None else torch.where(known, drafts, drawn)
            # 2. Before another pass, keep what the drafter is most sure of; the context is in its cache by now.
            if keep is not None:
                known = denoise.most_confident(predictions.logits, drafts, known, keep)
                masked = torch.where(known, drafts.clamp(min=0), self.draft.config.mask_token_id)
                block = self.rows_for(state, self.rows - 1, masked)
                features = features[:, :0]
        is_whole = self.rows == state.block.shape[1]
        ids = torch.cat([block.anchor[:, None], drafts], 1, out=state.block if is_whole else None)
        return Block(ids, is_checked=drafts is self.sampler.checked)

    def observe_(self, choices: Tensor, state: State) -> None:
        """Do nothing: there is nothing to learn."""
