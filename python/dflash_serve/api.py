"""What the server's APIs share: what one consists of, how it writes an answer, and how its routes respond."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

from anyio import to_thread
from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from .connections import FILLER
from .requests import ApiError, GenerationRequest
from .service import Completion, Service

CLIENT_GONE = 499  # as nginx logs it; nobody reads it
_PING_SECONDS = 10.0  # proxies end a stream after 30 to 60 s of silence
_FILLERS = {"text/event-stream": b":\n\n", "application/x-ndjson": b" "}  # a comment, and a space before an object
_MAX_HEADER = 2048  # bytes of warnings; servers and proxies refuse headers of 4 or 8 KB


class Api(NamedTuple):
    """One API of the server: an entry of ``APIS`` in app.py.

    Attributes:
        prefix: of its paths. A path is of the first API whose prefix it has.
        router: its routes.
        error_body: returns an error as the API writes it.
        assumes_json: read bodies as JSON whatever type they have, unless a page of a site sends them.
        names: its names of fields that OpenAI's chats call otherwise, for errors.
    """

    prefix: str
    router: APIRouter
    error_body: Callable[[ApiError], dict[str, Any]]
    assumes_json: bool = False
    names: Mapping[str, str] = MappingProxyType({})


# ---------------------------------------------------------------------------------------------- the OpenAPI document

MAYBE, COUNT = {"type": ["string", "null"]}, {"type": "integer", "minimum": 0}
TYPED_EVENTS = {"description": "With stream=true: events of the API, each with its type; the last may be an error."}


def json_object(*texts: str, **others: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with these fields: ``texts``, and ``others`` with their schemas."""
    properties = {name: {"type": "string"} for name in texts} | others
    return {"type": "object", "properties": properties, "required": [*properties]}


def _documented(description: str, **contents: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": schema} for kind, schema in contents.items()}}


def document_answer(
    whole: dict[str, Any], stream: dict[str, Any], *, kind: str = "text/event-stream", what: str = "The answer."
) -> dict[int | str, dict[str, Any]]:
    """Document a route's answer: the schemas of the whole and of its ``stream``, which has the media type ``kind``."""
    return {200: _documented(what, **{"application/json": whole, kind: stream})}


def document_errors(*texts: str, **others: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Document the errors of an API by the fields of their body, as `json_object` takes them.

    FastAPI's own 422 is never sent.
    """
    body = {"application/json": json_object(*texts, **others)}
    failed = "The answer failed, took too long, or the server is about to end."
    return {"4XX": _documented("The request cannot be served.", **body), "5XX": _documented(failed, **body)}


# ---------------------------------------------------------------------------------------------- answers


def event_line(content: dict[str, Any] | str) -> str:
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n"


def typed_event(kind: str, **content: Any) -> str:
    """Return an event of the APIs whose events have a ``type``."""
    return f"event: {kind}\n{event_line({'type': kind, **content})}"


class AnswerFormat(ABC):
    """Writes the answer to one request of so many ``prompts``, whole or as a stream.

    Attributes:
        prefix: of its id.
        ping: what a stream has every 10 seconds in which nothing is written, as in a queue; "" for nothing.
        warned: the field with the warnings, if there are any.
    """

    prefix: str
    media_type = "text/event-stream"
    ping = ": ping\n\n"  # a comment

    def __init__(self, model: str, fingerprint: str, prompts: int = 1, warnings: Sequence[str] = ()) -> None:
        self.id, self.created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())
        self.model, self.fingerprint, self.prompts = model, fingerprint, prompts
        self.warned = {"warnings": warnings} if warnings else {}

    @abstractmethod
    def whole(self, completion: Completion) -> dict[str, Any]:
        """Return the answer to a request without ``stream``."""

    @abstractmethod
    def lines(self, body: GenerationRequest, completion: Completion) -> AsyncIterator[str]:
        """Yield the lines of a stream. An error after its beginning is a line too."""


# ---------------------------------------------------------------------------------------------- responses


async def _service(request: Request) -> Service:  # a plain function would run in a thread
    return request.app.state.service


Served = Annotated[Service, Depends(_service)]


def translate(service: Service, body: Any, *arguments: Any) -> tuple[GenerationRequest, list[str]]:
    """Return a request of another API as one of OpenAI's, by ``body.chat(*arguments)``, and its warnings."""
    warnings = service.check_fields(body)
    try:
        return body.chat(*arguments), warnings
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error


async def respond(
    request: Request, body: GenerationRequest, warnings: Sequence[str], kind: Callable[..., AnswerFormat]
) -> Response:
    """Answer a request. ``warnings`` are those of the request that ``body`` was made of."""
    service: Service = request.app.state.service
    choices = await to_thread.run_sync(service.read, body, warnings)
    warnings = choices[-1].warnings  # of all prompts
    form = kind(service.name_of(body.model), service.fingerprint, len(choices) // (body.n or 1), warnings)
    shown = [*warnings]
    while len(json.dumps(shown)) > _MAX_HEADER:
        shown.pop()
    headers = {"X-DFlash-Warnings": json.dumps(shown)} if warnings else {}
    completion = Completion(service, choices, form.id)
    if body.stream:
        headers |= {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        lines = _with_pings(form.lines(body, completion), form.ping)
        return _Stream(completion, lines, media_type=form.media_type, headers=headers)
    try:
        is_finished = await unless_gone(request, completion.finish())
    finally:
        completion.end()
    if not is_finished:
        return Response(status_code=CLIENT_GONE)
    return JSONResponse(form.whole(completion), headers=headers)


async def unless_gone(request: Request, work: Any) -> bool:
    """Await ``work`` unless the client leaves before; return True if it was done."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()  # raises what it raised
        return task.done()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _with_pings(lines: AsyncIterator[str], ping: str) -> AsyncIterator[str]:
    """Yield ``lines``, and ``ping`` where none comes for a while."""
    waiting: asyncio.Future[str] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(anext(lines))
            done, _ = await asyncio.wait({waiting}, timeout=_PING_SECONDS if ping else None)
            if not done:
                yield ping
                continue
            line, waiting = waiting, None
            try:
                text = line.result()
            except StopAsyncIteration:
                return
            yield text
    finally:
        if waiting is not None:
            waiting.cancel()


class _Stream(StreamingResponse):
    """A stream of events whose rows are freed whatever happens."""

    def __init__(self, completion: Completion, lines: AsyncIterator[str], **options: Any) -> None:
        super().__init__(lines, **options)
        self._completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[FILLER] = _FILLERS[self.media_type]
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.end()
