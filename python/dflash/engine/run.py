"""Rows that answers join and leave between steps: their prompts, the steps that are launched, what is read of them."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import ops
from ..call import Call
from ..outputs import FinishedAnswer, GenerateOutput, Statistics, StreamEvent, TokenLogprobs
from ..state import FULL, INVALID, RUNNING, STOPPED, Logprobs, RowReport, State
from ..streaming import BatchDecoder, StopFinder
from ..threads import NEIGHBORS
from .graphs import Replay
from .prefill import PicturesError, Prefill
from .prefix import PrefixCache
from .step import GRAMMAR_OBSTACLE, Engine, host_step, step

_FINISH_REASONS = {STOPPED: "stop", FULL: "length"}


@dataclass
class Answer:
    """The host's view of one row's answer. On a GPU it is one step late, so that the host never waits for the step."""

    row: int  # of the state
    call: Call
    prompt_length: int
    num_prefilled_tokens: int  # tokens of the prompt that are run
    reads_ids: bool  # False leaves new_ids and accepted empty
    stops: StopFinder | None = None  # None without stop strings
    length: int = 0  # the index of the last emitted token
    done: int | None = None  # RUNNING, STOPPED, FULL or INVALID; None until the prompt has been run
    new_ids: list[int] = field(default_factory=list)  # of the last report
    accepted: int = 0  # how many of them were drafts
    acceptance_lengths: list[int] = field(default_factory=list)  # the tokens that each step emitted
    rows: list[int] = field(default_factory=list)  # per step, the rows that it verified
    step_seconds: list[float] = field(default_factory=list)  # per step, what passed until it was read
    time_to_first_token: float = 0.0
    has_grammar: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of `new_ids`
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # in the answer's first event
    error: str = ""  # what went wrong with this row

    def record(self, report: RowReport, state: State) -> int:
        """Add what a step reported; return how many tokens it emitted.

        Raises:
            RuntimeError: the row, which was running, neither moved nor ended, so that the loop would not either.
        """
        emitted = report.length - self.length
        if emitted:
            self.acceptance_lengths.append(emitted)
        elif report.done == RUNNING:
            raise RuntimeError(f"a step did nothing for row {self.row}, which is running: was it launched at all?")
        if self.reads_ids:
            for token, draft in zip(report.choices[:emitted], report.drafts, strict=False):
                if token != draft:
                    break
                self.accepted += 1
        self.follow(report.length, report.done, report.choices[:emitted], report.length + 1, state)
        return emitted

    def follow(self, length: int, done: int, new_ids: list[int], position: int, state: State) -> None:
        """Take note of new tokens, and that logits for ``position`` were NaN if the row is invalid."""
        self.length, self.done = length, done
        if done == INVALID:
            grammar = ", or the grammar and the other rules together leave no token," if self.has_grammar else ""
            self.error = f"the target's logits are NaN{grammar} in row {self.row} for position {position}"
        if self.reads_ids:
            self.new_ids = new_ids
            if self.stops is not None and new_ids and (count := self.stops.push(new_ids)) is not None:
                self._end_after(count, state)

    def read_logprobs(self, start: int, kept: Logprobs) -> list[TokenLogprobs]:
        """Return the log probabilities of the tokens from ``start`` to the last."""
        return kept.read(self.row, start, self.length + 1, self.call.logprobs or 0)

    def read_prompt_logprobs(self, kept: Logprobs) -> list[TokenLogprobs | None] | None:
        """Return the log probabilities of the prompt's tokens, None for the first; None if they are not asked for."""
        if not self.call.prompt_logprobs:
            return None
        return [None, *kept.read(self.row, 1, self.prompt_length, self.call.logprobs or 0)]

    def _end_after(self, count: int, state: State) -> None:
        """End the row after the first ``count`` of its new ids."""
        # 1. The host's view
        dropped = len(self.new_ids) - count
        self.new_ids, self.accepted = self.new_ids[:count], min(self.accepted, count)
        if dropped:
            self.length -= dropped
            self.acceptance_lengths[-1] -= dropped
        self.done = STOPPED
        # 2. The device's. The features of dropped tokens go; those that the draft cache has not taken over yet stay.
        row = self.row
        drafted = state.length[row] - state.num_context[row]
        state.length[row].fill_(self.length)  # an assignment would copy from the host, and wait
        state.num_context[row] = (self.length - drafted).clamp(min=0)
        state.done[row].fill_(STOPPED)


