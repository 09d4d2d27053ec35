"""``denoise_steps > 1``: draft a block in several passes, each keeping what the one before was sure of.

After each pass but the last, the most confident tokens of the block stay, the others are masked again, and the drafter
runs once more. How many stay is fixed in advance, so that no shape and no branch depends on data. Every pass costs one
forward pass of the drafter; the text stays the same.

A token's confidence is its probability by the drafter's logits. Where a selector or a Markov head chose it by more than
these (`dflash.proposers.predictions.LinkedPredictions`), what they add does not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["most_confident", "schedule"]


def schedule(drafts: int, steps: int) -> tuple[int, ...]:
    """Return how many of ``drafts`` tokens stay after each pass but the last: equal parts, at least one each.

    More passes than tokens would add nothing and are not made.
    """
    steps = min(steps, drafts)
    return tuple(drafts * done // steps for done in range(1, steps))


def most_confident(logits: Tensor, drafts: Tensor, known: Tensor | None, count: int) -> Tensor:
    """Extend ``known`` to ``count`` tokens per row by those that the drafter finds most probable.

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
