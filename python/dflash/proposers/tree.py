"""A tree of drafts from one pass of the drafter: the most probable prefixes, best first."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from .. import ops
from ..drafter import Drafter
from ..sampling import LogitRules, Sampling
from ..state import TREE_SIZES, Block, State, Tree
from ..targets import Target
from .chain import DraftPass

# The most siblings. At T = 0 more than 16 of them accept at most 1 % more tokens (N = 128); at T > 0 the noise part of
# the score spreads over more: the highest rank in a tree is 13 to 41 in 1 % of the trees (N = 64).
_GREEDY_SIBLINGS, _SAMPLED_SIBLINGS = 16, 32


class TreeProposer(DraftPass):
    """Drafts the best-first tree of prefixes after each row's anchor (DDTree, arXiv 2604.12989).

    A prefix's score is the sum of the drafter's log probabilities of its tokens, one position at a time
    (`dflash.ops.tree_candidates`). Of all trees of n rows, the drafter expects most tokens from this one. It is the
    first n rows of every larger one.

    Args:
        draft: the drafter.
        target: whose embeddings and head the drafter shares.
        batch: rows of the batch.
        block_size: rows of a block of masks; a tree is one less deep.

    Attributes:
        built_rows: rows of the tree that is built.
        rows: the first of them, which the next step verifies.
        forecasts: True to fill ``expected``.
        siblings: the most children of a row.
        expected: ``[batch, sizes]`` float32, the tokens that the drafter expects of the last step at each size.
    """

    def __init__(self, draft: Drafter, target: Target, batch: int, block_size: int) -> None:
        super().__init__(draft, target, block_size)
        self.rows = self.built_rows = self.siblings = 2
        self.forecasts = False
        self.expected = torch.zeros(batch, len(TREE_SIZES), dtype=torch.float32, device=draft.device)
        self._sizes = torch.tensor(TREE_SIZES, dtype=torch.int64, device=draft.device)

    def configure(self, rules: LogitRules, samples: bool, rows: int, forecasts: bool = False) -> None:
        """Choose how to draft from now on.

        Args:
            rules: the logit rules of the call.
            samples: True if the temperature is positive.
            rows: of the tree that is built.
            forecasts: True to fill ``expected``, by which a step's rows are chosen.
        """
        self.rules, self.rows, self.built_rows, self.forecasts = rules, rows, rows, forecasts
        most = _SAMPLED_SIBLINGS if samples else _GREEDY_SIBLINGS
        # What a token before makes of candidates is not known yet, so a small tree looks at as many.
        self.siblings = min(most, rows - 1) if self.draft.selector is None else min(most, self.draft.selector.top_k)

    @property
    def kind(self) -> Hashable:
        """Key of the branches of `propose`, apart from the rules."""
        return "tree", self.rows, self.built_rows, self.siblings, self.forecasts

    def propose(self, state: State) -> Block:
        """Return a drafted tree for every row."""
        if self.rows == 1:
            return self.wait_or_advance(state)
        # 1. One pass of the drafter over masks.
        block = self.rows_for(state, self.num_drafts)
        features = self.draft.fuse(state.waiting_features(), state.num_context)
        predictions = self.predict(block, features, state)
        # 2. The tree of its best tokens at each depth.
        ids, scores = self.candidates(predictions.logits, block.positions, state.sampling)
        links, order = predictions.link(ids, scores)
        ids, *tree, scores = ops.build_tree(block.anchor, ids, links, self.built_rows, order)
        if self.forecasts:
            total = scores.exp().cumsum(1)  # the anchor's score is 0: it stands for the token that the target adds
            torch.index_select(total, 1, self._sizes.clamp(max=self.built_rows) - 1, out=self.expected)
        return _leading_rows(Block(ids, Tree(*tree)), self.rows)

    def candidates(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return ids and scores ``[batch, drafts, siblings]`` of the best tokens per depth.

        Args:
            logits: ``[batch, drafts, vocab]``, the drafter's.
            positions: ``[batch, drafts]`` int64, of the tokens that are drafted.
            sampling: per-row parameters.
        """
        return ops.tree_candidates(logits, positions, sampling.seeds, sampling.temperature, self.siblings)


def _leading_rows(block: Block, rows: int) -> Block:
    """Return the tree of a block's first rows."""
    if rows == block.ids.shape[1]:
        return block
    parents, depth, ancestors = block.tree
    parents, depth, ids = (x[:, :rows].contiguous() for x in (parents, depth, block.ids))
    return Block(ids, Tree(parents, depth, ancestors[:, :rows, : -(-rows // 64)].contiguous()))
