"""``tree="auto"``: how many rows of a tree the next step verifies, chosen on the host by the reports it has read."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence

from ..proposers import TREE_SIZES
from .state import RUNNING, RowReport

__all__ = ["TreeBudget", "measured_costs"]

# Tokens that are taken as accepted, and as predicted, before the first step.
_PRIOR = 6.0
# Tokens per step at each size, until there are reports: Qwen3-8B on MATH-500 (DDTree, arXiv 2604.12989).
_PUBLISHED = (8.6, 9.3, 9.75, 10.2)
# What a report counts in the running mean of what is expected. One step's tree says little about the next one's.
_NEW = 0.2
# No tree that was measured emits half as much again from twice the rows.
_MOST_PER_DOUBLING = 1.5
# Each size is timed so often, and less often once this many seconds are spent.
_LEAST_ROUNDS, _ROUNDS, _SECONDS = 2, 20, 0.5


class TreeBudget:
    """Chooses the size of which most tokens per second are to be expected.

    A step emits one token of the target's own and the nodes that it accepts. The drafter's probabilities predict their
    number for every size, if it is as good as it believes. What was accepted so far, over what was predicted, corrects
    for this.

    Args:
        costs: by size, what a step costs, in any unit; empty if they are still to be measured.
    """

    def __init__(self, costs: Mapping[int, float]) -> None:
        self.costs = costs
        self._accepted = self._predicted = _PRIOR
        self._expected: Sequence[float] = _PUBLISHED

    def choose(self) -> int:
        """Return the rows of the next step."""
        correction = self._accepted / self._predicted

        def tokens_per_cost(size: int) -> float:
            expected = self._expected[TREE_SIZES.index(size)]
            return (1 + correction * (expected - 1)) / self.costs[size]

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
        means = [sum(column) / len(running) for column in zip(*(report.expected for _, report in running), strict=True)]
        self._expected = [old + _NEW * (new - old) for old, new in zip(self._expected, means, strict=True)]


def measured_costs(
    step: Callable[[int], None], warm_ups: int, shared: Callable[[float], float] = float
) -> dict[int, float]:
    """Return the seconds of a step by size, up to the first that costs too much ever to be worth it.

    The sizes take turns, and the shortest time of each counts: other work on the machine comes and goes, and only ever
    makes a step longer.

    Args:
        step: takes a step of so many rows, and waits for its end.
        warm_ups: the first steps of each size that take longer.
        shared: returns the number that all processes of the target use for theirs.
    """
    shortest: dict[int, float] = {}

    def time_step(size: int) -> float:
        began = time.perf_counter()
        step(size)
        seconds = shared(time.perf_counter() - began)
        shortest[size] = min(seconds, shortest.get(size, seconds))
        return seconds

    def is_worth_it(size: int) -> bool:
        return size // 2 not in shortest or shortest[size] <= _MOST_PER_DOUBLING * shortest[size // 2]

    rounds, spent = 0, 0.0
    while rounds < _LEAST_ROUNDS or (rounds < _ROUNDS and spent < _SECONDS):
        for size in TREE_SIZES:
            if size not in shortest:
                for _ in range(warm_ups):
                    time_step(size)
            spent += time_step(size)
            if not is_worth_it(size):
                break  # of this round: its time may have been an accident
        rounds += 1
    return {size: shortest[size] for size in itertools.takewhile(is_worth_it, shortest)}