class Direct:
    """Runs each step at once.

    Args:
        report: ``[batch, n]`` int64, which every step writes for the host.
        shares: returns True if no bit that a step decides depends on the number of threads. It leaves processors to
            other programs then.
    """

    ahead = 0  # steps that may be launched before the oldest is read
    warm_ups = 1  # steps of a kind that take longer than the others

    def __init__(self, report: Tensor, shares: Callable[[], bool] = bool) -> None:
        self.report, self._shares = report, shares
        self.reason = f"the target is on {report.device}"

    def start(self) -> None:
        """Begin a call."""

    def settle(self) -> None:
        """Wait for what was queued so far."""

    def clock(self) -> float:
        """Return the seconds by which steps are compared: this thread's own, or the clock's if it waits for others."""
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()

    def launch(self, step: Callable[[], None], kind: Callable[[], Hashable], obstacle: str = "") -> None:
        """Run ``step``; see `Replay.launch`."""
        most = torch.get_num_threads()
        fitting = NEIGHBORS.fitting(most) if self._shares() else most
        if fitting == most:
            step()
            return
        ops.use_threads(fitting)
        try:
            step()
        finally:
            ops.use_threads(most)

    def read(self) -> list:
        """Return the report of the last step."""
        return self.report.tolist()

    def clear(self) -> None:
        """Do nothing: no graph is kept."""

    def drain(self) -> None:
        """Do nothing: no step is running."""


