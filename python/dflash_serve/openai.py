"""Responses of OpenAI's API: chat and text completions, whole and as chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from dflash import StreamEvent

from .answer_text import Delta
from .answer_tokens import Piece, ShownToken
from .requests import ApiError, GenerationRequest, StreamOptions
from .service import Choice, Completion


def event_line(content: dict[str, Any] | str) -> str:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n"


def typed_event(content: dict[str, Any]) -> str:
    """Return an event of the APIs whose events have a ``type``."""
    return f"event: {content['type']}\n{event_line(content)}"


def chat_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """Return ``logprobs`` of a chat's choice."""
    content = []
    for token in tokens:
        top = [_entry(piece, value) for piece, value in token.top or ()]
        content.append({**_entry(token.piece, token.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(piece: Piece, value: float | None) -> dict[str, Any]:
    return {"token": piece.text, "bytes": list(piece.bytes), "logprob": value}


def completion_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """Return ``logprobs`` of a text's choice."""
    tops = []
    for token in tokens:
        found: dict[str, float | None] = {}  # by text; of equal texts the most probable
        for piece, value in (*(token.top or ()), (token.piece, token.logprob)):
            found.setdefault(piece.text, value)
        tops.append(None if token.top is None else found)
    return {
        "tokens": [token.piece.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": tops,
        "text_offset": [token.start for token in tokens],
    }


class Format:
    """Writes one response to a request of so many ``prompts``.

    A subclass has what chats and texts do not share: names, the chunk before a choice's text, and an answer's place.
    """

    media_type = "text/event-stream"

    def __init__(self, model: str, fingerprint: str, prompts: int = 1, warnings: Sequence[str] = ()) -> None:
        self._prompts, self.id = prompts, f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        if warnings:
            self._head["warnings"] = warnings

    def whole(self, completion: Completion) -> dict[str, Any]:
        """Return the response to a request without ``stream``."""
        content, choices = [], completion.choices
        for index, choice in enumerate(choices):
            logprobs = None if choice.pieces is None else self.logprobs(choice.tokens)
            end = {"logprobs": logprobs, "finish_reason": choice.finish_reason}
            content.append({"index": index, **self._whole(choice), **end})
        return {**self._head, "object": self.whole_object, "choices": content, "usage": self.usage(choices)}

    def chunk(
        self, index: int, delta: Delta, reason: str | None, drafts: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """Return a chunk: new text, or the reason of the end; ``drafts`` says what of it was drafted."""
        logprobs = self.logprobs(delta.tokens) if delta.tokens else None
        choice = {"index": index, **self._part(delta), "logprobs": logprobs, "finish_reason": reason}
        return self._chunk([choice if drafts is None else {**choice, "drafts": drafts}])

    async def lines(self, body: GenerationRequest, completion: Completion) -> AsyncIterator[str]:
        """Yield the events of a stream. An error after its beginning is an event too."""
        options = body.stream_options or StreamOptions()

        def line(chunk: dict[str, Any]) -> str:
            if options.continuous_usage_stats:
                chunk |= {"usage": self.usage(completion.choices)}
            elif options.include_usage:
                chunk |= {"usage": None}  # as OpenAI does
            return event_line(chunk)

        for index, choice in enumerate(completion.choices):
            if (opening := self.opening(index, choice)) is not None:
                yield line(opening)
        try:
            async for index, delta, event in completion.deltas():
                choice = completion.choices[index]
                if event.prompt_logprobs is not None and (opening := self.opening(index, choice)) is not None:
                    yield line(opening)
                drafts = _drafts(choice, delta, event) if options.include_drafts and not choice.is_empty else None
                if any(delta) or drafts is not None:
                    yield line(self.chunk(index, delta, None, drafts))
                if (reason := choice.finish_reason) is not None:
                    yield line(self.chunk(index, Delta(), reason))
            if options.include_usage:
                yield event_line(self.usage_chunk(completion.choices))
        except ApiError as error:
            yield event_line(error.body)
        yield event_line("[DONE]")

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": self.usage(choices)}

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Count the tokens so far. Each prompt counts once, however many answers it has."""
        firsts = choices[:: len(choices) // self._prompts]
        prompt, new = sum(choice.prompt_tokens for choice in firsts), sum(choice.new_tokens for choice in choices)
        cached = {"cached_tokens": sum(choice.cached_tokens for choice in firsts)}
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**counts, "prompt_tokens_details": cached}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": choices}


def _drafts(choice: Choice, delta: Delta, event: StreamEvent) -> dict[str, int]:
    """Say what of a step was drafted; ``characters`` of its text, counted from the first.

    The bonus token's characters are the last. Where text is held back, they may be those of a token before.
    """
    ids, accepted = event.ids[0], event.accepted[0]
    lengths = [len(choice.call.tokenizer.decode(part, skip_special_tokens=True)) for part in (ids, ids[:accepted])]
    shown = len(delta.reasoning) + len(delta.content)
    return {"tokens": len(ids), "accepted": accepted, "characters": max(0, shown - (lengths[0] - lengths[1]))}


class ChatFormat(Format):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    logprobs = staticmethod(chat_logprobs)

    def opening(self, index: int, choice: Choice) -> dict[str, Any]:
        first = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk([{"index": index, "delta": first, "logprobs": None, "finish_reason": None}])

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if reasoning := choice.reasoning:
            message["reasoning_content"] = reasoning
        if choice.calls is not None and choice.calls.calls:
            message |= {"content": message["content"].strip() or None, "tool_calls": choice.calls.calls}
        return {"message": message}

    def _part(self, delta: Delta) -> dict[str, Any]:
        parts = {"content": delta.content, "reasoning_content": delta.reasoning, "tool_calls": delta.calls}
        return {"delta": {name: part for name, part in parts.items() if part}}


class TextFormat(Format):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"
    logprobs = staticmethod(completion_logprobs)

    def opening(self, index: int, choice: Choice) -> dict[str, Any] | None:
        """Return the chunk with the prompt, for ``echo``. With log probabilities it comes when these are known."""
        if not choice.prompt_text or (choice.call.prompt_logprobs and not choice.tokens):
            return None
        return self.chunk(index, Delta(choice.prompt_text, tokens=choice.tokens[: choice.prompt_tokens]), None)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.prompt_text + choice.content}

    def _part(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.content}
