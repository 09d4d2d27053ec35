"""Anthropic's Messages API: its requests as chat requests, and answers to these as its messages and events."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, model_validator

from . import api, requests
from .answer_text import BlockEvent, BlockWriter, arguments_of
from .requests import ApiError, ChatRequest, Fields, Number, SamplingFields, Stops, expect, not_applied, parts_of
from .service import Choice, Completion

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_KINDS |= {429: "rate_limit_error", 503: "overloaded_error"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error as the API writes it."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


# ---------------------------------------------------------------------------------------------- requests


class CachedPart(Fields):
    """A part of a message or of the system prompt. Every prompt is cached, so marks that ask for it change nothing."""

    cache_control: Annotated[dict[str, Any] | None, Field(exclude=True)] = None


class TextBlock(CachedPart):
    type: Literal["text"]
    text: str


class PictureSource(Fields):
    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _check_source(self) -> PictureSource:
        is_url = self.type == "url"
        expect(self.url if is_url else self.data and self.media_type, "a picture needs its url, or media_type and data")
        return self


class PictureBlock(CachedPart):
    type: Literal["image"]
    source: PictureSource


class DocumentSource(Fields):
    type: str
    media_type: str | None = None
    data: str | None = None

    @model_validator(mode="after")
    def _read(self) -> DocumentSource:
        """Keep the text of a document in ``data``."""
        is_text = self.type in ("text", "base64") and self.media_type == "text/plain" and self.data is not None
        rule = "a document must be text/plain, as data of the type text or base64: send the text of other files"
        expect(is_text, rule)
        if self.type == "base64" and self.data is not None:
            try:
                self.data = base64.b64decode(self.data, validate=True).decode()
            except ValueError:
                expect(False, "data must be base64 of text in UTF-8")
        return self


class DocumentBlock(CachedPart):
    type: Literal["document"]
    source: DocumentSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.data)))


class ThinkingBlock(CachedPart):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(CachedPart):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Texts = Annotated[list[TextBlock], BeforeValidator(parts_of, str | list[TextBlock])]


Shown = Annotated[TextBlock | PictureBlock | DocumentBlock, Field(discriminator="type")]


class ToolResultBlock(CachedPart):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[Shown], BeforeValidator(parts_of, str | list[Shown])] | None = None
    is_error: bool | None = None


ContentBlock = Annotated[
    TextBlock | PictureBlock | DocumentBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class MessageParam(Fields):
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[list[ContentBlock], BeforeValidator(parts_of, str | list[ContentBlock])]


class MessageTool(CachedPart):
    """A function that the model may call. Tools that Anthropic's servers run are refused."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


_SHARED = {"name", "description", "strict"}  # fields of a tool that a chat's function has too


