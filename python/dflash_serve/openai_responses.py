"""OpenAI's Responses API: its requests as chat requests, and answers to these as its items and events."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import pydantic
from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter

from . import api, requests
from .answer_text import BlockEvent, BlockWriter, arguments_of
from .openai import error_body
from .requests import ApiError, ChatRequest, Fields, Limit, Name, SamplingFields, bad_request, expect, not_applied
from .service import Choice, Completion

_MOST_KEPT = 1000  # responses that later requests can continue
_MOST_CHARACTERS = 2**26  # of their conversations


# ---------------------------------------------------------------------------------------------- requests


class ContentPart(Fields):
    """Text that was given or answered. Its annotations change nothing."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Annotated[list[Any] | None, Field(exclude=True)] = None
    logprobs: Annotated[list[Any] | None, Field(exclude=True)] = None


class PicturePart(Fields):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high"] | None = None  # the processor decides


class ReasoningPart(Fields):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _Item(Fields):
    id: Annotated[str | None, Field(exclude=True)] = None
    status: Annotated[str | None, Field(exclude=True)] = None


_Contents = list[Annotated[ContentPart | PicturePart, Field(discriminator="type")]]
Contents = Annotated[_Contents, BeforeValidator(requests.parts_of, str | _Contents)]


class MessageItem(_Item):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Contents


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Contents


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: list[ReasoningPart] | None = None
    content: list[ReasoningPart] | None = None
    encrypted_content: Annotated[str | None, Field(exclude=True)] = None


InputItem = Annotated[MessageItem | CallItem | CallOutputItem | ReasoningItem, Field(discriminator="type")]
_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])


def _items(value: object) -> object:
    """Return the input as items: a text is a user's message, and what has a role needs no type."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        return value
    return [{"type": "message", **each} if isinstance(each, dict) and "role" in each else each for each in value]


class FunctionTool(requests.Function):
    type: Literal["function"]


def _hosted(kind: str) -> str:
    expect(kind != "function", "a function has a name, and may have a description and parameters")
    expect(kind != "namespace", "a namespace has a name and tools, and may have a description")
    return kind


class HostedTool(Fields):
    """A tool that OpenAI's servers run, or one whose input is free text: the model is not told of it."""

    model_config = pydantic.ConfigDict(extra="ignore")  # its fields need no warnings of their own

    type: Annotated[str, AfterValidator(_hosted)]


class NamespaceTool(Fields):
    """Functions of one subject. Codex has one for each MCP server."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: list[FunctionTool | HostedTool]


def _whole_name(namespace: str, name: str) -> str:
    """Return the name by which a model knows a function of a namespace, of at most OpenAI's 64 characters."""
    whole = f"{namespace}__{name}"
    return whole if len(whole) <= 64 else f"{whole[:55]}_{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


class FunctionChoice(Fields):
    type: Literal["function"]
    name: str


class TextForm(requests.JsonSchema):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None


class TextConfig(Fields):
    format: TextForm | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Fields):
    """How much to reason. Thoughts are shown whole, so a ``summary`` changes nothing."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None


class ResponsesRequest(
    not_applied(
        SamplingFields, background=(False,), conversation=(), max_tool_calls=(), prompt=(), truncation=("disabled",)
    )
):
    """A request of ``/v1/responses``."""

    model: str | None = None
    input: Annotated[list[InputItem], BeforeValidator(_items, str | list[InputItem]), Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    max_output_tokens: Limit | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[FunctionTool | NamespaceTool | HostedTool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def functions(self) -> Iterator[tuple[FunctionTool, dict[str, str]]]:
        """Yield each function as the model is told of it, and how a call names it."""
        for tool in self.tools or ():
            if isinstance(tool, FunctionTool):
                yield tool, {"name": tool.name}
            for each in tool.tools if isinstance(tool, NamespaceTool) else ():
                if isinstance(each, FunctionTool):
                    told = each.model_copy(update={"name": _whole_name(tool.name, each.name)})
                    yield told, {"name": each.name, "namespace": tool.name}

    @property
    def warnings(self) -> list[str]:
        """Say what is left out."""
        tools = [each for tool in self.tools or () for each in getattr(tool, "tools", [tool])]
        kinds = dict.fromkeys(tool.type for tool in tools if isinstance(tool, HostedTool))
        return [f"tools[]: {kind[:100]} is not served here, left out" for kind in kinds]

    @property
    def continues(self) -> bool:
        """True if the answer continues the last item: a message of the assistant that is not completed."""
        last = self.input[-1]
        return isinstance(last, MessageItem) and last.role == "assistant" and last.status != "completed"

    def messages_after(self, before: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages of a chat: those of the response ``before``, then the input."""
        messages = [*before]
        for item in self.input:
            _add_item(messages, item)
        return messages

    def chat(self, conversation: Sequence[dict[str, Any]]) -> ChatRequest:
        """Return the same as a chat request.

        Raises:
            pydantic.ValidationError: it cannot be one.
        """
        fields = {"model": self.model, "parallel_tool_calls": self.parallel_tool_calls, "stream": self.stream}
        messages = [*conversation]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields |= {"messages": messages, "max_tokens": self.max_output_tokens, **self.sampling()}
        fields["continue_final_message"] = self.continues
        fields["tools"] = [requests.function(**_given(tool, "type")) for tool, _ in self.functions()]
        choice = self.tool_choice
        if isinstance(choice, FunctionChoice):
            known = {called["name"]: tool.name for tool, called in self.functions()}
            choice = requests.function(name=known.get(choice.name, choice.name))
        fields |= {"tool_choice": choice, "reasoning_effort": self.reasoning and self.reasoning.effort}
        if (form := self.text and self.text.format) is not None:
            given, is_schema = _given(form, "type"), form.type == "json_schema"
            fields["response_format"] = requests.schema_format(**given) if is_schema else {"type": form.type}
        return ChatRequest.model_validate(fields)


