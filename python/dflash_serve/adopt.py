"""A server takes up drafters that were learned from its answers, and gives them up if they are worse: `Adopter`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dflash import load_draft
from dflash.light import terminal

from .record import AnswerRecorder
from .scheduler import Scheduler

_LOG = logging.getLogger(__name__)
_POLL = 2.0  # seconds
ENOUGH, _SIGMAS = 50, 3.0  # answers before a drafter is rolled back, and how sure that it is worse
_REMEMBERED = 500  # answers whose steps are compared


class Pace:
    """Tokens per step of the last answers."""

    def __init__(self) -> None:
        self._answers: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, steps: Sequence[int]) -> None:
        if steps:
            self._answers.append((sum(steps), len(steps)))

    @property
    def mean(self) -> float:
        """NaN before the first answer."""
        tokens, steps = map(sum, zip(*self._answers, strict=True)) if self._answers else (math.nan, 1)
        return tokens / steps

    @property
    def error(self) -> float:
        """Standard error of the mean, of a ratio of sums over answers."""
        count, mean, steps = len(self), self.mean, sum(steps for _, steps in self._answers)
        squares = sum((tokens - mean * own) ** 2 for tokens, own in self._answers)
        return math.sqrt(squares * count / max(1, count - 1)) / steps

    def is_below(self, other: Pace) -> bool:
        """True if this is surely less than ``other``, for now."""
        if min(len(self), len(other)) < ENOUGH:
            return False
        return other.mean - self.mean > _SIGMAS * math.hypot(self.error, other.error)


class Adopter:
    """Swaps drafters between requests.

    A drafter changes no text, so nothing but speed is at stake. The weights are written in place, when no request has
    a row; those that wait get theirs afterwards. If the running mean of tokens per step is then surely lower than
    before, the drafter before is served again, for good.

    Args:
        recorder: of the scheduler's generator.
        scheduler: whose drafter is swapped.
        poll: seconds between two looks at the folder; 0 looks only when `look` is called.

    Attributes:
        number: of the drafter that is served; 0 is the one that the server was started with.
        now, before: the pace of the last answers with this drafter, and with the one before.
    """

    def __init__(self, recorder: AnswerRecorder, scheduler: Scheduler, *, poll: float = _POLL) -> None:
        self._recorder, self._store, self._scheduler = recorder, recorder.store, scheduler
        draft: Any = scheduler.generator.draft
        self._draft, self._first = draft, {name: x.to("cpu", copy=True) for name, x in draft.state_dict().items()}
        self.number, self.now, self.before, self._is_told = 0, Pace(), Pace(), True
        self._lock, self._ended = threading.Lock(), threading.Event()
        # Who learns waits while requests run.
        self._stack = contextlib.ExitStack()
        scheduler.on_busy = self._stack.enter_context(self._store.requests()).hold
        self._thread = threading.Thread(target=self._watch, args=(poll,), name="dflash drafters", daemon=True)
        if poll:
            self._thread.start()

    def observe(self, steps: Sequence[int]) -> None:
        """Take note of the steps of an answer that has ended."""
        with self._lock:
            self.now.add(steps)

    def look(self) -> None:
        """Roll back a drafter that is worse than the one before, and take up the one that the folder asks for.

        Returns when that one is served.

        Raises:
            ValueError: the folder has no such drafter, or it has another shape.
        """
        with self._lock:
            is_worse, after, before = self.now.is_below(self.before), self.now.mean, self.before.mean
            has_enough = len(self.now) >= ENOUGH
            says, self._is_told = has_enough and not self._is_told, self._is_told or has_enough
        if says:
            _LOG.info("drafter %d: %.2f tokens per step, before it %.2f", self.number, after, before)
        if is_worse:
            with self._store.changing_drafters() as drafters:
                if drafters.adopted == self.number != drafters.before:
                    _LOG.warning("drafter %d is worse than %d: it is rolled back", self.number, drafters.before)
                    drafters.refused.append(self.number)
                    drafters.adopted = drafters.before
        wanted = self._store.drafters().adopted
        if wanted != self.number:
            weights = self._weights_of(wanted)
            self._scheduler.run_alone(lambda: self._swap(wanted, weights, forgets=is_worse)).result()

    def close(self) -> None:
        """Look no more."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._scheduler.on_busy = lambda _: None
        self._stack.close()

    def _weights_of(self, number: int) -> dict[str, Tensor]:
        if number == 0:
            return self._first
        folder = self._store.drafter_folder(number)
        if not folder.is_dir():
            raise ValueError(f"there is no drafter {number} in {terminal.printable(self._store.folder)}")
        draft = load_draft(folder, dtype=self._draft.dtype)
        # --drafter-window may have changed the window of the one that runs.
        if dataclasses.replace(draft.config, window=self._draft.config.window) != self._draft.config:
            raise ValueError(f"drafter {number} has another shape than the one that the server was started with")
        return draft.state_dict()

    def _swap(self, number: int, weights: dict[str, Tensor], *, forgets: bool) -> None:
        self._draft.load_state_dict(weights)
        with self._lock:
            _LOG.info("drafter %d is served now; %d had %.2f tokens per step", number, self.number, self.now.mean)
            self.number = self._recorder.drafter = number
            self.now, self.before, self._is_told = Pace(), Pace() if forgets else self.now, False

    def _watch(self, poll: float) -> None:
        failed = ""
        while True:
            try:
                self.look()
                failed = ""
            except Exception as error:
                if str(error) != failed:  # said once
                    _LOG.error("the drafter that was learned is not served: %s", error)
                failed = str(error)
            if self._ended.wait(poll):
                return
