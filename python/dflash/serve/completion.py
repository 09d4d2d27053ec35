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

_ENDS = "the server is about to end: try again later"


def refusal_of(error: RuntimeError) -> ApiError:
    """Return the refusal of a request that the scheduler does not take, for now or for good."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    return ApiError(503, _ENDS, code="shutting_down")


@dataclass
class Choice:
    """One answer to a request, as OpenAI's API calls it.

    Attributes:
        call: what is run for it.
        text: splits its text.
        prompt_text: shown before it, for ``echo``.
        calls: splits the tool calls off its content; None if it has none.
        pieces: of the vocabulary if log probabilities are asked for, otherwise None.
        is_empty: nothing is asked for but the prompt. The engine's one token is not shown.
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
        """Add the log probabilities of the prompt. Slow for long ones: call it outside of the event loop."""
        self.tokens += self.pieces.of_prompt(self.call.prompts[0].tolist(), values, self.prompt_text)

    def add(self, event: StreamEvent) -> Delta:
        """Add what a step wrote; return what is new of its text."""
        reason = event.finish_reasons[0]
        self.ids += event.ids[0]
        self.statistics = event.statistics
        if self.is_empty:
            self.finish_reason = "length"
            return Delta()
        delta = self.text.push(event.text[0] if event.text else "", is_last=reason is not None)
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
        return delta


class Completion:
    """Queues the choices of a request, and passes on their events in the event loop.

    Events wait in memory until they are read, so a client that reads slowly holds up nobody.

    Args:
        scheduler: of the server.
        choices: at least one.
        timeout: seconds until all must have ended, from now.
        keep: called in a thread with a choice that the engine has ended, its index, and why; before the last delta.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        choices: Sequence[Choice],
        timeout: float,
        keep: Callable[[Choice, int, str], None] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.choices, self._timeout, self._keep, self._began = choices, timeout, keep, self._loop.time()
        self._items: asyncio.Queue[tuple[int, StreamEvent | Exception | None]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._has_failed = False
        self.first_token_seconds: float | None = None
        try:
            for index, choice in enumerate(choices):
                emit = functools.partial(self._emit, index)
                self._tickets.append(scheduler.submit(choice.call, skip_special_tokens=True, emit=emit))
        except RuntimeError as error:
            self.cancel()
            raise refusal_of(error) from error

    def _emit(self, index: int, item: StreamEvent | Exception | None) -> None:
        """Pass an item to the event loop; called by the scheduler's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody reads any more
            self._loop.call_soon_threadsafe(self._items.put_nowait, (index, item))

    @property
    def outcome(self) -> str:
        """How it ended: completed, failed or cancelled."""
        if all(choice.finish_reason for choice in self.choices):
            return "completed"
        return "failed" if self._has_failed else "cancelled"

    def cancel(self) -> None:
        """Free the rows of choices that have not ended."""
        for ticket in self._tickets:
            ticket.cancel()

    async def finish(self) -> None:
        """Read to the end. Raises ApiError as `deltas` does."""
        async for _ in self.deltas():
            pass

    async def deltas(self) -> AsyncIterator[tuple[int, Delta, StreamEvent]]:
        """Yield what each step adds: the choice's index, its text, the event.

        Raises:
            ApiError: a choice failed, took too long, or the server ends.
        """
        while self.outcome != "completed":
            index, event = await self._next()
            if self.first_token_seconds is None:
                self.first_token_seconds = self.seconds()
            choice = self.choices[index]
            if event.prompt_logprobs is not None:
                await to_thread.run_sync(choice.add_prompt, event.prompt_logprobs[0])
            delta = choice.add(event)
            if choice.finish_reason is not None:
                if self._keep is not None and (reason := event.finish_reasons[0]) is not None:
                    await to_thread.run_sync(self._keep, choice, index, reason)
                self._tickets[index].cancel()  # the text may show a stop string that the tokens do not
            yield index, delta, event

    async def _next(self) -> tuple[int, StreamEvent]:
        """Return the next event of a choice that has not ended."""
        while True:
            try:
                index, item = await asyncio.wait_for(self._items.get(), max(self._timeout - self.seconds(), 0.001))
            except asyncio.TimeoutError:
                raise self._failure(503, f"the answer was not ready after {self._timeout:g} s", "timeout") from None
            if self.choices[index].finish_reason is not None:
                continue
            if isinstance(item, StreamEvent):
                return index, item
            if item is None:
                raise self._failure(503, _ENDS, "shutting_down")
            raise self._failure(500, f"the answer failed: {item}", "engine_error") from item

    def _failure(self, status: int, message: str, code: str) -> ApiError:
        self._has_failed = True
        return ApiError(status, message, code=code)

    def seconds(self) -> float:
        """Return the time since the request was queued."""
        return self._loop.time() - self._began