def _given(model: Fields, *left_out: str) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_none=True, exclude={*left_out})


def _parts(contents: Sequence[Any]) -> list[dict[str, Any]]:
    """Return texts and pictures as parts of a chat's message; texts that follow each other are one."""
    parts = [
        requests.picture(part.image_url) if isinstance(part, PicturePart) else {"type": "text", "text": part.text}
        for part in contents
    ]
    return requests.join_texts(parts, "")


def _add_item(messages: list[dict[str, Any]], item: Any) -> None:
    """Add an item of the input to the messages of a chat: thoughts and calls belong to an answer there."""
    if isinstance(item, CallOutputItem):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _parts(item.output)})
        return
    if isinstance(item, MessageItem) and item.role != "assistant":
        messages.append({"role": item.role, "content": _parts(item.content)})
        return
    thoughts = isinstance(item, ReasoningItem) and "".join(part.text for part in item.content or item.summary or ())
    if isinstance(item, ReasoningItem) and not thoughts:
        return
    answer = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if answer is None or (not isinstance(item, CallItem) and ("content" in answer or "tool_calls" in answer)):
        messages.append({"role": "assistant"})
    answer = messages[-1] = {**messages[-1]}  # that of an earlier response stays as it is
    if isinstance(item, CallItem):
        name = _whole_name(item.namespace, item.name) if item.namespace else item.name
        call = {"id": item.call_id, **requests.function(name=name, arguments=item.arguments)}
        answer["tool_calls"] = [*answer.get("tool_calls", ()), call]
    elif isinstance(item, MessageItem):
        answer["content"] = _parts(item.content)
    else:
        answer["reasoning_content"] = "\n".join(filter(None, [answer.get("reasoning_content"), thoughts]))


