"""``tree="auto"``: how many rows of a tree the next step verifies, chosen on the host by the reports it has read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from ..proposers import TREE_SIZES
from .state import RUNNING, RowReport

__all__ = ["TreeBudget", "measured_costs"]

# Tokens that are taken as accepted, and as predicted, before the first step.
_PRIOR = 6.0
# Tokens per step at each size, until there are reports: Qwen3-8B on MATH-500 (DDTree, arXiv 2604.12989).
_PUBLISHED = (8.6, 9.3, 9.75, 10.2)
# Weight of a new report in the running mean of what is expected. One step's tree says little about the next one's.
_NEW = 0.2
# Sizes that promise this much of the best one's tokens per second count as equal, and the smallest is taken: times are
# measured to a few percent, and the drafter promises more of deep trees than it keeps.
_EQUAL = 0.97
# No tree that was measured emits half as much again from twice the rows.
_MOST_PER_DOUBLING = 1.5
# Turns per size, unless this many seconds have passed.
_ROUNDS, _SECONDS = 8, 0.5
# The first step of a turn finds the caches full of another size's data. With the package's pair on a busy machine, 32
# rows took 1.13 times as long as 16 by one step per turn, 1.18 by two, 1.21 by three and by four (means of 7).
_STEPS_PER_TURN = 3


class TreeBudget:
    """Chooses the size of which most tokens per second are to be expected, the smallest of nearly equal ones.

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

        promised = {size: tokens_per_cost(size) for size in self.costs}
        return min(size for size, tokens in promised.items() if tokens >= _EQUAL * max(promised.values()))

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


def measured_costs(time_step: Callable[[int], float], warm_ups: int) -> dict[int, float]:
    """Return the seconds of a step by size, up to the first that costs too much ever to be worth it.

    The sizes take turns, and the shortest time of each counts: other work on the machine comes and goes, and only ever
    makes a step longer.

    Args:
        time_step: takes a step of so many rows, and returns its seconds.
        warm_ups: the first steps of each size that take longer.
    """
    shortest: dict[int, float] = {}

    def is_worth_it(size: int) -> bool:
        return size // 2 not in shortest or shortest[size] <= _MOST_PER_DOUBLING * shortest[size // 2]

    rounds, spent = 0, 0.0
    while rounds < _ROUNDS and spent < _SECONDS:
        for size in TREE_SIZES:
            steps = _STEPS_PER_TURN if size in shortest else max(_STEPS_PER_TURN, warm_ups + 1)
            seconds = min(time_step(size) for _ in range(steps))
            shortest[size] = min(seconds, shortest.get(size, seconds))
            spent += _STEPS_PER_TURN * seconds
            if not is_worth_it(size):
                break  # of this round: its time may have been an accident
        rounds += 1
    return {size: shortest[size] for size in itertools.takewhile(is_worth_it, shortest)}
