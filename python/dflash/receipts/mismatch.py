"""A recorded token that is not the target's choice, and by how much it lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..sampling import Sampling

__all__ = ["Mismatch", "Place", "find_mismatch"]

# Two ways to sum the same numbers differ by about this share of the logits: two units in the last place of the 16-bit
# types, and in float32, where only sums are rounded, what a few layers make of them.
_ROUNDING = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-16}
_LARGEST_MARGIN, _HALVINGS = 1024.0, 40


@dataclass(frozen=True)
class Mismatch:
    """A recorded token that is not the target's choice.

    Attributes:
        index: of the token in the answer, from 0.
        token: the recorded id.
        chosen: the id that seed and weights choose there.
        margin: how much one logit would have to change for the recorded token to be chosen: its own upward, or that of
            the chosen one downward. Infinite if a rule forbids the token.
        rounding: margins up to this may come from rounding.
    """

    index: int
    token: int
    chosen: int
    margin: float
    rounding: float

    @property
    def is_near_tie(self) -> bool:
        """True if another order of sums may choose the recorded token."""
        return self.margin <= self.rounding


class Place(NamedTuple):
    """What a token was chosen from.

    Attributes:
        raw: ``[vocab]``, the target's own logits.
        logits: ``[vocab]``, rules applied.
        position: ``[]`` int64, of the token.
        sampling: of this row only.
        dtype: of the target.
    """

    raw: Tensor
    logits: Tensor
    position: Tensor
    sampling: Sampling
    dtype: torch.dtype


def find_mismatch(place: Place, index: int, token: int, chosen: int) -> Mismatch:
    """Measure by how much ``token`` lost against ``chosen``; see `Mismatch`."""
    logits, one = place.logits.float(), torch.ones(1, dtype=torch.float32, device=place.logits.device)
    if token >= len(logits):  # ids that the embedding table has and the head has not
        return Mismatch(index, token, chosen, math.inf, 0.0)

    def wins(changed_token: int, change: float) -> bool:
        changed = logits.clone()
        changed[changed_token] += change
        return int(place.sampling.select(changed[None, None], place.position.reshape(1, 1), one)) == token

    margin = min(_least(lambda change: wins(token, change)), _least(lambda change: wins(chosen, -change)))
    # A bias is added to what was rounded, however large it is.
    largest = float(torch.minimum(place.raw.float().abs(), logits.abs())[[token, chosen]].nan_to_num(posinf=0.0).max())
    return Mismatch(index, token, chosen, margin, _ROUNDING.get(place.dtype, 0.0) * max(1.0, largest))


def _least(is_enough: Callable[[float], bool]) -> float:
    """Return the least change that is enough, by bisection; infinity if none is."""
    low, high = 0.0, _LARGEST_MARGIN
    if not is_enough(high):
        return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
