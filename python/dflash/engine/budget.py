"""``tree="auto"`` and ``block_size="auto"``: the rows of the next step, chosen on the host by reports it has read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..proposers import chain_widths
from ..state import RUNNING, TREE_SIZES, RowReport

# Tokens that are taken as accepted, and as predicted, before the first step.
_PRIOR = 6.0
# Tokens per step at each size, until there are reports: Qwen3-8B on MATH-500 (DDTree, arXiv 2604.12989). That of 8 rows
# is a guess: at most 8.
_PUBLISHED = (7.3, 8.6, 9.3, 9.75, 10.2)
# Weight of a new report in the running mean of what is expected. One step's tree says little about the next one's.
_NEW = 0.2
# Sizes that promise this much of the best one's tokens per second count as equal, and the smallest is taken: times are
# measured to a few percent, and the drafter promises more of deep trees than it keeps.
_EQUAL = 0.97
# No tree that was measured emits half as much again from twice the rows, but those that grow from 8 rows.
_MOST_PER_DOUBLING = 1.5
# Turns per size, unless steps have taken this many seconds.
_ROUNDS, _SECONDS = 8, 0.5
# The first step of a turn finds the caches full of another size's data. With the package's pair on a busy machine, 32
# rows took 1.13 times as long as 16 by one step per turn, 1.18 by two, 1.21 by three and by four (means of 7).
_STEPS_PER_TURN = 3
# Context lengths below this are one bucket; from there on each power of two begins another.
_FIRST_BUCKET = 256
# Weight that is left to a chain's steps by each step after them: the last 20 count most. Without this, a width could
# never grow again: narrow blocks show nothing of what wider ones would do.
# Nor can steps without drafts tell what drafts would do: what is known of them fades likewise.
_FADING = 1 - 1 / 20
# Steps, or drafts that a tree predicted, below which what is known fades no more: next to a new step it is nothing.
_LEAST = 0.1
# Steps without drafts after which they are tried again: at first, and at most. A trial that no other step with drafts
# follows doubles them.
_FIRST_REST, _LONGEST_REST = 4, 31
# Steps of the widest that are taken as accepted whole before the first step. With more, a useless drafter is noticed
# later; with fewer, one wrong block ends drafting.
_FIRST_STEPS = 0.25
# Steps of a row that a bucket takes over from its neighbor at most, and a call from earlier ones.
_TAKEN_OVER = 8.0


class Budget:
    """Chooses the size that promises most tokens per cost, the smallest of nearly equal ones.

    One row drafts nothing. Such steps show nothing of drafts: what is known of them fades, and after a rest of some
    steps the smallest size is tried. A call takes over what earlier ones have learned, weighed as a few steps.

    Args:
        costs: by size, what a step costs, in any unit; empty while they are still to be measured.
    """

    def __init__(self, costs: Mapping[int, float]) -> None:
        self.costs = costs
        self._rested, self._rest = 0, _FIRST_REST  # steps in a row without drafts, and their number before a trial

    def begin(self) -> None:
        """Begin another call, whose costs are still to be measured."""
        self.costs = {}
        self._rest = min(self._rest, 2 * _FIRST_REST)  # steps of several calls add up to a rest

    def choose(self) -> int:
        """Return the rows of the next step."""
        promised = {size: self.expected(size) / cost for size, cost in self.costs.items()}
        if self._rested >= self._rest:
            return min(size for size in promised if size > 1)
        return min(size for size, tokens in promised.items() if tokens >= _EQUAL * max(promised.values()))

    def expected(self, rows: int) -> float:
        """Return the tokens that are expected of the next step."""
        raise NotImplementedError

    def _count(self, rows: int) -> None:
        """Take note of a step that verified ``rows``."""
        if rows == 1:
            self._rested += 1
            return
        self._rest = min(2 * self._rest, _LONGEST_REST) if self._rested else _FIRST_REST
        self._rested = 0


class TreeBudget(Budget):
    """Chooses the rows of a tree.

    A step emits one token of the target's own and the nodes that it accepts. The drafter's probabilities predict their
    number for every size, if it is as good as it believes. What was accepted so far, over what was predicted, corrects
    for this.
    """

    def __init__(self, costs: Mapping[int, float]) -> None:
        super().__init__(costs)
        self._accepted = self._predicted = _PRIOR
        self._expected: Sequence[float] = _PUBLISHED

    def begin(self) -> None:
        """See `Budget.begin`."""
        super().begin()
        share = min(1.0, _TAKEN_OVER * _PRIOR / self._predicted)
        self._accepted, self._predicted = share * self._accepted, share * self._predicted

    def expected(self, rows: int) -> float:
        """See `Budget.expected`."""
        if rows == 1:
            return 1.0
        return 1 + self._accepted / self._predicted * (self._expected[TREE_SIZES.index(rows)] - 1)

    def observe(self, rows: int, emitted: Sequence[int], reports: Sequence[RowReport]) -> None:
        """Learn from a step that verified ``rows``. Rows that have ended are left out: the end may cut a path off."""
        pairs = zip(emitted, reports, strict=True)
        running = [(count, report) for count, report in pairs if report.done == RUNNING and count]
        if not running:
            return
        self._count(rows)
        if rows == 1:
            if self._predicted > _LEAST:
                self._accepted, self._predicted = (_FADING * count for count in (self._accepted, self._predicted))
            return
        place = TREE_SIZES.index(rows)
        self._accepted += sum(count - 1 for count, _ in running)
        self._predicted += sum(report.expected[place] - 1 for _, report in running)
        means = [sum(column) / len(running) for column in zip(*(report.expected for _, report in running), strict=True)]
        self._expected = [old + _NEW * (new - old) for old, new in zip(self._expected, means, strict=True)]


def context_bucket(length: int) -> int:
    """Return the first context length of a bucket: 0, 256, 512, 1024 and so on."""
    return 0 if length < _FIRST_BUCKET else 1 << (length.bit_length() - 1)


@dataclass
class _Counts:
    """How many steps each width would have needed to write the same tokens."""

    tokens: float
    steps: dict[int, float]  # by width
    taken: float = 1.0  # steps that were really taken

    def scaled(self, factor: float) -> _Counts:
        steps = {width: factor * steps for width, steps in self.steps.items()}
        return _Counts(factor * self.tokens, steps, factor * self.taken)

    def faded(self) -> _Counts:
        """Return these counts as they weigh a step later."""
        return self.scaled(_FADING) if self.taken > _LEAST else self

    def at_most(self, taken: float) -> _Counts:
        """Return these counts, weighed as at most so many steps."""
        return self.scaled(min(1.0, taken / self.taken))

    def add(self, before: int, emitted: int) -> None:
        """Count a step that wrote ``emitted`` tokens of a run, of which ``before`` had been written."""
        self.tokens += emitted
        self.taken += 1
        for width in self.steps:
            self.steps[width] += math.ceil((before + emitted) / width) - math.ceil(before / width)


class WidthBudget(Budget):
    """Chooses the width of chains.

    Up to the first wrong draft the tokens of steps are a *run*, of which blocks of w rows need ``ceil(run / w)`` steps.
    So every width is judged by the same tokens. Shares of drafts kept per position would not do: a wide block always
    ends at a token that is hard to draft, and a narrow one also before.

    Lengths of one `context_bucket` share their counts, which begin as those of the nearest bucket, weighed as a few
    steps. The first call begins with the widest, as if a part of a step had kept everything.

    Args:
        costs: as in `Budget`.
        block_size: the widest.
    """

    def __init__(self, costs: Mapping[int, float], block_size: int) -> None:
        super().__init__(costs)
        self._block_size = block_size
        self._counts: dict[int, _Counts] = {}
        self._runs: dict[int, int] = {}  # by row, the tokens of its unfinished run
        # Of each row's length in the last step, which may be one of the call before.
        self._running: list[_Counts] = [self._first()]

    def begin(self) -> None:
        """See `Budget.begin`."""
        super().begin()
        self._runs.clear()
        self._counts = {bucket: counts.at_most(_TAKEN_OVER) for bucket, counts in self._counts.items()}

    def expected(self, rows: int) -> float:
        """See `Budget.expected`."""
        return sum(counts.tokens / counts.steps[rows] for counts in self._running)

    def observe(self, rows: int, emitted: Sequence[int], reports: Sequence[RowReport]) -> None:
        """Learn from a step; see `TreeBudget.observe`."""
        rows_of = enumerate(zip(emitted, reports, strict=True))
        running = {row: context_bucket(r.length - n) for row, (n, r) in rows_of if r.done == RUNNING and n}
        if not running:
            return
        self._count(rows)
        for bucket in set(running.values()):
            self._counts[bucket] = self._at(bucket).faded()
        if rows == 1:
            self._runs.clear()
        else:
            for row, bucket in running.items():
                before = self._runs.get(row, 0)
                self._counts[bucket].add(before, emitted[row])
                self._runs[row] = 0 if emitted[row] < rows else before + emitted[row]
        self._running = [self._counts[bucket] for bucket in running.values()]

    def leave(self, row: int) -> None:
        """Forget the run of a row, which another call will have."""
        self._runs.pop(row, None)

    def _at(self, bucket: int) -> _Counts:
        if bucket in self._counts:
            return self._counts[bucket]
        if not self._counts:
            return self._first()
        nearest = self._counts[min(self._counts, key=lambda other: abs(other - bucket))]
        return nearest.at_most(_TAKEN_OVER)

    def _first(self) -> _Counts:
        steps = {width: math.ceil(self._block_size / width) for width in chain_widths(self._block_size)}
        return _Counts(self._block_size, steps).scaled(_FIRST_STEPS)


def measured_costs(
    time_step: Callable[[int], float],
    warm_ups: int,
    sizes: Sequence[int] = (1, *TREE_SIZES),
    most_per_doubling: float = _MOST_PER_DOUBLING,
) -> dict[int, float]:
    """Return the seconds of a step by size, up to the first that costs too much ever to be worth it.

    The sizes take turns, and the shortest time of each counts, since other work on the machine only makes steps longer.
    Each size takes its warm-ups and one step more, however long these are.

    Args:
        time_step: takes a step of so many rows, and returns its seconds.
        warm_ups: the first steps of each size, which take longer.
        sizes: in ascending order.
        most_per_doubling: the most that a size of more than 16 rows may cost of half its rows.
    """
    shortest: dict[int, float] = {}
    rounds, spent = 0, 0.0

    def is_worth_it(size: int) -> bool:
        half = size // 2
        return half <= TREE_SIZES[0] or half not in shortest or shortest[size] <= most_per_doubling * shortest[half]

    while rounds < _ROUNDS and spent < _SECONDS:
        for size in sizes:
            needed = 1 if size in shortest else warm_ups + 1
            for taken in range(max(_STEPS_PER_TURN, needed)):
                if taken >= needed and spent >= _SECONDS:
                    break
                seconds = time_step(size)
                spent += seconds if taken + 1 >= needed else 0.0
                shortest[size] = min(seconds, shortest.get(size, seconds))
            if not is_worth_it(size):
                break  # of this round: its time may have been an accident
        rounds += 1
    return {size: shortest[size] for size in itertools.takewhile(is_worth_it, shortest)}
