"""OpenAI's API: chat and text completions, whole and as chunks of a stream, and the small routes around them.

Its requests are those that the server reads, so they are in requests.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from dflash import StreamEvent

from . import api, requests
from .answer_text import Delta, Piece, ShownToken
from .requests import ApiError, GenerationRequest, StreamOptions
from .service import Choice, Completion

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
ERRORS = api.document_errors(error=api.json_object("message", "type", param=api.MAYBE, code=api.MAYBE))


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error as the API writes it."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


# ---------------------------------------------------------------------------------------------- answers


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


class _CompletionFormat(api.AnswerFormat):
    """Writes choices.

    A subclass has what chats and texts do not share: names, the chunk before a choice's text, and an answer's place.
    """

    def whole(self, completion: Completion) -> dict[str, Any]:
        content, choices = [], completion.choices
        for index, choice in enumerate(choices):
            logprobs = None if choice.pieces is None else self.logprobs(choice.tokens)
            end = {"logprobs": logprobs, "finish_reason": choice.finish_reason}
            content.append({"index": index, **self._whole(choice), **end})
        return {**self._head(self.whole_object), "choices": content, "usage": self.usage(choices)}

    def chunk(
        self, index: int, delta: Delta, reason: str | None, drafts: dict[str, int] | None = None
    ) -> dict[str, Any]:
        """Return a chunk: new text, or the reason of the end; ``drafts`` says what of it was drafted."""
        logprobs = self.logprobs(delta.tokens) if delta.tokens else None
        choice = {"index": index, **self._part(delta), "logprobs": logprobs, "finish_reason": reason}
        return self._chunk([choice if drafts is None else {**choice, "drafts": drafts}])

    async def lines(self, body: GenerationRequest, completion: Completion) -> AsyncIterator[str]:
        options = body.stream_options or StreamOptions()

        def line(chunk: dict[str, Any]) -> str:
            if options.continuous_usage_stats:
                chunk |= {"usage": self.usage(completion.choices)}
            elif options.include_usage:
                chunk |= {"usage": None}  # as OpenAI does
            return api.event_line(chunk)

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
                yield api.event_line({**self._chunk([]), "usage": self.usage(completion.choices)})
        except ApiError as error:
            yield api.event_line(error_body(error))
        yield api.event_line("[DONE]")

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Count the tokens so far. Each prompt counts once, however many answers it has."""
        firsts = choices[:: len(choices) // self.prompts]
        prompt, new = sum(choice.prompt_tokens for choice in firsts), sum(choice.new_tokens for choice in choices)
        cached = {"cached_tokens": sum(choice.cached_tokens for choice in firsts)}
        counts = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        return {**counts, "prompt_tokens_details": cached}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": choices}

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "created": self.created, "model": self.model, "system_fingerprint": self.fingerprint}
        return {**head, **self.warned, "object": kind}


def _drafts(choice: Choice, delta: Delta, event: StreamEvent) -> dict[str, int]:
    """Say what of a step was drafted; ``characters`` of its text, counted from the first.

    The bonus token's characters are the last. Where text is held back, they may be those of a token before.
    """
    ids, accepted = event.ids[0], event.accepted[0]
    lengths = [len(choice.call.tokenizer.decode(part, skip_special_tokens=True)) for part in (ids, ids[:accepted])]
    shown = len(delta.reasoning) + len(delta.content)
    return {"tokens": len(ids), "accepted": accepted, "characters": max(0, shown - (lengths[0] - lengths[1]))}


class ChatFormat(_CompletionFormat):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    logprobs = staticmethod(chat_logprobs)

    def opening(self, index: int, choice: Choice) -> dict[str, Any]:
        first = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk([{"index": index, "delta": first, "logprobs": None, "finish_reason": None}])

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if reasoning := "".join(delta.reasoning for delta in choice.deltas):
            message["reasoning_content"] = reasoning
        if choice.calls is not None and choice.calls.calls:
            message |= {"content": message["content"].strip() or None, "tool_calls": choice.calls.calls}
        return {"message": message}

    def _part(self, delta: Delta) -> dict[str, Any]:
        parts = {"content": delta.content, "reasoning_content": delta.reasoning, "tool_calls": delta.calls}
        return {"delta": {name: part for name, part in parts.items() if part}}


class TextFormat(_CompletionFormat):
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


# ---------------------------------------------------------------------------------------------- routes

router = APIRouter()
API = api.Api("", router, error_body)
_CHOICE = api.json_object("finish_reason", index=api.COUNT, logprobs={"type": ["object", "null"]})
_CHOICES = {"type": "array", "minItems": 1, "items": _CHOICE}
_USAGE = api.json_object(prompt_tokens=api.COUNT, completion_tokens=api.COUNT, total_tokens=api.COUNT)
_WHOLE = api.json_object("id", "object", "model", created=api.COUNT, choices=_CHOICES, usage=_USAGE)
# No type: some readers of the document take it for that of the stream, others for that of each event.
_EVENTS = {"description": "With stream=true: chunks or an error, then [DONE]."}
_ANSWERS = api.document_answer(_WHOLE, _EVENTS, what="The answers.")


@router.post("/v1/chat/completions", response_model=None, responses=_ANSWERS)
async def chat_completions(body: requests.ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    return await api.respond(request, body, (), ChatFormat)


@router.post("/v1/completions", response_model=None, responses=_ANSWERS)
async def completions(body: requests.CompletionRequest, request: Request) -> Response:
    """Continue texts, or token ids."""
    return await api.respond(request, body, (), TextFormat)


@router.get("/v1/models")
async def models(service: api.Served) -> dict[str, Any]:
    """List the model, under each of its names."""
    return {"object": "list", "data": [await model(name, service) for name in (service.name, *service.aliases)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: api.Served) -> dict[str, Any]:
    """Describe the model."""
    generator = service.scheduler.generator
    return {
        **{"id": service.name_of(name), "object": "model", "created": service.created, "owned_by": "dflash"},
        **{"max_model_len": generator.max_length, "has_drafter": generator.block_size > 1},
        "has_receipts": service.receipts is not None,
    }


@router.post("/tokenize")
async def tokenize(body: requests.TokenizeRequest, service: api.Served) -> dict[str, Any]:
    """Return the tokens of a text or of a conversation."""
    ids = await to_thread.run_sync(service.tokenize, body)
    words = service.reader.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    room = service.scheduler.generator.max_length
    return {"count": len(ids), "max_model_len": room, "tokens": ids, "token_strs": words}


@router.post("/detokenize")
async def detokenize(body: requests.DetokenizeRequest, service: api.Served) -> dict[str, str]:
    """Return the text of tokens."""
    return {"prompt": await to_thread.run_sync(service.detokenize, body)}
