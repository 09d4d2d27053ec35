"""A queue of requests for the rows of a generator, served by one thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TypeVar, cast

from dflash import Generator as TokenGenerator
from dflash import StreamEvent
from dflash.internals import Call, Session

_LOG = logging.getLogger(__name__)
_Result = TypeVar("_Result")
Item = StreamEvent | Exception | None  # None is the end


class QueueFullError(RuntimeError):
    """Too many requests wait already."""


class Ticket:
    """A request that was submitted."""

    def __init__(self, call: Call, emit: Callable[[Item], None]) -> None:
        self.call, self.emit, self.is_cancelled = call, emit, False
        self.submitted = time.monotonic()

    def cancel(self) -> None:
        """Ask for the end of the request; its events end soon."""
        self.is_cancelled = True


class Scheduler:
    """Runs requests on the rows of a generator, first come first served, in a thread of its own.

    Between two steps one chunk of one waiting prompt is run, so a long prompt does not hold up the others. What a
    request writes does not depend on the others (`dflash.session.Session`).

    Args:
        generator: used by nobody else until `close`.
        max_waiting: requests that may wait for a row.
        cache_bytes: as in `dflash.session.Session`.

    Attributes:
        session: the rows. Only the scheduler's thread steps it.
        on_step: called after each step with its seconds, from the scheduler's thread.
        on_admit: called with the seconds that a request has waited, when it gets a row.
        on_busy: called with True before a row gets a request while no other has one, and with False when none is left.

    Raises:
        ValueError: the generator is not one for sessions, or ``max_waiting`` is negative.
    """

    def __init__(self, generator: TokenGenerator, *, max_waiting: int = 64, cache_bytes: int = 2**30) -> None:
        if max_waiting < 0:
            raise ValueError(f"max_waiting must be at least 0, got {max_waiting}")
        self.generator, self.max_waiting, self._cache_bytes = generator, max_waiting, cache_bytes
        self.on_step: Callable[[float], None] = lambda _: None
        self.on_busy: Callable[[bool], None] = lambda _: None
        self.on_admit: Callable[[float], None] = lambda _: None
        self.session = Session(generator, cache_bytes=cache_bytes)
        self._waiting: deque[Ticket] = deque()
        self._running: dict[int, Ticket] = {}
        self._works: deque[tuple[Generator[None, None, object], Future[object]]] = deque()
        self._was_busy = self._is_draining = False  # draining: rows that end get no other request
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve, name="dflash scheduler", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return len(self._running)

    def submit(self, call: Call, emit: Callable[[Item], None]) -> Ticket:
        """Queue a request. The text of its events has no special tokens.

        Args:
            call: from `dflash.session.Session.resolve`.
            emit: called from the scheduler's thread with each event, then with None or an exception; must return at
                once.

        Raises:
            QueueFullError: ``max_waiting`` requests wait already.
            RuntimeError: the scheduler is closed.
        """
        ticket = Ticket(call, emit)
        with self._changed:
            self._expect_open()
            waiting = sum(not other.is_cancelled for other in self._waiting)
            if waiting + len(self._running) >= self.generator.batch_size + self.max_waiting:
                raise QueueFullError(f"{self.max_waiting} requests wait already: try again later")
            self._waiting.append(ticket)
            self._changed.notify()
        return ticket

    def run_between_steps(self, parts: Generator[None, None, _Result]) -> Future[_Result]:
        """Do other work in the scheduler's thread: a part between any two steps, one work after another.

        ``parts`` yields after each part. Returns the future result; cancelling it ends the work.

        Raises:
            QueueFullError: one work is being done and ``max_waiting`` others wait.
            RuntimeError: the scheduler is closed.
        """
        with self._changed:
            if len(self._works) > self.max_waiting:
                raise QueueFullError(f"{len(self._works)} checks wait already: try again later")
            return self._queue_work(parts)

    def run_alone(self, work: Callable[[], None]) -> Future[None]:
        """Call ``work`` from the scheduler's thread while no request has a row, then begin a new session.

        Requests that run end first, and those that wait go on waiting. It is done in the order of `run_between_steps`,
        however many wait there.

        Raises:
            RuntimeError: the scheduler is closed.
        """

        def parts() -> Generator[None, None, None]:
            self._is_draining = True
            try:
                while self._running:
                    yield
                work()
                self.session = Session(self.generator, cache_bytes=self._cache_bytes)
            finally:
                self._is_draining = False

        return self._queue_work(parts())

    def _queue_work(self, parts: Generator[None, None, _Result]) -> Future[_Result]:
        future: Future[_Result] = Future()
        with self._changed:
            self._expect_open()
            self._works.append((parts, cast("Future[object]", future)))
            self._changed.notify()
        return future

    def _expect_open(self) -> None:
        if self._is_closing:
            raise RuntimeError("the scheduler is closed: it takes no more requests")

    def close(self, *, drain: bool = True) -> None:
        """Take no more requests; finish those submitted, or without ``drain`` end them after the step that runs."""
        with self._changed:
            self._is_closing = True
            if not drain:
                for ticket in (*self._waiting, *self._running.values()):
                    ticket.cancel()
                for _, future in self._works:
                    future.cancel()
            self._changed.notify()
        self._thread.join()

    # ------------------------------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        while True:
            try:
                if not self._fill_rows():
                    return
                if self._works:
                    self._work(*self._works[0])
                if self._running:
                    self._step()
                else:
                    self.session.settle()
            except Exception as error:  # requests get it, and the next ones new rows
                self._fail(error)

    def _fill_rows(self) -> bool:
        """Drop cancelled requests, and give idle rows to waiting ones. False if all is done for good."""
        with self._changed:
            if not self._running:
                self._say_busy(False)
            while self._is_idle and self.session.is_settled and not self._is_closing:
                self._changed.wait()
            for row in [row for row, ticket in self._running.items() if ticket.is_cancelled]:
                self._end(row, None)
            for ticket in [ticket for ticket in self._waiting if ticket.is_cancelled]:
                self._waiting.remove(ticket)
                ticket.emit(None)
            while self._waiting and self.session.idle and not self._is_draining:
                self._say_busy(True)
                ticket = self._waiting.popleft()
                self.on_admit(time.monotonic() - ticket.submitted)
                try:
                    self._running[self.session.admit(ticket.call, skip_special_tokens=True)] = ticket
                except Exception as error:  # of this request
                    ticket.emit(error)
            return not (self._is_closing and self._is_idle)

    @property
    def _is_idle(self) -> bool:
        return not (self._waiting or self._running or self._works)

    def _say_busy(self, is_busy: bool) -> None:
        if is_busy != self._was_busy:
            self._was_busy = is_busy
            self.on_busy(is_busy)

    def _work(self, parts: Generator[None, None, object], future: Future[object]) -> None:
        try:
            if not future.cancelled():
                next(parts)
                return
            parts.close()
        except StopIteration as end:
            if future.set_running_or_notify_cancel():
                future.set_result(end.value)
        except Exception as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._works.popleft()

    def _step(self) -> None:
        events = self.session.step()
        # The step's answers all have its time; one that only began has none yet.
        times = (event.event.statistics.step_seconds for event in events)
        if seconds := next(filter(None, times), None):
            self.on_step(seconds[-1])
        for event in events:
            self._running[event.row].emit(event.event)
            if event.is_last:
                self._end(event.row, ValueError(event.error) if event.error else None)

    def _end(self, row: int, last: Item) -> None:
        self.session.retire(row)
        self._running.pop(row).emit(last)

    def _fail(self, error: Exception) -> None:
        """End every request that has a row, and begin again; if that fails too, end all and close."""
        failed, self._running = [*self._running.values()], {}
        if not failed:  # nobody else is told
            _LOG.error("the rows and the cache of prompts begin again: %s", error)
        try:
            self.session = Session(self.generator, cache_bytes=self._cache_bytes)
        except Exception as fatal:
            with self._changed:
                self._is_closing, error = True, fatal
                failed += self._waiting
                self._waiting.clear()
        for ticket in failed:
            ticket.emit(error)
