"""Rows of a generator that requests join and leave between steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .call import Call, GenerateArguments, check_stream_arguments
from .engine.run import Answer, Run, event_of
from .generator import Generator
from .outputs import StreamEvent
from .streaming import BatchDecoder

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RowEvent(NamedTuple):
    """New tokens of a step in one row.

    Attributes:
        row: of the session.
        event: as in ``stream``, with lists of one.
        error: why the answer cannot go on (the target's logits are NaN); empty if nothing went wrong.
    """

    row: int
    event: StreamEvent
    error: str = ""

    @property
    def is_last(self) -> bool:
        """True for the last event of an answer."""
        return bool(self.error) or self.event.finish_reasons[0] is not None


@dataclass
class _Request:
    """A request in its row."""

    answer: Answer
    text: BatchDecoder | None
    ids: list[int]
    began: float


class Session:
    """The rows of a generator, which requests of one prompt each join and leave between steps.

    A request writes the text that it writes alone, bit for bit in every dtype, whatever the other rows do, whichever
    row it gets, and whatever ran before it. (A target that runs its own modules relies on torch's products for this,
    which must give a row the same bits at every place.) A new request takes the idle row that holds the most whole
    chunks of its prompt, else the one that has been idle longest.

    Settings, logit rules, stop tokens and strings, seed, grammar and sharpness are the request's own. Trees, rejection,
    Python processors and another number of denoising passes are refused: these are properties of the whole step. While
    a row has a grammar, steps are not captured as graphs and wait for its masks.

    The session ends when its generator starts another call or session, and when a step raises: nobody knows then how
    far its rows have come. Until then the weights must not change.

    Args:
        generator: its ``batch_size`` rows are the session's, and its ``prefill_chunk`` bounds how long a prompt holds
            up the others. With ``reuse_prefix=False`` every prompt is run whole.

    Raises:
        ValueError: the generator chooses its block size while it runs, or its target is spread over processes.
    """

    def __init__(self, generator: Generator) -> None:
        if generator.engine.widths == "auto":
            raise ValueError(
                f"a session needs a generator with a fixed block size, this one has {generator.engine.widths!r}: "
                "make one with block_size=None or a number"
            )
        if (count := generator.engine.target.ranks.count) > 1:
            raise ValueError(f"a session needs a target in one process, this one is spread over {count}")
        self.generator = generator
        self._requests: dict[int, _Request] = {}
        self._held: list[list[int]] = [[]] * generator.batch_size  # ids of the whole chunks that a row's caches hold
        self._retired = [0] * generator.batch_size  # when: a count
        self._clock = 0
        self._owes_step = False  # a chunk has been run since the last step
        self._run: Run = generator.lock.run(self._begin)

    def _begin(self) -> Run:
        run = self.generator.begin_run(reads_ids=True)
        self.generator.engine.clear_()
        return run

    @property
    def idle(self) -> list[int]:
        """The rows that no request has."""
        return [row for row in range(self.generator.batch_size) if row not in self._requests]

    @property
    def is_busy(self) -> bool:
        """True while a step would do anything."""
        return bool(self._run.prompts or self._run.running)

    def resolve(self, ids: Tensor, **arguments: Unpack[GenerateArguments]) -> Call:
        """Check a request; nothing is run. May be called from any thread.

        Args:
            ids: ``[1, length]`` int64 or int32, on the target's device.
            arguments: see `dflash.call.GenerateArguments`, except ``streamer``.

        Raises:
            ValueError: an argument is out of range, or needs a call of its own.
            TypeError: an argument is unknown or has the wrong type.
        """
        check_stream_arguments(arguments)
        call, passes = self.generator.resolve_call(ids, arguments), self.generator.denoise_steps
        reason = ""
        if len(call.prompts) != 1:
            reason = f"has {len(call.prompts)} rows: each takes a row of its own, so pass them one by one"
        elif call.tree is not None:
            reason = f"has tree={call.tree!r}: all rows of a step are chains, pass tree=None"
        elif call.acceptance != "keyed":
            reason = f'has acceptance={call.acceptance!r}: all rows accept by "keyed" noise, leave it out'
        elif call.grammars and self.generator.compiles_step:
            reason = "has a grammar, and this generator's step is compiled for calls without: make one without compile"
        elif call.host_rules is not None:
            reason = "has logits_processor or stopping_criteria: these would hold up every row, leave them out"
        elif call.denoise_steps != passes:
            reason = f"has denoise_steps={call.denoise_steps}: every row is drafted in {passes}, leave it out"
        if reason:
            raise ValueError(f"a request of a session cannot be run: it {reason}")
        return call

    def admit(self, call: Call, *, skip_special_tokens: bool = False) -> int:
        """Give a request a row; `step` runs it from now on.

        Args:
            call: from `resolve`.
            skip_special_tokens: as in ``tokenizer.decode``, for the events' text.

        Returns:
            The row.

        Raises:
            RuntimeError: no row is idle, or the session has ended.
        """
        if not self.idle:
            raise RuntimeError(f"all {self.generator.batch_size} rows are taken: retire one first")
        return self.generator.lock.run(self._admit, call, skip_special_tokens)

    def _admit(self, call: Call, skip_special_tokens: bool) -> int:
        self._run.require_open()
        # 1. The row with the longest prefix of the prompt, or the one that has been idle longest.
        ids, began = call.prompts[0].tolist(), time.perf_counter()
        cached = {row: 0 if call.prompt_logprobs else self._cached(row, ids) for row in self.idle}
        row = max(cached, key=lambda idle: (cached[idle], -self._retired[idle]))
        # 2. What the engine knows of it.
        text = None
        if call.tokenizer is not None:
            text = BatchDecoder(1, call.tokenizer, call.stop_strings, skip_special_tokens)
        self._held[row] = []
        chunk, snapshot = self.generator.prefill_chunk, self.generator.reuse_prefix
        try:
            self.generator.engine.admit(row, call)
            (answer,) = self._run.admit(call, [cached[row]], first=row, chunk=chunk, snapshot=snapshot, began=began)
        except BaseException:  # out of memory, or an interrupt
            self._run.retire(row, 0)
            raise
        self._requests[row] = _Request(answer, text, ids, began)
        return row

    def _cached(self, row: int, ids: list[int]) -> int:
        """Count the leading tokens of a prompt that need not be run: whole chunks, whose bits would be the same."""
        if not self.generator.reuse_prefix:
            return 0
        shared = 0
        for old, new in zip(self._held[row], ids[:-1], strict=False):
            if old != new:
                break
            shared += 1
        whole = shared - shared % self.generator.prefill_chunk
        return self.generator.state.target_cache.resumable([whole], row)[0] if whole else 0

    def step(self) -> list[RowEvent]:
        """Run one chunk of one waiting prompt, in turn, and one step of all rows that have begun.

        An answer's first token does not wait for that step: a chunk that ends a prompt returns at once, and the next
        call begins with the step.

        Returns:
            What happened, in order. A row stays taken after its last event until `retire`.

        Raises:
            RuntimeError: the session has ended.
        """
        return self.generator.lock.run(self._step)

    def _step(self) -> list[RowEvent]:
        self._run.require_open()
        try:
            if self._run.prompts and not (self._owes_step and self._run.running):
                self._owes_step = True
                if begun := self._run.run_chunk():
                    return [self._event(answer) for answer in begun]
            self._owes_step = False
            if not self._run.running:
                return []
            return [self._event(answer) for answer in self._run.step()]
        except BaseException:  # out of memory, or an interrupt
            self._run.ended = True
            raise

    def _event(self, answer: Answer) -> RowEvent:
        request = self._requests[answer.row]
        event = event_of(self.generator.engine, [answer], request.text, request.began)
        return RowEvent(answer.row, event, answer.error)

    def retire(self, row: int) -> None:
        """Free a row, whether its answer has ended or not. Its caches stay for a request that shares its prompt.

        Raises:
            ValueError: no request has the row.
            RuntimeError: the session has ended.
        """
        if row not in self._requests:
            raise ValueError(f"row must be one that a request has, got {row}")
        self.generator.lock.run(self._retire, row)

    def _retire(self, row: int) -> None:
        self._run.require_open()
        request = self._requests.pop(row)
        filled = request.answer.filled
        self._held[row] = request.ids[: filled - filled % self.generator.prefill_chunk]
        self._clock += 1
        self._retired[row] = self._clock
        self._run.retire(row, len(self._held[row]))
