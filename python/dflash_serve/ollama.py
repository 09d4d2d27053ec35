"""Ollama's API: its requests as chat or text requests, and answers to these as its records."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timezone
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field, model_validator

from dflash.internals import targets

from . import api, requests
from .answer_text import BlockEvent, BlockWriter, ShownToken, arguments_of
from .openai import chat_logprobs
from .requests import ApiError, ChatRequest, Fields, Number, SamplingFields, Stops, Top, expect, not_applied
from .service import Completion, Service

_VERSION = "0.12.11"  # of Ollama: the first with all that is here; some clients ask for a newer one than ours


def error_body(error: ApiError) -> dict[str, Any]:
    """Return an error as the API writes it."""
    return {"error": error.message}


# ---------------------------------------------------------------------------------------------- requests


class OllamaOptions(SamplingFields):
    """How an answer is written. Options of Ollama's runner are left out as unknown."""

    num_predict: Annotated[int, Number] | None = None
    stop: Stops | None = None


class OllamaRequest(Fields):
    """What both kinds of request have. ``keep_alive``, ``truncate`` and ``shift`` change nothing: the model stays."""

    model: str | None = None
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Top | None = None
    keep_alive: Any = None
    truncate: bool | None = None
    shift: bool | None = None
    store: bool | None = None

    def _fields(self) -> dict[str, Any]:
        """Return what chat and text requests have in common."""
        options = self.options or OllamaOptions()
        fields = {"model": self.model, "stream": self.stream is not False, "stop": options.stop, **options.sampling()}
        fields["max_tokens"] = max(options.num_predict or -1, -1)  # -2 fills the context too
        if self.store is not None:
            fields["store"] = self.store
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            fields["response_format"] = requests.schema_format(schema=self.format)
        return fields

    def _chat(self, messages: Sequence[dict[str, Any]], **more: Any) -> ChatRequest:
        thinks = {"enable_thinking" if isinstance(self.think, bool) else "reasoning_effort": self.think}
        logprobs = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs if self.logprobs else None}
        return ChatRequest.model_validate({**self._fields(), **thinks, **logprobs, "messages": messages, **more})


class OllamaCall(requests.ToolCall):
    """A call as it was answered; its id may be missing."""

    id: str = ""


