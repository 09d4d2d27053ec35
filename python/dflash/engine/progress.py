"""The host's side of a call: launch steps, read their reports, and end rows at stop strings."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..call import Call
from ..outputs import Statistics
from ..streaming import first_stop
from .prefill import prefill
from .runner import Direct, Replay
from .state import FULL, INVALID, RUNNING, STOPPED, RowReport
from .step import Engine

__all__ = ["FINISH_REASONS", "Launch", "Progress", "Run"]

FINISH_REASONS = {STOPPED: "stop", FULL: "length"}


@dataclass
class Progress:
    """The host's view of a running batch. On a GPU it is one step late, so that the host never waits for the step.

    Attributes:
        length: per row, the index of its last emitted token.
        done: per row, RUNNING, STOPPED, FULL or INVALID.
        acceptance_lengths: per row, the tokens that each step emitted.
        num_prefilled_tokens: per row, prompt tokens that were run.
        rows: per step, the rows that it verified.
        step_seconds: per step, what passed in the loop until it was read.
        time_to_first_token: seconds.
        new_ids: per row, the ids that the last report added; empty where the call does not read ids.
        accepted: per row, how many of them were drafts.
        closed: rows that the host ended; what the device says of them was written before it knew.
    """

    length: list[int]
    done: list[int]
    acceptance_lengths: list[list[int]]
    num_prefilled_tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    time_to_first_token: float = 0.0
    new_ids: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)

    def record(self, reports: Sequence[RowReport], *, reads_ids: bool) -> list[int]:
        """Add what a step reported; return the tokens that it emitted per row.

        Raises:
            RuntimeError: a row that was running neither moved nor ended, so that the loop would not either.
        """
        self.new_ids, self.accepted, counts = [], [], []
        for row, report in enumerate(reports):
            emitted = 0
            if row not in self.closed:
                emitted = report.length - self.length[row]
                if emitted:
                    self.acceptance_lengths[row].append(emitted)
                elif self.done[row] == report.done == RUNNING:
                    raise RuntimeError(f"a step did nothing for row {row}, which is running: was it launched at all?")
                self.length[row], self.done[row] = report.length, report.done
            counts.append(emitted)
            if reads_ids:
                new = report.choices[:emitted]
                matches = [token == draft for token, draft in zip(new, report.drafts, strict=False)]
                self.new_ids.append(new)
                self.accepted.append((*matches, False).index(False))
        return counts

    def close(self, row: int, count: int) -> None:
        """End ``row`` after the first ``count`` of its new ids."""
        dropped = len(self.new_ids[row]) - count
        self.new_ids[row] = self.new_ids[row][:count]
        self.accepted[row] = min(self.accepted[row], count)
        if dropped:
            self.length[row] -= dropped
            self.acceptance_lengths[row][-1] -= dropped
        self.done[row] = STOPPED
        self.closed.add(row)

    def check_finite(self, ahead: int, has_grammars: bool) -> None:
        """Raise ValueError if a row ended on NaN logits, ``ahead`` positions after its last length."""
        if INVALID in self.done:
            row = self.done.index(INVALID)
            what = "the target's logits are NaN"
            if has_grammars:
                what += ", or the grammar and the other rules together leave no token,"
            raise ValueError(f"{what} in row {row} for position {self.length[row] + ahead}")

    def sequences(self, call: Call, tokens: Tensor) -> Tensor:
        """Return the prompts as given, then the answers in ``tokens [batch, capacity]``, right-padded."""
        (batch, width), starts = call.ids.shape, [len(prompt) for prompt in call.prompts]
        counts = [self.length[row] + 1 - starts[row] for row in range(batch)]
        sequences = call.ids.new_full((batch, width + max(counts)), call.pad_token_id, dtype=torch.int64)
        sequences[:, :width] = call.ids
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            sequences[row, width : width + count] = tokens[row, start : start + count]
        return sequences

    def statistics(self, call: Call, block_size: int, seconds: float) -> Statistics:
        """Return what was measured up to now, ``seconds`` after the call began."""
        steps = [list(row) for row in self.acceptance_lengths[: len(call.prompts)]]
        counts = [self.length[row] + 1 - len(prompt) for row, prompt in enumerate(call.prompts)]
        lists = self.num_prefilled_tokens, list(self.rows), list(self.step_seconds)
        return Statistics(steps, block_size, counts, self.time_to_first_token, seconds, *lists)

    @property
    def finished(self) -> bool:
        """True once every row is done."""
        return all(self.done)


@dataclass(frozen=True)
class Launch:
    """How the steps of a call reach the device.

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
    """One call on an engine: `start` runs the prompt, `steps` the rest.

    Both give the same `Progress`. Between two steps the state is consistent, and the run may be left for good.

    Args:
        engine: configured for the call.
        call: the call.
        reads_ids: True if the caller wants the ids of every step.

    Attributes:
        consistent: True between steps: the caches hold what the state says.
        ended: set by whoever starts another run on the same engine.
    """

    def __init__(self, engine: Engine, call: Call, *, reads_ids: bool) -> None:
        self.engine, self.call = engine, call
        self.reads_ids = reads_ids or bool(call.stop_criteria)
        self.histories = [prompt.tolist() for prompt in call.prompts] if call.stop_criteria else []
        self.consistent = self.ended = False

    def start(self, *, chunk: int, reuse: bool, snapshot: bool, began: float) -> Progress:
        """Run the prompts, and return the first progress.

        Args:
            chunk: prompt tokens per forward pass.
            reuse: run only what the caches do not hold.
            snapshot: see `prefill`.
            began: when the call began, by ``time.perf_counter``.
        """
        engine, call, state = self.engine, self.call, self.engine.state
        # 1. Rows that this call does not use hold one token and are done before they start.
        batch = len(call.prompts)
        spare = engine.batch_size - batch
        prompts = [*call.prompts, *[call.ids.new_zeros(1, dtype=torch.int64)] * spare]
        limits = [len(prompt) + call.max_new_tokens for prompt in call.prompts] + [2] * spare
        prefilled = prefill(engine, prompts, limits, chunk=chunk, reuse=reuse, snapshot=snapshot)
        state.done[batch:] = FULL
        # 2. The host's first look at the rows.
        steps: list[list[int]] = [[] for _ in range(engine.batch_size)]
        progress = Progress(state.length.tolist(), state.done.tolist(), steps, prefilled[:batch])
        progress.check_finite(0, bool(call.grammars))
        if self.reads_ids:
            progress.new_ids, progress.accepted = state.anchor.tolist(), [0] * engine.batch_size
            self._end_at_stop_strings(progress)
        progress.time_to_first_token = time.perf_counter() - began
        self.consistent = True
        return progress

    def steps(self, progress: Progress, launch: Launch) -> Iterator[Progress]:
        """Launch steps until every row is done; yields when one has been read into ``progress``.

        Where the host reads late, the step after the last is launched too: it finds every row done and changes nothing.
        """
        engine, runner, launched = self.engine, launch.runner, collections.deque()
        ahead = 0 if launch.waits else runner.ahead
        if not progress.finished:
            longest = max(progress.length)
            engine.learn_costs(launch.manner, longest, lambda: launch.time_one(engine.kind), runner.warm_ups)
        began = time.perf_counter()
        while not progress.finished:
            if self.ended:
                raise RuntimeError("this stream has ended: its generator was reset, or has started another call")
            self.consistent = False
            engine.choose_rows()
            runner.launch(launch.step, engine.kind, launch.obstacle)
            if launch.must_capture and runner.reason:
                raise RuntimeError(f"graph=True cannot be followed: {runner.reason}")
            launched.append(engine.rows)
            if len(launched) <= ahead:
                continue
            reports = engine.state.report.read(runner.read())
            try:
                emitted = progress.record(reports, reads_ids=self.reads_ids)
            except RuntimeError:
                runner.clear()  # a graph that does nothing would do so again
                raise
            progress.rows.append(launched.popleft())
            progress.step_seconds.append(time.perf_counter() - began)
            if engine.budget is not None:
                engine.budget.observe(progress.rows[-1], emitted, reports)
            self._end_at_stop_strings(progress)
            progress.check_finite(1, bool(self.call.grammars))
            self.consistent = True
            yield progress
            began = time.perf_counter()  # the caller may have taken its time

    def _end_at_stop_strings(self, progress: Progress) -> None:
        """End every row whose new ids complete a stop string, after the token that did."""
        state = self.engine.state
        for row, history in enumerate(self.histories):
            new = len(progress.new_ids[row])
            if not new or row in progress.closed:
                continue
            history += progress.new_ids[row]
            count = first_stop(self.call.stop_criteria, history, new)
            if count is None:
                continue
            progress.close(row, count)
            # The features of dropped tokens go; those that the draft cache has not taken over yet stay.
            drafted = state.length[row] - state.num_context[row]
            state.length[row] = progress.length[row]
            state.num_context[row] = (progress.length[row] - drafted).clamp(min=0)
            state.done[row] = STOPPED