class Run:
    """The rows of an engine, which answers join and leave between steps.

    Between two calls of its methods the state is consistent, and the run may be left for good.

    Args:
        engine: whose rows they are; configured for the calls that are admitted.
        runner: launches the steps.
        device_step: one step that decides on the device.
        reads_ids: True if the caller wants the ids of every step.
        obstacle: why steps must not be captured; empty if they may.
        must_capture: raise if a step is not captured.

    Attributes:
        answers: per row, the one that has it, or None.
        prompts: those that wait to be run, and when their calls began.
        consistent: True if the caches hold what the state says.
        failed: True if something went wrong with an answer.
        has_pictures: True if a prompt has had pictures.
        ended: set by whoever starts another run on the same engine, or cannot go on.
    """

    def __init__(
        self, engine: Engine, runner: Direct | Replay, device_step: Callable[[], None], *, reads_ids: bool,
        obstacle: str = "", must_capture: bool = False,
    ) -> None:  # fmt: skip
        self.engine, self.runner, self.reads_ids = engine, runner, reads_ids
        self.answers: list[Answer | None] = [None] * engine.batch_size
        self.consistent = self.failed = self.ended = self.has_pictures = False
        self._leaves_out = engine.leaves_out and not runner.ahead  # True if steps leave out the rows that are done
        self._device_step, self._obstacle, self._must_capture = device_step, obstacle, must_capture
        self.prompts: deque[tuple[Prefill, float]] = deque()
        self._costs: dict[int, dict[int, float]] = {}  # by the number of rows that run
        # Per step that was launched and not read: the rows that it verifies, and the answers that it continues.
        self._launched: deque[tuple[int, list[Answer]]] = deque()

    def require_open(self) -> None:
        """Raise RuntimeError if the run has ended."""
        if self.ended:
            raise RuntimeError("this stream has ended: its generator was reset or runs another call, or a step failed")

    # ------------------------------------------------------------------------------------------ prompts

    def admit(
        self, call: Call, cached: Sequence[int], *, first: int = 0, chunk: int, snapshot: bool = False,
        prefix: PrefixCache | None = None, began: float,
    ) -> list[Answer]:  # fmt: skip
        """Put the prompts of ``call`` into the rows from ``first`` on; `run_chunk` runs them. See `Prefill`.

        The engine is configured for the call, which began when ``time.perf_counter`` was ``began``.
        """
        self.consistent, self.has_pictures = False, self.has_pictures or call.pictures is not None
        prefill = Prefill(self.engine, call, cached, first=first, chunk=chunk, snapshot=snapshot, prefix=prefix)
        call, answers = call.without_pictures(), []
        for row, (prompt, count) in enumerate(zip(call.prompts, prefill.counts, strict=True)):
            stops = None if call.stops is None else call.stops(prompt.tolist())
            grammar = call.grammars[row] if call.grammars else None
            answers.append(Answer(
                first + row, call, len(prompt), count, self.reads_ids or stops is not None, stops,
                has_grammar=grammar is not None,
            ))  # fmt: skip
        self.answers[prefill.rows] = answers
        self.prompts.append((prefill, began))
        return answers

    @property
    def running(self) -> list[Answer]:
        """The answers that the next step continues."""
        return [answer for answer in self.answers if answer is not None and answer.done == RUNNING]

    def run_chunk(self) -> list[Answer]:
        """Run one chunk of the prompt that waited longest for one; return the answers that begin with it."""
        self.require_open()
        self.consistent = False
        prefill, began = self.prompts.popleft()
        answers = list(filter(None, self.answers[prefill.rows]))
        try:
            prefill.run_chunk()
        except PicturesError as error:  # nothing of other rows was written
            self.failed = True
            for answer in answers:
                answer.length, answer.done, answer.error = answer.prompt_length - 1, INVALID, str(error)
            return answers
        if prefill.chunks:
            self.prompts.append((prefill, began))
            return []
        prefill.choose_first()
        state, rows = self.engine.state, prefill.rows
        columns = state.length[rows].tolist(), state.done[rows].tolist(), state.anchor[rows, 0].tolist()
        for answer, length, done, token in zip(answers, *columns, strict=True):
            answer.num_prefilled_tokens -= prefill.num_loaded
            answer.follow(length, done, [token], length, state)
            self._read_details(answer, is_first=True)
            self._record(answer)
        seconds = time.perf_counter() - began
        for answer in answers:
            answer.time_to_first_token = seconds
        self.consistent = not self.failed
        return answers

    # ------------------------------------------------------------------------------------------ steps

    def step(self) -> list[Answer]:
        """Launch steps until the oldest can be read, and read it; return the answers that it continued.

        Where the host reads late, a step is launched after an answer's last. It finds its row done and leaves it.
        """
        self.require_open()
        # 1. Choose the step. With Python rules it is read at once: they must not see tokens that will not count.
        engine, runner, began, running = self.engine, self.runner, time.perf_counter(), self.running
        waits, is_masked = engine.host_rules is not None, engine.grammar_masks is not None
        launched = functools.partial(host_step, engine) if waits or is_masked else self._device_step
        obstacle = self._obstacle or (GRAMMAR_OBSTACLE if is_masked else "")
        for answer in filter(None, self.answers):
            answer.new_ids, answer.accepted, answer.logprobs, answer.prompt_logprobs = [], 0, [], None
        # 2. Launch.
        if engine.budget is not None and not engine.budget.costs:
            self.learn_costs()
        if self._costs:
            engine.budget.costs = self._costs_of(len(running))
        leaves_out = self._leaves_out and len(running) < engine.batch_size
        live = None
        if leaves_out:
            live = torch.tensor([answer.row for answer in running], device=engine.state.tokens.device)
        self.consistent = False
        with self._shapes_follow(live):
            while len(self._launched) <= (0 if waits else runner.ahead):
                if engine.budget is not None:
                    engine.choose_rows()
                runner.launch(launched, engine.kind, obstacle)
                if self._must_capture and runner.reason:
                    raise RuntimeError(f"graph=True cannot be followed: {runner.reason}")
                self._launched.append((engine.proposer.rows, running))
        # 3. Read the oldest.
        continued = self._read(began)
        self.consistent = not self.failed
        return continued

    @contextlib.contextmanager
    def _shapes_follow(self, live: Tensor | None) -> Iterator[None]:
        """Let steps continue only the rows ``live [n]`` int64, None for all, and follow counters if that is allowed."""
        state = self.engine.state
        state.live, state.is_readable = live, self._leaves_out and state.tokens.is_cpu
        try:
            yield
        finally:
            state.live, state.is_readable = None, False

    def learn_costs(self) -> None:
        """Tell the engine's budget what steps of each size cost, of one row and of all. Measured once per kind."""
        engine, runner, waits = self.engine, self.runner, self.engine.host_rules is not None
        is_masked = engine.grammar_masks is not None
        obstacle = self._obstacle or (GRAMMAR_OBSTACLE if is_masked else "")
        timed = functools.partial(step, engine) if waits or is_masked else self._device_step

        def time_step() -> float:
            start = runner.clock()
            runner.launch(timed, engine.kind, obstacle)
            runner.read()
            return runner.clock() - start

        launching = isinstance(runner, Replay) and not obstacle, waits
        longest = max((answer.length for answer in self.running), default=0)
        for count in (1, engine.batch_size) if self._leaves_out else (engine.batch_size,):
            some = None if count == engine.batch_size else torch.arange(count, device=engine.state.tokens.device)
            with self._shapes_follow(some):
                self._costs[count] = engine.costs_of(count, launching, longest, time_step, runner.warm_ups)
        engine.budget.costs = self._costs[engine.batch_size]

    def _costs_of(self, count: int) -> dict[int, float]:
        """Return what steps of each size cost while ``count`` rows run."""
        whole = self._costs[self.engine.batch_size]
        if count == self.engine.batch_size or not self._leaves_out:
            return whole
        one, share = self._costs[1], (count - 1) / (self.engine.batch_size - 1)
        return {size: one[size] + share * (whole[size] - one[size]) for size in one if size in whole}

    def _read(self, began: float) -> list[Answer]:
        """Read the oldest step into the answers that it continued, and return them."""
        engine = self.engine
        reports = engine.state.report.read(self.runner.read())
        rows, launched = self._launched.popleft()
        emitted, continued = [0] * len(reports), []
        for answer in launched:
            if answer.done != RUNNING:  # it has ended since
                continue
            try:
                emitted[answer.row] = answer.record(reports[answer.row], engine.state)
            except RuntimeError:
                self.runner.clear()  # a graph that does nothing would do so again
                raise
            self._read_details(answer)
            answer.rows.append(rows)
            continued.append(answer)
            self._record(answer)
        seconds = time.perf_counter() - began
        for answer in continued:
            answer.step_seconds.append(seconds)
        if engine.budget is not None:
            engine.budget.observe(rows, emitted, reports)
        return continued

    def _read_details(self, answer: Answer, is_first: bool = False) -> None:
        """Read why a grammar ended an answer, and the log probabilities of its event."""
        engine = self.engine
        if answer.error:
            self.failed = True
            if engine.grammar_masks is not None:
                answer.error = engine.grammar_masks.errors[answer.row] or answer.error
        if engine.logprobs is None or answer.call.logprobs is None or not self.reads_ids:
            return
        answer.logprobs = answer.read_logprobs(answer.length + 1 - len(answer.new_ids), engine.logprobs)
        if is_first:
            answer.prompt_logprobs = answer.read_prompt_logprobs(engine.logprobs)

    def _record(self, answer: Answer) -> None:
        """Pass an answer on if it has ended."""
        if self.engine.on_answer is None or answer.done not in _FINISH_REASONS or not answer.call.store:
            return
        engine, state, row, end = self.engine, self.engine.state, answer.row, answer.length + 1
        engine.on_answer(FinishedAnswer(
            answer.call, int(state.sampling.seeds[row]), _FINISH_REASONS[answer.done], state.tokens[row, :end],
            answer.prompt_length, answer.acceptance_lengths, *state.history.of(row, answer.prompt_length, end),
        ))  # fmt: skip

    def retire(self, row: int) -> None:
        """Free a row, whether its answer has ended or not."""
        answer, self.answers[row] = self.answers[row], None
        if answer is not None and answer.done in (None, RUNNING):
            answer.done = STOPPED
        self.engine.retire(row)
        self.prompts = deque(item for item in self.prompts if not item[0].rows.start <= row < item[0].rows.stop)


