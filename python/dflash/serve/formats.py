"""Responses of OpenAI's API: chat and text completions, whole and as chunks of a stream."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from .completion import Answer
from .logprobs import ShownToken, chat_logprobs, completion_logprobs
from .text import CallPiece, Delta

__all__ = ["ChatFormat", "CompletionFormat", "Format", "event_line"]


def event_line(content: dict[str, Any] | str) -> str:
    """Return a server-sent event."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n"


def usage(answers: Sequence[Answer], prompts: int) -> dict[str, Any]:
    """Count tokens. Each of the ``prompts`` counts once, however many answers it has."""
    firsts = answers[:: len(answers) // prompts]
    prompt, new = sum(answer.prompt_tokens for answer in firsts), sum(answer.new_tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(answer.cached_tokens for answer in firsts)},
    }


class Format:
    """Writes one response.

    Args:
        model: its name.
        fingerprint: of weights and versions.
        prompts: of the request.

    Attributes:
        id: of the response.
    """

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, fingerprint: str, prompts: int = 1) -> None:
        self._prompts, self.id = prompts, f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the response to a request without ``stream``."""
        choices = [
            {"index": index, **self._whole(answer), "logprobs": logprobs, "finish_reason": answer.finish_reason}
            for index, answer in enumerate(answers)
            for logprobs in [None if answer.pieces is None else self._logprobs(answer.tokens)]
        ]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self.usage(answers)}

    def opening(self, index: int, answer: Answer) -> dict[str, Any] | None:
        """Return the chunk that comes before an answer's text, if there is one."""
        raise NotImplementedError

    def chunk(
        self, index: int, delta: Delta, reason: str | None, drafts: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """Return a chunk: new text, or the reason of the end.

        Args:
            index: of the answer.
            delta: its new text.
            reason: why it ends, in its last chunk.
            drafts: what of it was drafted, if the client asks for that.
        """
        logprobs = self._logprobs(delta.tokens) if delta.tokens else None
        choice = {"index": index, **self._part(delta), "logprobs": logprobs, "finish_reason": reason}
        if drafts is not None:
            choice["drafts"] = drafts
        return self._chunk([choice])

    def usage_chunk(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the last chunk, for ``include_usage``."""
        return {**self._chunk([]), "usage": self.usage(answers)}

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Count the tokens so far."""
        return usage(answers, self._prompts)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def _whole(self, answer: Answer) -> dict[str, Any]:
        raise NotImplementedError

    def _part(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        raise NotImplementedError


class ChatFormat(Format):
    """Writes chat completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int, answer: Answer) -> dict[str, Any] | None:
        """Return the chunk with the role."""
        first = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk([{"index": index, "delta": first, "logprobs": None, "finish_reason": None}])

    def _whole(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(answer.content), "refusal": None}
        if reasoning := "".join(answer.reasoning):
            message["reasoning_content"] = reasoning
        if answer.calls is not None and answer.calls.calls:
            message |= {"content": message["content"].strip() or None, "tool_calls": answer.calls.calls}
        return {"message": message}

    def _part(self, delta: Delta) -> dict[str, Any]:
        calls = [_call_delta(piece) for piece in delta.calls]
        parts = {"content": delta.content, "reasoning_content": delta.reasoning, "tool_calls": calls}
        return {"delta": {name: part for name, part in parts.items() if part}}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        return chat_logprobs(tokens)


def _call_delta(piece: CallPiece) -> dict[str, Any]:
    """Return a piece of a tool call as streams have it."""
    if piece.name is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


class CompletionFormat(Format):
    """Writes text completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int, answer: Answer) -> dict[str, Any] | None:
        """Return the chunk with the prompt, for ``echo``. With log probabilities it comes when these are known."""
        if not answer.prompt_text or (answer.call.prompt_logprobs and not answer.tokens):
            return None
        return self.chunk(index, Delta(answer.prompt_text, tokens=answer.tokens[: answer.prompt_tokens]), None)

    def _whole(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.prompt_text + "".join(answer.content)}

    def _part(self, delta: Delta) -> dict[str, Any]:
        return {"text": delta.content}

    def _logprobs(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        return completion_logprobs(tokens)
