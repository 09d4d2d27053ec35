"""``draft_sharpness="auto"``: the sharpness of the drafts, chosen per row on the device as generation proceeds.

The text is the same whatever is drafted (`dflash.sampling.parameters`), so it also tells which other drafts would
have been accepted. Every step draws the proposals of each level from the same logits and noise, drafts those of the
level that has done best so far, and then compares all of them with the tokens that the step emitted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..sampling import Sampling
from .predictions import Predictions
from .samplers import DraftSampler

__all__ = ["LEVELS", "AutoSharpness"]

LEVELS = (math.inf, 2.0, 1.0)  # the first is used until another has done better
_HANDICAP = 2.0


class AutoSharpness(DraftSampler):
    """Running means of what each sharpness would have had accepted, and the best of them, per row.

    The m tokens that a step emits are the target's own whatever was drafted, so a level's proposals are judged on
    them. Let k be the number of leading proposals that equal them. The level's draft *ended* if the next proposal is
    wrong, or if the row is done. If there is none to judge, because the level in use was wrong before or the block was
    too narrow, the draft would have gone further, nobody knows how far, and counts as still running. A level's score is
    tokens kept over drafts ended. That is its mean accepted length where every draft ended, and with unfinished drafts
    the maximum-likelihood mean of a geometric length: a level is neither charged for drafts that were cut short nor
    credited with tokens nobody saw. All levels are scored on the same steps, so there is nothing to explore.

    A row starts at infinity, and the other levels start two lost drafts behind: within a short answer the means are
    noise, and a level must lead by about two divided by the number of steps so far. Every call of ``generate`` starts
    afresh, so that equal calls draft equally.

    With ``denoise_steps > 1`` the later passes have seen tokens of the level in use, and the others are judged with
    these: an approximation that at most costs speed.

    Acceptance length on the package's pair (48 prompts, fp32; ``python -m pytest -s tests/test_sharpness.py`` prints
    it) of auto, infinity and 1: T = 0.7 13.15, 13.15, 13.32; T = 1 12.79, 12.71, 13.15. T = 1 with normal noise added
    to the logits of its first-generation drafter: deviation 2 9.80, 9.80, 9.63; deviation 4 4.57, 4.57, 4.18. On
    logits without a best token (normal, deviation 2, drafter equal to the target, vocabulary of 64, 500 tokens): 15.0,
    1.4, 15.6.

    Args:
        batch: rows of the batch.
        drafts: proposals per block.
        device: of the tensors.

    Attributes:
        levels: ``[3, batch]`` float32, `LEVELS` for each row that adapts, else three times its own sharpness.
        candidates: ``[batch, 3, drafts]`` int64, the proposals of each level for this step.
        kept: ``[batch, 3]`` float32, tokens kept.
        ended: ``[batch, 3]`` float32, drafts ended.
        choice: ``[batch]`` int64, the index of the level that the next step uses.
    """

    def __init__(self, batch: int, drafts: int, device: torch.device | str = "cpu") -> None:
        self.levels = torch.ones(len(LEVELS), batch, dtype=torch.float32, device=device)
        self.candidates = torch.full((batch, len(LEVELS), drafts), -1, dtype=torch.int64, device=device)
        self.kept = torch.zeros(batch, len(LEVELS), dtype=torch.float32, device=device)
        self.ended = torch.ones_like(self.kept)
        self.choice = torch.zeros(batch, dtype=torch.int64, device=device)
        self._index = torch.arange(len(LEVELS), device=device)
        self.reset_(slice(0, batch))

    def reset_(self, rows: slice, levels: Sequence[float] = LEVELS) -> None:
        """Forget every step of ``rows``, which choose among ``levels`` from now on."""
        self.levels[:, rows] = torch.tensor(levels, dtype=torch.float32, device="cpu")[:, None]
        self.kept[rows] = 0.0
        self.ended[rows] = 1.0
        self.ended[rows, 1:] += _HANDICAP
        self.choice[rows] = 0

    def draw(self, predictions: Predictions, positions: Tensor, sampling: Sampling) -> Tensor:
        """Return one candidate per level, ``[batch, 3, drafts]``."""
        return predictions.draw(positions, sampling, self.levels)

    def pick(self, candidates: Tensor) -> Tensor:
        """Return the proposals ``[batch, drafts]`` of each row's level, of ``candidates [batch, 3, drafts]``."""
        return candidates.gather(1, self.choice[:, None, None].expand(-1, 1, candidates.shape[2]))[:, 0]

    def remember_(self, candidates: Tensor) -> None:
        """Keep the candidates of this step for `observe_`."""
        self.candidates[..., : candidates.shape[2]].copy_(candidates)

    def observe_(self, choices: Tensor, num_context: Tensor, done: Tensor) -> None:
        """Score the candidates of a step that was committed.

        Args:
            choices: ``[batch, at most drafts + 1]`` int64, the target's choices after each row of the block.
            num_context: ``[batch]`` int64, how many of them were emitted; 0 leaves the row as it is.
            done: ``[batch]`` int64, 0 where the row is running.
        """
        emitted = num_context[:, None]
        drafted = choices[:, None, :-1]  # a chain may be narrower than the widest
        matches = self.candidates[..., : drafted.shape[2]] == drafted
        kept = torch.minimum(matches.cumprod(-1).sum(-1), emitted)
        judged = emitted.clamp(max=drafted.shape[2])
        ended = ((kept < judged) | (done != 0)[:, None]) & (emitted > 0)
        self.kept.add_(kept)
        self.ended.add_(ended)
        # An earlier level wins a tie on every device: argmax names no order.
        score = self.kept / self.ended
        best = score == score.amax(-1, keepdim=True)
        torch.amin(torch.where(best, self._index, len(LEVELS)), -1, out=self.choice)
