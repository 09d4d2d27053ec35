"""What one pass of the drafter says about the tokens of a block, and how tokens are drawn from it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import ops
from ..drafter import PairWeights
from ..sampling import RejectionAcceptance, Sampling

__all__ = ["LinkedPredictions", "Predictions"]


class Predictions:
    """Logits of each position, from which its token is drawn whatever the others are.

    Args:
        logits: ``[batch, drafts, vocab]``, rules applied.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def fix(self, known: Tensor, drafts: Tensor) -> Predictions:  # noqa: ARG002
        """Return predictions given tokens that are known already; do not read what they draw for those.

        Args:
            known: ``[batch, drafts]`` bool.
            drafts: ``[batch, drafts]`` int64, the tokens.
        """
        return self

    def draw(self, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw tokens with keyed noise at the rows' sharpness.

        Args:
            positions: ``[batch, drafts]`` int64, of the tokens.
            sampling: per-row parameters.

        Returns:
            ``[batch, drafts]`` int64; -1 where a logit is NaN.
        """
        return sampling.select(self.logits, positions, sampling.sharpness)

    def draw_for(self, acceptance: RejectionAcceptance, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw ``[batch, drafts]`` from the drafter's own distribution, which ``acceptance`` remembers."""
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
        """Return predictions whose only candidate is the known token, which so precedes the next; see `Predictions`."""
        ids = torch.arange(self.logits.shape[-1], device=drafts.device)
        others = known[..., None] & (ids != drafts[..., None])
        logits = self.logits.masked_fill(others, -torch.inf)
        return LinkedPredictions(logits, self.pairs, self.anchor, self.top_k)

    def draw(self, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw a path ``[batch, drafts]``, -1 from a NaN on; see `Predictions`.

        The candidates are those with the best noisy logits, since the target's choice is made with the same
        noise: on a trained pair more of them are accepted. A selector that adds nothing draws what `Predictions` draw.
        """
        sharpness = sampling.sharpness[:, None]
        candidates = self._candidates(positions, sampling, sharpness)
        return self._walk(candidates, positions, sampling, sharpness, stream=0)[0][:, 0]

    def draw_for(self, acceptance: RejectionAcceptance, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw ``[batch, drafts]`` from the selector's distribution, which ``acceptance`` remembers.

        The candidates are plain: the noise of the draw must not choose them too, which would bias the output.
        """
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
        """Return the paths ``[batch, 1, drafts]`` and the scores of the candidates along them."""
        return ops.walk_candidates(
            self.pairs.queries, self.pairs.predecessors, self.pairs.successors, self.anchor, *candidates, positions,
            s.seeds, s.temperature, s.top_k, s.top_p, s.min_p, sharpness, stream,
        )  # fmt: skip