# ---------------------------------------------------------------------------------------------- what the caller gets


def event_of(engine: Engine, answers: Sequence[Answer], text: BatchDecoder | None, began: float) -> StreamEvent:
    """Return what a step has added to the answers of a call, which began at ``began``; ``text`` decodes them."""
    ids, accepted, reasons, logprobs, prompts = [], [], [], [], []
    for answer in answers:
        ids.append(answer.new_ids)
        accepted.append(answer.accepted)
        reasons.append(_FINISH_REASONS.get(answer.done))
        logprobs.append(answer.logprobs)
        prompts.append(answer.prompt_logprobs)
    pieces = None if text is None else text.push(ids, reasons)
    return StreamEvent(
        ids, accepted, pieces, reasons, _statistics(engine, answers, began),
        None if answers[0].call.logprobs is None else logprobs, None if None in prompts else prompts,
    )  # fmt: skip


def output_of(engine: Engine, answers: Sequence[Answer], call: Call, began: float) -> GenerateOutput:
    """Return what a call returns, whose answers have all ended; see `event_of`."""
    statistics, reasons, logprobs, prompts = _statistics(engine, answers, began), [], [], []
    # 1. The prompts as given, then the answers, right-padded.
    tokens, (batch, width), counts = engine.state.tokens, call.ids.shape, statistics.num_new_tokens
    joined = call.ids.new_full((batch, width + max(counts)), call.pad_token_id, dtype=tokens.dtype)
    joined[:, :width] = call.ids
    for row, answer in enumerate(answers):
        reasons.append(_FINISH_REASONS[answer.done])
        start, count = answer.prompt_length, counts[row]
        joined[row, width : width + count] = tokens[answer.row, start : start + count]
        # 2. Log probabilities of all tokens, where asked for.
        if engine.logprobs is not None:
            logprobs.append(answer.read_logprobs(start, engine.logprobs))
            prompts.append(answer.read_prompt_logprobs(engine.logprobs))
    asked_prompts = prompts if call.prompt_logprobs else None
    return GenerateOutput(joined, reasons, statistics, logprobs or None, asked_prompts)


def _statistics(engine: Engine, answers: Sequence[Answer], began: float) -> Statistics:
    """Return what was measured of answers up to now."""
    lengths, counts, prefilled, first, longest = [], [], [], 0.0, answers[0]
    for answer in answers:
        lengths.append(list(answer.acceptance_lengths))
        counts.append(answer.length + 1 - answer.prompt_length)
        prefilled.append(answer.num_prefilled_tokens)
        first = max(first, answer.time_to_first_token)
        if len(answer.rows) > len(longest.rows):  # it was running in every step of the others
            longest = answer
    return Statistics(
        lengths, engine.block_size, counts, first, time.perf_counter() - began, prefilled, list(longest.rows),
        list(longest.step_seconds), engine.target.weights,
    )  # fmt: skip