class Conversations:
    """The conversations of earlier responses, in memory: the latest ones, within a bound."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], int]] = OrderedDict()
        self._characters = 0

    def of(self, response: str | None) -> list[dict[str, Any]]:
        """Return the messages up to a response; raise ApiError if it is not kept."""
        if response is None:
            return []
        if response not in self._kept:
            message = f"there is no response {response!r}: the server keeps the latest {_MOST_KEPT} in memory"
            raise bad_request(message, "previous_response_id", "previous_response_not_found")
        return self._kept[response][0]

    def keep(self, response: str, messages: list[dict[str, Any]]) -> None:
        size = len(json.dumps(messages))
        self._kept[response], self._characters = (messages, size), self._characters + size
        while len(self._kept) > _MOST_KEPT or (self._characters > _MOST_CHARACTERS and len(self._kept) > 1):
            self._characters -= self._kept.popitem(last=False)[1][1]


# ---------------------------------------------------------------------------------------------- answers


class ResponsesFormat(api.AnswerFormat):
    """Writes an answer as a response, whole or as events."""

    prefix = "resp"

    def __init__(
        self, request: ResponsesRequest, conversation: Sequence[dict[str, Any]], kept: Conversations, *arguments: Any
    ) -> None:
        super().__init__(*arguments)
        self.request, self._conversation, self._kept = request, conversation, kept
        self._called = {tool.name: called for tool, called in request.functions()}

    def whole(self, completion: Completion) -> dict[str, Any]:
        (choice,) = completion.choices
        closed = [block for block in BlockWriter.of(choice.deltas) if block.what == "close"]
        items = [self._item(block, _status(choice) if block is closed[-1] else "completed") for block in closed]
        return self._finished(choice, items)

    async def lines(self, _body: Any, completion: Completion) -> AsyncIterator[str]:
        (choice,) = completion.choices
        items, numbers = list[dict[str, Any]](), itertools.count()

        def line(kind: str, **content: Any) -> str:
            return api.typed_event(kind, sequence_number=next(numbers), **content)

        begun = self._response("in_progress", [], None)
        yield line("response.created", response=begun)
        yield line("response.in_progress", response=begun)
        try:
            async for blocks in completion.blocks():
                for block in blocks:
                    status = _status(choice) if block is blocks[-1] else "completed"
                    for kind, content in self._events(block, items, status):
                        yield line(kind, **content)
            response = self._finished(choice, items)
            yield line(f"response.{response['status']}", response=response)
        except ApiError as error:
            failed = {**begun, "status": "failed", "error": {"code": "server_error", "message": error.message}}
            yield line("response.failed", response=failed)

    def _events(
        self, block: BlockEvent, items: list[dict[str, Any]], status: str
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of a block, and add its item with ``status`` to ``items`` when it closes."""
        item = self._item(block, status if block.what == "close" else "in_progress")
        place = {"item_id": item["id"], "output_index": block.index}
        name, field = _STREAMED[block.kind]
        inside = {} if block.kind == "call" else {"content_index": 0}
        logprobs = {"logprobs": []} if block.kind == "text" else {}
        if block.what == "open":
            empty = {"content": []} if "content" in item else {"arguments": ""}
            yield "response.output_item.added", {"output_index": block.index, "item": {**item, **empty}}
            if block.kind == "text":
                yield "response.content_part.added", {**place, **inside, "part": _part("text", "")}
        elif block.what == "add":
            yield f"response.{name}.delta", {**place, **inside, "delta": block.text, **logprobs}
        else:
            named = {"name": item["name"]} if block.kind == "call" else {}
            yield f"response.{name}.done", {**place, **inside, field: block.text, **logprobs, **named}
            if block.kind == "text":
                yield "response.content_part.done", {**place, **inside, "part": _part("text", block.text)}
            yield "response.output_item.done", {"output_index": block.index, "item": item}
            items.append(item)

    def _item(self, block: BlockEvent, status: str) -> dict[str, Any]:
        name = f"{self.id}-{block.index}"
        if block.kind == "call":
            call = {"call_id": block.call[0], **self._called[block.call[1]], "arguments": block.text}
            return {"id": f"fc_{name}", "type": "function_call", "status": status, **call}
        content = [_part(block.kind, block.text)]
        if block.kind == "thinking":
            return {"id": f"rs_{name}", "type": "reasoning", "summary": [], "status": status, "content": content}
        return {"id": f"msg_{name}", "type": "message", "status": status, "role": "assistant", "content": content}

    def _finished(self, choice: Choice, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response, and keep its conversation for later ones."""
        if self.request.store is not False:
            calls = [item for item in items if item["type"] == "function_call"]
            broken = [call for call in calls if arguments_of(call["arguments"]) is None]
            whole = [item for item in items if item not in broken]
            answered = ResponsesRequest.model_construct(input=_ITEMS.validate_python(whole))
            messages, said = answered.messages_after(self._conversation), len(self._conversation)
            if self.request.continues and messages[said:]:
                messages[said - 1 : said + 1] = [requests.join_messages(messages[said - 1], messages[said], "")]
            self._kept.keep(self.id, messages)
        return self._response(_status(choice), items, choice)

    def _response(self, status: str, items: list[dict[str, Any]], choice: Choice | None) -> dict[str, Any]:
        request, usage = self.request, None
        if choice is not None:
            usage = {
                "input_tokens": choice.prompt_tokens,
                "input_tokens_details": {"cached_tokens": choice.cached_tokens},
                "output_tokens": choice.new_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},  # they are not counted apart
                "total_tokens": choice.prompt_tokens + choice.new_tokens,
            }
        tool_choice: Any = request.tool_choice or "auto"
        tool_choice = _given(tool_choice) if isinstance(tool_choice, FunctionChoice) else tool_choice
        return {
            **{"id": self.id, "object": "response", "created_at": self.created, "status": status},
            **{"error": None, "incomplete_details": _CUT if status == "incomplete" else None},
            **{"model": self.model, "output": items, "usage": usage},
            **{name: getattr(request, name) for name in ("instructions", "max_output_tokens", "previous_response_id")},
            **{"parallel_tool_calls": request.parallel_tool_calls is not False, "store": request.store is not False},
            **{"temperature": request.temperature, "top_p": request.top_p, "truncation": "disabled"},
            **{"metadata": request.metadata or {}},
            **{"tool_choice": tool_choice, "tools": [_given(tool) for tool in request.tools or ()]},
            **self.warned,
        }


_CUT = {"reason": "max_output_tokens"}
_STREAMED = {  # events of a block, and the field of its last
    "thinking": ("reasoning_text", "text"),
    "text": ("output_text", "text"),
    "call": ("function_call_arguments", "arguments"),
}


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason == "length" else "completed"


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


# ---------------------------------------------------------------------------------------------- routes

router = APIRouter()
_NAMES = {"messages": "input", "response_format": "text", "max_tokens": "max_output_tokens"}
API = api.Api("/v1/responses", router, error_body, names=_NAMES)
_RESPONSE = api.json_object("id", "object", "status", "model", output={"type": "array"})


@router.post("/v1/responses", response_model=None, responses=api.document_answer(_RESPONSE, api.TYPED_EVENTS))
async def create_response(body: ResponsesRequest, request: Request, service: api.Served) -> Response:
    """Answer a conversation, or continue that of an earlier response."""
    kept = request.app.state.conversations
    conversation = body.messages_after(kept.of(body.previous_response_id))
    chat, unknown = api.translate(service, body, conversation)
    return await api.respond(request, chat, unknown + body.warnings, partial(ResponsesFormat, body, conversation, kept))
