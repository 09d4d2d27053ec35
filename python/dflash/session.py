"""Rows of a generator that requests join and leave between steps."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .call import Call, GenerateArguments, check_stream_arguments
from .engine.prefill import Prefill
from .engine.prefix import PrefixCache
from .engine.run import Answer, Run, event_of
from .generator import Generator
from .outputs import StreamEvent
from .streaming import BatchDecoder

if TYPE_CHECKING:
    from typing_extensions import Unpack

# While answers are being written: steps between two chunks of a prompt, but before its last, and chunks of any prompts
# between two steps.
_STEPS_PER_CHUNK, _CHUNKS_PER_STEP = 3, 2
_MOST_PASSED = 16  # chunks of shorter prompts, before one of a longer prompt is run


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
class _RunningRequest:
    """A request in its row."""

    answer: Answer
    text: BatchDecoder | None
    began: float


class Session:
    """The rows of a generator, which requests of one prompt each join and leave between steps.

    A request writes the text that it writes alone, bit for bit in every dtype, whatever the other rows do, whichever
    row it gets, and whatever ran before it. (A target that runs its own modules relies on torch's products for this,
    which must give a row the same bits at every place.)

    Whole chunks that prompts begin with are kept for all rows (`dflash.engine.prefix.PrefixCache`). A prompt takes
    those that are there when its turn comes, so prompts that arrive together run a common beginning once. `settle` adds
    the chunks of answers that have ended.

    Settings, logit rules, stop tokens and strings, seed, grammar and sharpness are the request's own. Trees, rejection,
    Python processors and another number of denoising passes are refused: these are properties of the whole step. While
    a row has a grammar, steps are not captured as graphs and wait for its masks.

    With ``block_size="auto"`` the generator chooses one width for all rows before each step, by what requests so
    far have had accepted. It measures costs when the session begins. Where bits would depend on the width, each
    step has the whole block: for a target that runs its own modules or has experts, and if ``batch_size`` blocks have
    more rows than the kernels take (docs/kernels.md; `dflash.targets.Target.is_exact_for`).

    The session ends when its generator starts another call or session, and when a step raises: nobody knows then how
    far its rows have come. Until then the weights must not change.

    Args:
        generator: its ``batch_size`` rows are the session's, and its ``prefill_chunk`` bounds how long a prompt holds
            up the others.
        cache_bytes: memory for whole chunks of prompts; 0 runs every prompt whole, as does ``reuse_prefix=False``.

    Attributes:
        prefix: the chunks; None without any.

    Raises:
        ValueError: the generator's target is spread over processes.
    """

    def __init__(self, generator: Generator, *, cache_bytes: int = 2**30) -> None:
        if (count := generator.engine.target.ranks.count) > 1:
            raise ValueError(f"a session needs a target in one process, this one is spread over {count}")
        self.generator = generator
        self._requests: dict[int, _RunningRequest] = {}
        self._idle = deque(range(generator.batch_size))  # longest first
        self._prefilled = 0  # tokens of prompts since the last step
        self._steps = 0
        self._paused = [0] * generator.batch_size  # per row, the steps before which its prompt runs no chunk
        self._passed = [0] * generator.batch_size  # per row, chunks of others that were run before its prompt's next
        self._ended: dict[int, Call] = {}  # row -> the chunks that `settle` has not begun with, as a prompt
        self._settling: Prefill | None = None
        size = cache_bytes if generator.reuse_prefix else 0
        self.prefix = PrefixCache(generator.state, generator.prefill_chunk, size) if size else None
        self._run: Run = generator.lock.run(self._begin)

    def _begin(self) -> Run:
        run, engine = self.generator.begin_run(reads_ids=True), self.generator.engine
        engine.begin_rows_(self.generator.denoise_steps)
        if engine.budget is not None:
            run.learn_costs()
        return run

    @property
    def idle(self) -> list[int]:
        """The rows that no request has, the one that has been idle longest first."""
        return [*self._idle]

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
        began, text = time.perf_counter(), None
        if call.tokenizer is not None:
            text = BatchDecoder(1, call.tokenizer, call.stop_strings, skip_special_tokens)
        row = self._idle[0]
        self._forget(row)
        self._paused[row], self._passed[row] = self._steps, 0
        try:
            self.generator.engine.admit(row, call)
            (answer,) = self._run.admit(
                call, [0], first=row, chunk=self.generator.prefill_chunk, prefix=self.prefix, began=began
            )
        except BaseException:  # out of memory, or an interrupt
            self._run.retire(row)
            raise
        self._idle.popleft()
        self._requests[row] = _RunningRequest(answer, text, began)
        return row

    def step(self) -> list[RowEvent]:
        """Run one chunk of a waiting prompt, that with the fewest left, or one step of all rows that have begun.

        Between two chunks of a prompt are at least three steps, unless the second is its last or no row has begun, so a
        long prompt holds up the others by one chunk in three steps. Of several prompts fewer than three chunks are run
        between two steps.

        Returns:
            What happened, in order. A row stays taken after its last event until `retire`.

        Raises:
            RuntimeError: the session has ended.
        """
        return self.generator.lock.run(self._step)

    def _step(self) -> list[RowEvent]:
        self._run.require_open()
        try:
            is_writing = bool(self._run.running)
            if self._next_prompt(is_writing):
                prefill, _ = self._run.prompts[0]
                start, stop, *_ = prefill.chunks[0]
                self._prefilled += stop - start
                return [self._event(answer) for answer in self._run.run_chunk()]
            self._prefilled = 0
            if not is_writing:
                return []
            self._steps += 1
            return [self._event(answer) for answer in self._run.step()]
        except BaseException:  # out of memory, or an interrupt
            self._run.ended = True
            raise

    def _next_prompt(self, is_writing: bool) -> bool:
        """Put the prompt whose turn it is in front of the others; False if there is none.

        The one with the fewest chunks left comes first. So prompts with a common beginning do not wait for each other's
        ends, and a short one does not wait for a long one, which has its turn after 16 chunks of others.
        """
        if is_writing and self._prefilled >= _CHUNKS_PER_STEP * self.generator.prefill_chunk:
            return False
        prompts, ready = self._run.prompts, []
        for prompt in prompts:
            row, left = prompt[0].rows.start, len(prompt[0].chunks)
            if not is_writing or left == 1 or self._paused[row] <= self._steps:
                ready.append((self._passed[row] < _MOST_PASSED, left, row, prompt))
        if not ready:
            return False
        *_, row, chosen = min(ready, key=lambda each: each[:2])
        for *_, other, _ in ready:
            self._passed[other] = 0 if other == row else self._passed[other] + 1
        prompts.remove(chosen)
        prompts.appendleft(chosen)
        self._paused[row] = self._steps + _STEPS_PER_CHUNK
        return True

    def _event(self, answer: Answer) -> RowEvent:
        request = self._requests[answer.row]
        event = event_of(self.generator.engine, [answer], request.text, request.began)
        return RowEvent(answer.row, event, answer.error)

    def settle(self) -> bool:
        """Run one chunk of an answer that has ended as that of a prompt; do this while there is nothing else to do.

        A prompt that continues the conversation begins with these chunks. (What the steps have left in the caches need
        not have the bits of a prompt's pass.)

        Returns:
            False if there is nothing left to run.

        Raises:
            RuntimeError: the session has ended.
        """
        return self.generator.lock.run(self._settle)

    def _settle(self) -> bool:
        self._run.require_open()
        try:
            if self._settling is None:
                if not self._ended:
                    return False
                (row, call), engine = next(iter(self._ended.items())), self.generator.engine
                chunk = self.generator.prefill_chunk
                self._settling = Prefill(engine, call, [0], first=row, chunk=chunk, prefix=self.prefix)
                del self._ended[row]
            self._settling.run_chunk()
            if not self._settling.chunks:
                self.generator.state.vacate_(self._settling.rows)
                self._settling = None
            return True
        except BaseException:
            self._run.ended = True
            raise

    @property
    def is_settled(self) -> bool:
        """True if `settle` has nothing to do."""
        return not self._ended and self._settling is None

    def _forget(self, row: int) -> None:
        """Drop what `settle` would do in a row."""
        self._ended.pop(row, None)
        if self._settling is not None and self._settling.rows.start == row:
            self._settling = None

    def retire(self, row: int) -> None:
        """Free a row, whether its answer has ended or not.

        Raises:
            ValueError: no request has the row.
            RuntimeError: the session has ended.
        """
        if row not in self._requests:
            raise ValueError(f"row must be one that a request has, got {row}")
        self.generator.lock.run(self._retire, row)

    def _retire(self, row: int) -> None:
        self._run.require_open()
        answer, chunk = self._requests.pop(row).answer, self.generator.prefill_chunk
        self._idle.append(row)
        self._run.retire(row)
        call, whole_tokens = answer.call, (answer.length + 1) // chunk * chunk
        if self.prefix is not None and whole_tokens > answer.prompt_length and call.pictures is None:
            whole = self.generator.state.tokens[row, :whole_tokens].clone()
            if self.prefix.keys(whole)[-1] not in self.prefix:
                self._ended[row] = replace(call, prompts=[whole], prompt_logprobs=False)
