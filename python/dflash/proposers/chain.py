"""A chain of drafts from one pass of the drafter over a block of masks, or from several."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from ..drafter import Drafter
from ..sampling import LogitRules
from ..target import Target
from . import denoise
from .block import Block, ProposerSettings, State
from .samplers import DraftSampler, FixedSharpness, RejectionDrafts
from .sharpness import AutoSharpness

__all__ = ["ChainProposer"]


class ChainProposer:
    """Drafts the tokens after each row's anchor with a DFlash drafter (arXiv 2602.06036, section 4).

    Args:
        draft: the drafter.
        target: whose embeddings and head the drafter shares.
        batch: rows of the batch.
        block_size: rows of a block, the anchor included.

    Attributes:
        sampler: how the drafter's logits become proposals.
        schedule: for denoising in several passes, how many tokens stay after each pass but the last.
        rules: of the call; those that certainly change the target's choice are applied to the drafter's logits too.
        auto: the sampler for ``draft_sharpness="auto"``.
    """

    def __init__(self, draft: Drafter, target: Target, batch: int, block_size: int) -> None:
        self.draft, self.target, self.num_drafts = draft, target, block_size - 1
        self.auto = AutoSharpness(batch, self.num_drafts, draft.device)
        self._fixed = FixedSharpness()
        self.sampler: DraftSampler = self._fixed
        self.schedule: tuple[int, ...] = ()
        self.rules: LogitRules | None = None

    def retarget(self, target: Target) -> None:
        """Share the embeddings and the head of another twin of the same model."""
        self.target = target

    def configure(self, settings: ProposerSettings) -> None:
        """Choose how to draft in the next call."""
        if settings.rejection is not None:
            self.sampler = RejectionDrafts(settings.rejection)
        else:
            self.sampler = self.auto if settings.adapts else self._fixed
        self.schedule = denoise.schedule(self.num_drafts, settings.steps)
        self.rules = settings.rules
        if settings.adapts:
            self.auto.reset_()

    @property
    def kind(self) -> Hashable:
        """What the branches of `propose` depend on, besides the rules."""
        return type(self.sampler), self.schedule

    def propose(self, state: State) -> Block:
        """Return a drafted block for every row."""
        anchor, positions = state.anchor, state.positions(self.num_drafts)
        mask = self.draft.config.mask_token_id
        features = self.draft.fuse(state.context, state.num_context)
        masked, known, candidates = torch.full_like(positions, mask), None, None
        for keep in (*self.schedule, None):
            # 1. One pass over what is known so far and masks.
            logits = self.logits(torch.cat([anchor, masked], 1), features, state)
            drawn = self.sampler.draw(logits, positions, state.sampling)
            candidates = drawn if known is None else torch.where(known[:, None], candidates, drawn)
            drafts = self.sampler.pick(candidates)
            # 2. Before another pass, keep what the drafter is most sure of; the context is in its cache by now.
            if keep is not None:
                known = denoise.most_confident(logits, drafts, known, keep)
                masked = torch.where(known, drafts.clamp(min=0), mask)
                features = features[:, :0]
        self.sampler.remember_(candidates)
        return Block(torch.cat([anchor, drafts], 1, out=state.block))

    def logits(self, block: Tensor, features: Tensor, state: State) -> Tensor:
        """Run the drafter once.

        Args:
            block: ``[batch, rows]`` int64, the anchor, then known drafts and masks.
            features: ``[batch, context_rows, hidden]``, fused; written into the drafter's cache.
            state: the engine's.

        Returns:
            ``[batch, rows - 1, vocab]``, rules applied.
        """
        embeds = nn.functional.embedding(block, self.target.embedding_weight)
        hidden = self.draft(
            features, state.num_context, self.draft.scale_embeddings(embeds), state.length, state.draft_cache
        )
        # One matrix: for rows that are not dense torch makes a product per sequence, and each reads the whole head.
        rows = hidden[:, 1:].flatten(0, 1)
        logits = self.draft.logits(rows, self.target.draft_head).unflatten(0, (len(block), -1))
        return logits if self.rules is None else self.rules.apply_to_drafts(logits, state)

    def observe_(self, choices: Tensor, state: State) -> None:
        """Let the sampler learn from the target's ``choices [batch, rows]``."""
        self.sampler.observe_(choices, state.num_context, state.done)
