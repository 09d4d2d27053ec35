"""The answers to one request, while the scheduler's thread writes them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from anyio import to_thread

from ..call import Call
from ..outputs import Statistics, StreamEvent, TokenLogprobs
from .logprobs import AnswerTokens, Pieces, ShownToken
from .protocol import ApiError
from .scheduler import QueueFullError, Scheduler, Ticket
from .text import AnswerText, CallText, Delta

__all__ = ["Answer", "Run", "refusal_of"]

_ENDS = "the server is about to end: try again later"


def refusal_of(error: RuntimeError) -> ApiError:
    """Return what a client is told if the scheduler takes nothing more, for now or for good."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    return ApiError(503, _ENDS, code="shutting_down")


@dataclass
class Answer:
    """One answer to a request.

    Attributes:
        call: what is run for it.
        text: splits its text.
        prompt_text: shown before it, for ``echo``.
        calls: splits the tool calls off its content; None if it has none.
        pieces: of the vocabulary if log probabilities are asked for, otherwise None.
        is_empty: nothing is asked for but the prompt. The engine's one token is not shown.
        content: so far.
        reasoning: so far.
        ids: so far.
        tokens: shown so far, the prompt's first; only with ``pieces``.
        finish_reason: ``"stop"``, ``"length"`` or ``"tool_calls"`` once it has ended.
        statistics: of its last event.
    """

    call: Call
    text: AnswerText
    prompt_text: str = ""
    calls: CallText | None = None
    pieces: Pieces | None = None
    is_empty: bool = False
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: str | None = None
    statistics: Statistics | None = None

    def __post_init__(self) -> None:
        if self.pieces is not None:
            self._held = AnswerTokens(self.pieces, self.call.tokenizer, len(self.prompt_text))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self.call.prompts[0])

    @property
    def cached_tokens(self) -> int:
        """Tokens of its prompt that the caches already held."""
        return 0 if self.statistics is None else self.prompt_tokens - self.statistics.num_prefilled_tokens[0]

    @property
    def new_tokens(self) -> int:
        """Its tokens so far."""
        return 0 if self.statistics is None or self.is_empty else self.statistics.num_new_tokens[0]

    def add_prompt(self, values: Sequence[TokenLogprobs | None]) -> None:
        """Add the log probabilities of the prompt. It takes long for long ones: call it outside of the event loop."""
        self.tokens += self.pieces.of_prompt(self.call.prompts[0].tolist(), values, self.prompt_text)

    def add(self, event: StreamEvent) -> Delta:
        """Add what a step wrote; return what is new of its text."""
        reason = event.finish_reasons[0]
        if self.is_empty:
            self.ids, self.finish_reason, self.statistics = event.ids[0], "length", event.statistics
            return Delta()
        delta = self.text.push(event.text[0] if event.text else "", is_last=reason is not None)
        self.ids += event.ids[0]
        reason = "stop" if self.text.is_stopped else reason
        if self.calls is not None:
            content, calls = self.calls.push(delta.content, is_last=reason is not None)
            delta = delta._replace(content=content, calls=calls)
            reason = "tool_calls" if reason == "stop" and self.calls.is_whole else reason
        if event.logprobs is not None:
            is_whole = reason is not None and not self.text.is_stopped
            shown = self._held.push(event.ids[0], event.logprobs[0], self.text.length, is_whole=is_whole)
            self.tokens += shown
            delta = delta._replace(tokens=shown)
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.finish_reason = reason
        self.statistics = event.statistics
        return delta


class Run:
    """Queues a request's answers and hands on their events in the event loop.

    Events wait in memory until they are read, so a client that reads slowly holds up nobody.

    Args:
        scheduler: of the server.
        answers: at least one.
        seconds: until all must have ended, from now.
        keep: called in a thread with an answer that the engine has ended, its index, and why; before the last delta.

    Attributes:
        has_failed: an error ended it.
        first_token_seconds: from the request to its first token; None before.

    Raises:
        ApiError: too many requests wait already, or the server is about to end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        answers: Sequence[Answer],
        seconds: float,
        keep: Callable[[Answer, int, str], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.answers, self._seconds, self._began = answers, seconds, self._loop.time()
        self._items: asyncio.Queue[tuple[int, StreamEvent | Exception | None]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self.has_failed, self._keep = False, keep
        self.first_token_seconds: float | None = None
        try:
            for index, answer in enumerate(answers):
                emit = functools.partial(self._emit, index)
                self._tickets.append(scheduler.submit(answer.call, skip_special_tokens=True, emit=emit))
        except RuntimeError as error:
            self.cancel()
            raise refusal_of(error) from error

    def _emit(self, index: int, item: StreamEvent | Exception | None) -> None:
        """Hand an item to the event loop; called by the scheduler's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody reads any more
            self._loop.call_soon_threadsafe(self._items.put_nowait, (index, item))

    @property
    def is_done(self) -> bool:
        """True if all answers have ended as they should."""
        return all(answer.finish_reason for answer in self.answers)

    def cancel(self) -> None:
        """Free the rows of answers that have not ended."""
        for ticket in self._tickets:
            ticket.cancel()

    async def deltas(self) -> AsyncIterator[tuple[int, Delta, StreamEvent]]:
        """Yield what each step adds: the answer's index, its text, the event.

        Raises:
            ApiError: an answer failed, took too long, or the server ends.
        """
        while not self.is_done:
            index, event = await self._next()
            if self.first_token_seconds is None:
                self.first_token_seconds = self.seconds()
            answer = self.answers[index]
            if event.prompt_logprobs is not None:
                await to_thread.run_sync(answer.add_prompt, event.prompt_logprobs[0])
            delta = answer.add(event)
            if answer.finish_reason is not None:
                if self._keep is not None and (reason := event.finish_reasons[0]) is not None:
                    await to_thread.run_sync(self._keep, answer, index, reason)
                self._tickets[index].cancel()  # the text may show a stop string that the tokens do not
            yield index, delta, event

    async def _next(self) -> tuple[int, StreamEvent]:
        """Return the next event of an answer that has not ended."""
        while True:
            try:
                index, item = await asyncio.wait_for(self._items.get(), max(self._seconds - self.seconds(), 0.001))
            except asyncio.TimeoutError:
                raise self._fail(503, f"the answer was not ready after {self._seconds:g} s", "timeout") from None
            if self.answers[index].finish_reason is not None:
                continue
            if isinstance(item, StreamEvent):
                return index, item
            if item is None:
                raise self._fail(503, _ENDS, "shutting_down")
            raise self._fail(500, f"the answer failed: {item}", "engine_error") from item

    def _fail(self, status: int, message: str, code: str) -> ApiError:
        self.has_failed = True
        return ApiError(status, message, code=code)

    def seconds(self) -> float:
        """Return the time since the request was queued."""
        return self._loop.time() - self._began
