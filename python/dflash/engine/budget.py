"""``tree="auto"``: how many rows of a tree the next step verifies, chosen on the host by the last report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from ..proposers import TREE_SIZES
from .state import RUNNING, RowReport

__all__ = ["Budget", "measured_costs"]

# Tokens that are taken as accepted, and as predicted, before the first step.
_PRIOR = 6.0
# Tokens per step at each size, until the first report: Qwen3-8B on MATH-500 (DDTree, arXiv 2604.12989).
_PUBLISHED = (8.6, 9.3, 9.75, 10.2)
# No tree that was measured emits half as much again from twice the rows.
_MOST_PER_DOUBLING = 1.5
# Steps of each size that are timed, and seconds after which no more are.
_TIMED, _SECONDS = 5, 0.5


class Budget:
    """Chooses the size of which most tokens per second are to be expected.

    A step emits one token of the target's own and the nodes that it accepts. The drafter's probabilities predict their
    number for every size, if it is as good as it believes. What was accepted so far, over what was predicted, corrects
    for this.

    Args:
        costs: by size, what a step costs, in any unit.
    """

    def __init__(self, costs: Mapping[int, float]) -> None:
        self.costs = costs
        self._accepted = self._predicted = _PRIOR
        self._expected: list[Sequence[float]] = [_PUBLISHED]

    def choose(self) -> int:
        """Return the rows of the next step."""
        correction = self._accepted / self._predicted

        def tokens_per_cost(size: int) -> float:
            place = TREE_SIZES.index(size)
            tokens = sum(1 + correction * (expected[place] - 1) for expected in self._expected)
            return tokens / self.costs[size]

        return max(self.costs, key=tokens_per_cost)

    def observe(self, rows: int, emitted: Sequence[int], reports: Sequence[RowReport]) -> None:
        """Learn from a step.

        Args:
            rows: that it verified.
            emitted: per row, its tokens.
            reports: per row; those that have ended tell nothing, since the end may have cut a path off.
        """
        running = [
            (count, report) for count, report in zip(emitted, reports, strict=True) if report.done == RUNNING and count
        ]
        if not running:
            return
        place = TREE_SIZES.index(rows)
        self._accepted += sum(count - 1 for count, _ in running)
        self._predicted += sum(report.expected[place] - 1 for _, report in running)
        self._expected = [report.expected for _, report in running]


def measured_costs(
    step: Callable[[int], None], warm_ups: int, agreed: Callable[[float], float] = float
) -> dict[int, float]:
    """Return the seconds of a step by size, up to the first that costs too much ever to be worth it.

    Args:
        step: takes a step of so many rows, and waits for its end.
        warm_ups: steps of each size that are not timed.
        agreed: returns the number that all processes of the target use for theirs.
    """
    costs: dict[int, float] = {}
    for size in TREE_SIZES:
        for _ in range(warm_ups):
            step(size)
        seconds: list[float] = []
        while len(seconds) < _TIMED and sum(seconds) < _SECONDS:
            began = time.perf_counter()
            step(size)
            seconds.append(agreed(time.perf_counter() - began))
        cost = statistics.median(seconds)
        if costs and cost > _MOST_PER_DOUBLING * costs[size // 2]:
            break
        costs[size] = cost
    return costs
