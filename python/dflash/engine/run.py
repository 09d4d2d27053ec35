"""Rows that answers join and leave between steps: run their prompts, launch steps and read the reports."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from ..call import Call
from ..state import RUNNING, STOPPED
from .prefill import Prefill
from .progress import Answer
from .runner import Direct, Replay, compiled_per_kind
from .step import Engine, step

__all__ = ["Launch", "Run", "step_of"]


def step_of(engine: Engine, *, compiles: bool) -> Callable[[], None]:
    """Return what runs a step on the device; if it ``compiles``, whole, or on a GPU the target's part of it."""
    run = functools.partial(step, engine)
    if compiles and engine.target.device.type == "cuda":
        engine.compile_target = True
        engine.retarget(engine.target)
    elif compiles:
        return compiled_per_kind(run, functools.partial(getattr, engine, "kind"))
    return run


@dataclass(frozen=True)
class Launch:
    """How the steps of a run reach the device.

    Attributes:
        runner: launches them.
        step: one step.
        device_step: one step that decides on the device, to measure what a step costs.
        obstacle: why they must not be captured; empty if they may.
        waits: True if the host waits for each step before it launches the next.
        must_capture: raise if a step is not captured.
    """

    runner: Direct | Replay
    step: Callable[[], None]
    device_step: Callable[[], None]
    obstacle: str = ""
    waits: bool = False
    must_capture: bool = False

    @property
    def ahead(self) -> int:
        """How many steps may be launched before the oldest is read."""
        return 0 if self.waits else self.runner.ahead

    @property
    def manner(self) -> Hashable:
        """What the time of a step depends on, besides its kind: is it captured, does the host wait for each?"""
        return isinstance(self.runner, Replay) and not self.obstacle, self.waits

    def time_one(self, kind: Hashable) -> float:
        """Take a step on the device, whoever decides on the host; return its seconds."""
        began = self.runner.clock()
        self.runner.launch(self.device_step, kind, self.obstacle)
        self.runner.read()
        return self.runner.clock() - began