class MessageToolChoice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Fields):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountRequest(not_applied(CachedPart, mcp_servers=([],), container=())):
    """A request of ``/v1/messages/count_tokens``, and what `MessagesRequest` shares with it."""

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: Texts | None = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: requests.Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # as older clients call it

    def chat(self, **more: Any) -> ChatRequest:
        """Return the same as a chat request, with ``more`` fields.

        Raises:
            pydantic.ValidationError: it cannot be one.
        """
        messages = [] if self.system is None else [{"role": "system", "content": _parts(self.system)}]
        for said in itertools.chain.from_iterable(map(_chat_messages, self.messages)):
            if said["role"] == "user" and messages and messages[-1]["role"] == "user":  # as the API joins them
                messages[-1] = requests.join_messages(messages[-1], said, "\n")
            else:
                messages.append(said)
        continued = {"continue_final_message": messages[-1]["role"] == "assistant"}
        fields: dict[str, Any] = {"messages": messages, "model": self.model, **continued}
        shown = [tool.model_dump(include=_SHARED) | {"parameters": tool.input_schema} for tool in self.tools or ()]
        fields["tools"] = [requests.function(**tool) for tool in shown]
        if (choice := self.tool_choice) is not None:
            named = requests.function(name=choice.name or "")
            fields["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
            fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        fields["thinking"] = self.thinking and self.thinking.model_dump()
        config = self.output_config or OutputConfig()
        fields["reasoning_effort"] = config.effort
        if (form := config.format or self.output_format) is not None:
            fields["response_format"] = requests.schema_format(schema=form.schema_, strict=True)
        return ChatRequest.model_validate(fields | more)


class MessagesRequest(CountRequest, SamplingFields):
    """A request of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1), Number]
    stop_sequences: Stops | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1), Number] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def chat(self, **more: Any) -> ChatRequest:
        ends = {"max_tokens": self.max_tokens, "stop": self.stop_sequences or None}
        return super().chat(**self.sampling(), **ends, stream=self.stream, **more)


def _parts(blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what is shown as parts of a chat's message; texts that follow each other are lines of one."""
    parts = []
    for block in blocks:
        if isinstance(block, TextBlock | DocumentBlock):
            parts.append({"type": "text", "text": block.text})
        elif isinstance(block, PictureBlock):
            source = block.source
            url = source.url or f"data:{source.media_type};base64,{source.data}"
            parts.append(requests.picture(url))
    return requests.join_texts(parts, "\n")


def _chat_messages(message: MessageParam) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat that a message becomes: results of tools are messages of their own there."""
    content = _parts(message.content)
    results = [block for block in message.content if isinstance(block, ToolResultBlock)]
    for result in results:
        error = [{"type": "text", "text": "Error: "}] if result.is_error else []
        shown = requests.join_texts([*error, *_parts(result.content or [])], "")
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": shown}
    said: dict[str, Any] = {"role": message.role, "content": content}
    if calls := [block for block in message.content if isinstance(block, ToolUseBlock)]:
        said["tool_calls"] = [
            {"id": call.id, **requests.function(name=call.name, arguments=json.dumps(call.input))} for call in calls
        ]
    if thoughts := [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]:
        said["reasoning_content"] = "\n".join(thoughts)
    if content or not results:
        yield said


# ---------------------------------------------------------------------------------------------- answers


_BEGUN: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
    "call": {"type": "tool_use", "input": {}},
}
_ADDED = {"thinking": ("thinking_delta", "thinking"), "text": ("text_delta", "text")}
_ADDED["call"] = ("input_json_delta", "partial_json")


def _content_block(block: BlockEvent) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.call[0], "name": block.call[1], "input": arguments_of(block.text) or {}}
    return _BEGUN[block.kind] | {block.kind: block.text}


def _block_event(block: BlockEvent) -> str:
    if block.what == "close":
        return api.typed_event("content_block_stop", index=block.index)
    if block.what == "add":
        kind, field = _ADDED[block.kind]
        return api.typed_event("content_block_delta", index=block.index, delta={"type": kind, field: block.text})
    named = dict(zip(("id", "name"), block.call, strict=True)) if block.kind == "call" else {}
    return api.typed_event("content_block_start", index=block.index, content_block={**_BEGUN[block.kind], **named})


def _usage(choice: Choice) -> dict[str, Any]:
    read = choice.cached_tokens
    counts = {"input_tokens": choice.prompt_tokens - read, "cache_creation_input_tokens": 0}
    return {**counts, "cache_read_input_tokens": read, "output_tokens": choice.new_tokens}


class MessagesFormat(api.AnswerFormat):
    """Writes an answer as a message, whole or as events."""

    prefix, ping = "msg", api.typed_event("ping")

    def whole(self, completion: Completion) -> dict[str, Any]:
        (choice,) = completion.choices
        content = [_content_block(block) for block in BlockWriter.of(choice.deltas) if block.what == "close"]
        return {**self._message(content), **self._end(choice), "usage": _usage(choice)}

    async def lines(self, _body: Any, completion: Completion) -> AsyncIterator[str]:
        (choice,) = completion.choices
        begin = self._message([]) | {"stop_reason": None, "stop_sequence": None, "usage": _usage(choice)}
        yield api.typed_event("message_start", message=begin)
        try:
            async for blocks in completion.blocks():
                for block in blocks:
                    yield _block_event(block)
            yield api.typed_event("message_delta", delta=self._end(choice), usage=_usage(choice))
            yield api.typed_event("message_stop")
        except ApiError as error:
            yield api.typed_event("error", error=error_body(error)["error"])

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "model": self.model, **self.warned}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _end(self, choice: Choice) -> dict[str, Any]:
        stopped = choice.text.stopped_by
        reason = "stop_sequence" if stopped else _REASONS[choice.finish_reason or "stop"]
        return {"stop_reason": reason, "stop_sequence": stopped or None}


# ---------------------------------------------------------------------------------------------- routes

router = APIRouter(responses=api.document_errors("type", error=api.json_object("type", "message")))
_NAMES = {"response_format": "output_config", "stop": "stop_sequences"}
API = api.Api("/v1/messages", router, error_body, names=_NAMES)
_MESSAGE = api.json_object("id", "type", "role", "model", content={"type": "array"}, stop_reason=api.MAYBE)


@router.post("/v1/messages", response_model=None, responses=api.document_answer(_MESSAGE, api.TYPED_EVENTS))
async def messages(body: MessagesRequest, request: Request, service: api.Served) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    return await api.respond(request, *api.translate(service, body), MessagesFormat)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, service: api.Served) -> dict[str, int]:
    """Count the tokens of a conversation."""
    chat, _ = api.translate(service, body)
    return {"input_tokens": len(await to_thread.run_sync(service.encode, chat))}
