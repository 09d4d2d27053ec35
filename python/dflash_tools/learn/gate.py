"""Judge by replayed answers if a drafter is better than the one before it: `judge`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

LEAST_GAIN, MOST_LOSS = 0.02, 0.02
_DRAWS = 4000

Steps = Sequence[Sequence[int]]
"""Per answer, the tokens that each step emitted."""


class Gain(NamedTuple):
    """How many more tokens per step one drafter has than another, on the same answers.

    Attributes:
        before, after: tokens per step.
        gain: ``after / before - 1``.
        low, high: its 95 % interval, by bootstrap over answers (Efron, 1979).
        answers: how many were replayed.
    """

    before: float
    after: float
    gain: float
    low: float
    high: float
    answers: int

    @classmethod
    def of(cls, before: Steps, after: Steps) -> Gain:
        """Compare two drafters on the same answers.

        Raises:
            ValueError: no answer has a step.
        """
        pairs = [(len(one), len(other), sum(one)) for one, other in zip(before, after, strict=True) if one]
        if not pairs:
            raise ValueError("no answer has more than one token: nothing can be compared")
        counts = torch.tensor(pairs, dtype=torch.float64)  # [answers, 3]: steps before and after, tokens
        draws = torch.randint(len(pairs), (_DRAWS, len(pairs)), generator=torch.Generator().manual_seed(0))
        sums = counts[draws].sum(1)
        low, high = (sums[:, 0] / sums[:, 1] - 1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        steps, fewer, tokens = counts.sum(0).tolist()
        return cls(tokens / steps, tokens / fewer, steps / fewer - 1, low, high, len(pairs))

    def __str__(self) -> str:
        change = f"{self.gain:+.1%} ({self.low:+.1%} to {self.high:+.1%})"
        return f"{self.before:.2f} to {self.after:.2f} tokens per step, {change}, {self.answers} answers"


class CandidateGains(NamedTuple):
    """Gains of a candidate.

    Attributes:
        own: its gain on the newest of the machine's own answers, which it has not learned from.
        general: that on general answers.
    """

    own: Gain
    general: Gain

    @property
    def is_adopted(self) -> bool:
        return self.own.low > LEAST_GAIN and self.general.gain > -MOST_LOSS

    def __str__(self) -> str:
        """Return a report whose first sentence says it all."""
        word = "Adopted" if self.is_adopted else "Not adopted"
        gains = f"{self.own.gain:+.1%} tokens per step on new answers, {self.general.gain:+.1%} on general ones"
        rule = f"surely above {LEAST_GAIN:+.0%} on new answers, and above {-MOST_LOSS:+.0%} on general ones"
        details = f"  new answers: {self.own}\n  general: {self.general}"
        return f"{word}: {gains}.\n{details}\n(Adopted if {rule}.)"


def judge(before: tuple[Steps, Steps], after: tuple[Steps, Steps]) -> CandidateGains:
    """Compare a candidate with the drafter before it; each is the steps of own answers and of general ones."""
    return CandidateGains(Gain.of(before[0], after[0]), Gain.of(before[1], after[1]))