class Run:
    """The rows of an engine, which answers join and leave between steps.

    Between two calls of its methods the state is consistent, and the run may be left for good.

    Args:
        engine: whose rows they are; configured for the calls that are admitted.
        reads_ids: True if the caller wants the ids of every step.

    Attributes:
        answers: per row, the one that has it, or None.
        consistent: True if the caches hold what the state says.
        ended: set by whoever starts another run on the same engine, or cannot go on.
    """

    def __init__(self, engine: Engine, *, reads_ids: bool) -> None:
        self.engine, self.reads_ids = engine, reads_ids
        self.answers: list[Answer | None] = [None] * engine.batch_size
        self.consistent = self.ended = False
        self._prompts: deque[tuple[Prefill, float]] = deque()
        # Per step that was launched and not read: the rows that it verifies, and the answers that it continues.
        self._launched: deque[tuple[int, list[Answer]]] = deque()

    def admit(
        self, call: Call, cached: Sequence[int], *, first: int = 0, chunk: int, snapshot: bool, began: float
    ) -> list[Answer]:
        """Seat the prompts of ``call`` in the rows from ``first`` on; `run_chunk` runs them.

        Args:
            call: the engine has been told of it.
            cached: per prompt, how many of its tokens both caches hold.
            first: the first row.
            chunk: prompt tokens per forward pass.
            snapshot: see `Prefill`.
            began: when the call began, by ``time.perf_counter``.
        """
        limits = [len(prompt) + call.max_new_tokens for prompt in call.prompts]
        self.consistent = False
        prefill = Prefill(
            self.engine, call.prompts, limits, cached, first=first, chunk=chunk, snapshot=snapshot,
            logprobs=call.prompt_logprobs,
        )  # fmt: skip
        answers, criteria, grammars = [], call.stop_criteria, call.grammars or [None] * len(call.prompts)
        parts = zip(call.prompts, prefill.counts, cached, grammars, strict=True)
        for row, (prompt, count, held, grammar) in enumerate(parts, first):
            history = prompt.tolist() if criteria else []
            answer = Answer(
                row, len(prompt), count, held, criteria, history, has_grammar=grammar is not None,
                asked_logprobs=call.logprobs, asks_prompt_logprobs=call.prompt_logprobs,
            )  # fmt: skip
            answers.append(answer)
        self.answers[prefill.rows] = answers
        self._prompts.append((prefill, began))
        return answers

    @property
    def is_filling(self) -> bool:
        """True while prompts wait to be run."""
        return bool(self._prompts)

    @property
    def is_running(self) -> bool:
        """True while there are rows for a step."""
        return any(answer is not None and answer.done == RUNNING for answer in self.answers)

    def run_chunk(self) -> list[Answer]:
        """Run one chunk of the prompt that waited longest for one; return the answers that begin with it."""
        self.check_turn()
        self.consistent = False
        prefill, began = self._prompts.popleft()
        prefill.run_chunk()
        answers = [answer for answer in self.answers[prefill.rows] if answer is not None]
        for answer in answers:
            answer.filled = min(answer.prompt_length, answer.filled + prefill.chunk)
        if not prefill.is_complete:
            self._prompts.append((prefill, began))
            return []
        prefill.choose_first()
        state, rows = self.engine.state, prefill.rows
        columns = state.length[rows].tolist(), state.done[rows].tolist(), state.anchor[rows, 0].tolist()
        for answer, length, done, token in zip(answers, *columns, strict=True):
            answer.begin(length, done, token if self._reads(answer) else None, state)
            self._explain(answer)
            self._read_logprobs(answer, is_first=True)
        seconds = time.perf_counter() - began
        for answer in answers:
            answer.time_to_first_token = seconds
        self._settle()
        return answers

    def step(self, launch: Launch) -> list[Answer]:
        """Launch steps until the oldest can be read, and read it; return the answers that it continued.

        Where the host reads late, a step is launched after an answer's last. It finds its row done and leaves it.
        """
        self.check_turn()
        engine, began = self.engine, time.perf_counter()
        for answer in filter(None, self.answers):
            answer.new_ids, answer.accepted, answer.logprobs, answer.prompt_logprobs = [], 0, [], None
        running = [answer for answer in self.answers if answer is not None and answer.done == RUNNING]
        longest = max((answer.length for answer in running), default=0)
        engine.learn_costs(launch.manner, longest, lambda: launch.time_one(engine.kind), launch.runner.warm_ups)
        self.consistent = False
        while len(self._launched) <= launch.ahead:
            engine.choose_rows()
            launch.runner.launch(launch.step, engine.kind, launch.obstacle)
            if launch.must_capture and launch.runner.reason:
                raise RuntimeError(f"graph=True cannot be followed: {launch.runner.reason}")
            self._launched.append((engine.rows, running))
        continued = self._read(launch.runner, began)
        self._settle()
        return continued

    def _settle(self) -> None:
        """Note that the caches hold what the state says, unless something went wrong with an answer."""
        self.consistent = not any(answer is not None and answer.error for answer in self.answers)

    def _read(self, runner: Direct | Replay, began: float) -> list[Answer]:
        """Read the oldest step into the answers that it continued, and return them."""
        engine = self.engine
        reports = engine.state.report.read(runner.read())
        rows, launched = self._launched.popleft()
        emitted, continued = [0] * len(reports), []
        for answer in launched:
            if answer.done != RUNNING:  # it has ended since
                continue
            try:
                report = reports[answer.row]
                emitted[answer.row] = answer.record(report, self._reads(answer), engine.state)
            except RuntimeError:
                runner.clear()  # a graph that does nothing would do so again
                raise
            self._explain(answer)
            self._read_logprobs(answer)
            answer.rows.append(rows)
            continued.append(answer)
        seconds = time.perf_counter() - began
        for answer in continued:
            answer.step_seconds.append(seconds)
        if engine.budget is not None:
            engine.budget.observe(rows, emitted, reports)
        return continued

    def _explain(self, answer: Answer) -> None:
        """Say of an answer that failed what its grammar says, if that is why."""
        if answer.error and (masks := self.engine.grammar_masks) is not None:
            answer.error = masks.errors[answer.row] or answer.error

    def _read_logprobs(self, answer: Answer, is_first: bool = False) -> None:
        """Read what an event tells of its new tokens, and the first one of the prompt."""
        kept = self.engine.logprobs
        if kept is None or answer.asked_logprobs is None or not self.reads_ids:
            return
        answer.logprobs = answer.read_logprobs(answer.length + 1 - len(answer.new_ids), kept)
        if is_first:
            answer.prompt_logprobs = answer.read_prompt_logprobs(kept)

    def retire(self, row: int, kept: int) -> None:
        """Free a row, whether its answer has ended or not; the first ``kept`` positions of its caches stay."""
        answer, self.answers[row] = self.answers[row], None
        if answer is not None and answer.done in (None, RUNNING):
            answer.done = STOPPED
        self.engine.leave(row, kept)
        self._prompts = deque(item for item in self._prompts if not item[0].rows.start <= row < item[0].rows.stop)

    def _reads(self, answer: Answer) -> bool:
        return self.reads_ids or bool(answer.criteria)

    def check_turn(self) -> None:
        """Raise RuntimeError if the run has ended."""
        if self.ended:
            raise RuntimeError(
                "this stream has ended: its generator was reset, has started another call, or a step has failed"
            )