class OllamaMessage(Fields):
    role: str
    content: str | None = None
    images: list[str] | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChat(OllamaRequest):
    """A request of ``/api/chat``. One without messages asks for the model to be loaded. ``tool_choice`` is ours."""

    messages: list[OllamaMessage] | None = None
    tools: Annotated[list[requests.Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | requests.NamedChoice | None = None

    def chat(self) -> ChatRequest:
        """Return the same as a chat request.

        Raises:
            pydantic.ValidationError: it cannot be one.
        """
        messages, calls = [], list[dict[str, Any]]()  # calls that have no result so far
        ids = (f"{number:09}" for number in itertools.count())  # templates of Mistral take nine letters or digits
        for said in self.messages or ():
            content = _content(said.images, said.content)
            message = {"role": said.role, "content": content, "reasoning_content": said.thinking}
            if said.tool_calls:
                calls = [call.model_dump() for call in said.tool_calls]
                for call in calls:
                    call["id"] = call["id"] or next(ids)
                message["tool_calls"] = [*calls]
            if said.role == "tool":
                # The result is of the call with its id, else with its name, else of the first.
                alike = [
                    (call["id"] == said.tool_call_id, call["function"]["name"] == said.tool_name) for call in calls
                ]
                call = calls.pop(alike.index(max(alike))) if calls else {"id": next(ids)}
                message |= {"tool_call_id": said.tool_call_id or call["id"], "name": said.tool_name}
            messages.append(message)
        last = self.messages[-1] if self.messages else None
        continues = last is not None and last.role == "assistant" and not last.tool_calls
        more = {"tools": self.tools, "tool_choice": self.tool_choice, "continue_final_message": continues}
        return self._chat(messages, **more)


class OllamaGenerate(not_applied(OllamaRequest, context=([],), template=("",))):
    """A request of ``/api/generate``. One without a prompt asks for the model to be loaded."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None

    @model_validator(mode="after")
    def _check_raw(self) -> OllamaGenerate:
        is_written = self.system or self.think or self.images
        expect(not (self.raw and is_written), "raw=true takes the prompt as it is: leave system, think and images out")
        expect(not (self.suffix and is_written), "with a suffix there is no chat: leave system, think and images out")
        return self

    def chat(self) -> ChatRequest | requests.CompletionRequest:
        """Return the same as a chat request, or with ``raw`` or a ``suffix`` as a text request.

        Raises:
            pydantic.ValidationError: it cannot be one.
        """
        if self.raw or self.suffix:
            fields = {
                "prompt": self.prompt,
                "suffix": self.suffix,
                "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            }
            return requests.CompletionRequest.model_validate({**self._fields(), **fields})
        messages = [{"role": "system", "content": self.system}] if self.system else []
        return self._chat([*messages, {"role": "user", "content": _content(self.images, self.prompt)}])


def _content(images: Sequence[str] | None, text: str | None) -> Any:
    """Return the content of a chat's message. Ollama shows pictures, which are base64 of any kind, before the text."""
    pictures = [requests.picture(f"data:image/png;base64,{image}") for image in images or ()]
    return [*pictures, *([{"type": "text", "text": text}] if text else [])] if pictures else text


class ShowRequest(Fields):
    """A request of ``/api/show``; older clients call the model ``name``."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


# ---------------------------------------------------------------------------------------------- answers


def _time(seconds: float | None = None) -> str:
    return datetime.fromtimestamp(time.time() if seconds is None else seconds, timezone.utc).isoformat()


class ChatRecords(api.AnswerFormat):
    """Writes an answer as one record, or as one per step and a last one with its numbers."""

    prefix, media_type, ping = "chatcmpl", "application/x-ndjson", ""

    def whole(self, completion: Completion) -> dict[str, Any]:
        (choice,) = completion.choices
        return self.record(BlockWriter.of(choice.deltas), choice.tokens, **self._end(completion))

    async def lines(self, _body: Any, completion: Completion) -> AsyncIterator[str]:
        (choice,) = completion.choices
        nothing = self._content([])
        try:
            async for blocks in completion.blocks():
                tokens = choice.deltas[-1].tokens
                if tokens or self._content(blocks) != nothing:
                    yield _line(self.record(blocks, tokens, done=False))
            yield _line(self.record([], **self._end(completion)))
        except ApiError as error:
            yield _line(error_body(error))

    def record(self, blocks: Sequence[BlockEvent], tokens: Sequence[ShownToken] = (), **end: Any) -> dict[str, Any]:
        logprobs = {"logprobs": chat_logprobs(tokens)["content"]} if tokens else {}
        return {"model": self.model, "created_at": _time(), **self._content(blocks), **logprobs, **end}

    def _content(self, blocks: Sequence[BlockEvent]) -> dict[str, Any]:
        found, calls = self._texts(blocks, "content"), []
        for block in blocks:
            if (block.what, block.kind) == ("close", "call") and (arguments := arguments_of(block.text)) is not None:
                calls.append({"id": block.call[0], "function": {"name": block.call[1], "arguments": arguments}})
        return {"message": {"role": "assistant", **found, **({"tool_calls": calls} if calls else {})}}

    def _texts(self, blocks: Sequence[BlockEvent], name: str) -> dict[str, str]:
        added = [block for block in blocks if block.what == "add"]
        text, thoughts = ("".join(block.text for block in added if block.kind == kind) for kind in ("text", "thinking"))
        return {name: text, **({"thinking": thoughts} if thoughts else {})}

    def _end(self, completion: Completion) -> dict[str, Any]:
        (choice,), seconds = completion.choices, completion.seconds()
        first = completion.first_token_seconds or seconds
        return {
            **{"done": True, "done_reason": "length" if choice.finish_reason == "length" else "stop"},
            **{"total_duration": int(1e9 * seconds), "load_duration": 0},
            **{"prompt_eval_count": choice.prompt_tokens, "prompt_eval_duration": int(1e9 * first)},
            **{"eval_count": choice.new_tokens, "eval_duration": int(1e9 * (seconds - first))},
            **self.warned,
        }


class GenerateRecords(ChatRecords):
    def _content(self, blocks: Sequence[BlockEvent]) -> dict[str, Any]:
        return self._texts(blocks, "response")


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"


# ---------------------------------------------------------------------------------------------- the model


def _models(service: Service) -> list[dict[str, Any]]:
    """Return the model under each of its names, as ``/api/tags`` and ``/api/ps`` list it."""
    generator, shown = service.scheduler.generator, _show(service)
    target = generator.engine.target
    size = targets.count_weights(target.model)[1]
    found = {
        **{name: shown[name] for name in ("modified_at", "details")},
        **{"digest": hashlib.sha256(service.fingerprint.encode()).hexdigest(), "size": size},
        **{"size_vram": 0 if target.device.type == "cpu" else size, "expires_at": "9999-12-31T23:59:59Z"},
        **{"context_length": generator.max_length},
    }
    names = [name if ":" in name else f"{name}:latest" for name in (service.name, *service.aliases)]
    return [{"name": name, "model": name, **found} for name in names]


def _show(service: Service) -> dict[str, Any]:
    """Describe the model, as ``/api/show`` does."""
    generator, reader = service.scheduler.generator, service.reader
    model = generator.engine.target.model
    config, (count, _) = model.config.get_text_config(), targets.count_weights(model)
    sizes = targets.weight_bytes_per_token(model)  # by format
    family, template = config.model_type, reader.tokenizer.chat_template
    abilities = {"completion": True, "tools": reader.has_template, "insert": reader.fill_form is not None}
    abilities["thinking"] = reader.reasoning is not None
    return {
        "modified_at": _time(service.created),
        "template": template if isinstance(template, str) else "",
        "details": {
            **{"parent_model": "", "family": family, "families": [family]},
            "format": "gguf" if model.name_or_path.endswith(".gguf") else "safetensors",
            "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M",
            "quantization_level": generator.weights or max(sizes, key=sizes.__getitem__),
        },
        "model_info": {
            **{"general.architecture": family, "general.parameter_count": count},
            f"{family}.context_length": generator.max_length,
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.block_count": config.num_hidden_layers,
        },
        "capabilities": [name for name, is_there in abilities.items() if is_there],
    }


# ---------------------------------------------------------------------------------------------- routes

router = APIRouter(responses=api.document_errors("error"))
# It assumes JSON because Ollama's docs call curl so.
API = api.Api("/api/", router, error_body, assumes_json=True, names={"response_format": "format"})
_RECORD = api.json_object("model", "created_at", done={"type": "boolean"})
_LINES = {"description": "Without stream=false: such records, or an error, one per line."}
_RECORDS = api.document_answer(_RECORD, _LINES, kind=ChatRecords.media_type)


@router.post("/api/chat", response_model=None, responses=_RECORDS)
async def ollama_chat(body: OllamaChat, request: Request, service: api.Served) -> Response:
    """Answer a conversation, as Ollama does."""
    if not body.messages:
        return _loaded(service, body, ChatRecords)
    return await api.respond(request, *api.translate(service, body), ChatRecords)


@router.post("/api/generate", response_model=None, responses=_RECORDS)
async def ollama_generate(body: OllamaGenerate, request: Request, service: api.Served) -> Response:
    """Answer a prompt, as Ollama does; with ``raw``, continue it."""
    if not body.prompt:
        return _loaded(service, body, GenerateRecords)
    return await api.respond(request, *api.translate(service, body), GenerateRecords)


def _loaded(service: Service, body: OllamaRequest, kind: type[ChatRecords]) -> Response:
    """Answer a request that asks for the model to be loaded, which it is."""
    service.check_fields(body)
    form = kind(service.name_of(body.model), service.fingerprint)
    return JSONResponse(form.record([], done=True, done_reason="load"))


@router.get("/api/tags")
@router.get("/api/ps")
async def ollama_models(service: api.Served) -> dict[str, Any]:
    """List the model under each of its names, as Ollama does."""
    return {"models": _models(service)}


@router.post("/api/show")
async def ollama_show(body: ShowRequest, service: api.Served) -> dict[str, Any]:
    """Describe the model, as Ollama does."""
    service.check_fields(body)
    service.name_of(body.model or body.name)
    return _show(service)


@router.get("/api/version")
async def ollama_version() -> dict[str, str]:
    """Return the version of Ollama whose API this is."""
    return {"version": _VERSION}
