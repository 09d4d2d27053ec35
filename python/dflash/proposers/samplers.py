"""How a drafter's logits become proposals."""

from __future__ import annotations

import torch
from torch import Tensor

from ..sampling import RejectionAcceptance, Sampling
from .block import DraftMasks
from .predictions import Predictions

__all__ = ["DraftSampler", "FixedSharpness", "MaskedDrafts", "RejectionDrafts"]


class DraftSampler:
    """Draws proposals, one candidate block per row or several to pick from.

    Attributes:
        checked: the last candidates that were drawn, if what is picked of them was found to keep to the grammars.
    """

    checked: Tensor | None = None

    def draw(self, predictions: Predictions, positions: Tensor, sampling: Sampling) -> Tensor:
        """Return candidates ``[batch, n, drafts]`` int64.

        Args:
            predictions: the drafter's.
            positions: ``[batch, drafts]`` int64, of the tokens that are drawn.
            sampling: per-row parameters.
        """
        raise NotImplementedError

    def pick(self, candidates: Tensor) -> Tensor:
        """Return the proposals ``[batch, drafts]`` among ``candidates [batch, n, drafts]``."""
        return candidates[:, 0]

    def remember_(self, candidates: Tensor) -> None:
        """Keep the candidates of this step for `observe_`."""

    def observe_(self, choices: Tensor, num_context: Tensor, done: Tensor) -> None:
        """Learn from a committed step: see `dflash.proposers.AutoSharpness.observe_`."""


class FixedSharpness(DraftSampler):
    """``argmax(sharpness * logits / temperature + gumbel)`` with the sharpness that the caller asked for."""

    def draw(self, predictions: Predictions, positions: Tensor, sampling: Sampling) -> Tensor:
        """Return one candidate ``[batch, 1, drafts]``."""
        return predictions.draw(positions, sampling, sampling.sharpness[None])


class RejectionDrafts(DraftSampler):
    """Draws from the drafter's own distribution, as ``acceptance="rejection"`` needs it.

    Args:
        acceptance: remembers what the drafts were drawn from.
    """

    def __init__(self, acceptance: RejectionAcceptance) -> None:
        self.acceptance = acceptance

    def draw(self, predictions: Predictions, positions: Tensor, sampling: Sampling) -> Tensor:
        """Return one candidate ``[batch, 1, drafts]``."""
        return predictions.draw_for(self.acceptance, positions, sampling)


class MaskedDrafts(DraftSampler):
    """Draws again where a row's first draft that a grammar bans stands, at most `ROUNDS` times per block.

    With the package's pair (T = 0, tokens per step) 8 rounds left JSON that it writes anyway at 15.17. They raised
    keys in another order from 3.03 to 4.38, keys that the pair never saw from 1.84 to 5.65, and sums as JSON from 1.13
    to 2.02. More rounds gained nothing (`bench/bench_grammar.py`).

    Args:
        sampler: draws.
        masks: knows what is banned.
    """

    ROUNDS = 8

    def __init__(self, sampler: DraftSampler, masks: DraftMasks) -> None:
        self.sampler, self.masks = sampler, masks

    def draw(self, predictions: Predictions, positions: Tensor, sampling: Sampling) -> Tensor:
        """Return the sampler's candidates; overwrites logits of ``predictions``, and waits for the device."""
        candidates, self.checked = self.sampler.draw(predictions, positions, sampling), None
        for _ in range(self.ROUNDS):
            found = self.masks.banned_drafts(self.sampler.pick(candidates), predictions.logits.shape[-1])
            if not found:
                self.checked = candidates
                break
            for row, place, banned in found:
                predictions.logits[row, place].masked_fill_(banned, -torch.inf)
            candidates = self.sampler.draw(predictions, positions, sampling)
        return candidates

    def pick(self, candidates: Tensor) -> Tensor:
        """Return the sampler's pick."""
        return self.sampler.pick(candidates)

    def remember_(self, candidates: Tensor) -> None:
        """Let the sampler remember."""
        self.sampler.remember_(candidates)

    def observe_(self, choices: Tensor, num_context: Tensor, done: Tensor) -> None:
        """Let the sampler learn."""
        self.sampler.observe_(choices, num_context, done)
