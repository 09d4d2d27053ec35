"""The server's routes, and what is refused before a request is read."""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..limits import MAX_REQUEST_BYTES
from ..outputs import StreamEvent
from .completion import Answer, Run, refusal_of
from .formats import ChatFormat, CompletionFormat, Format, event_line
from .protocol import ApiError, ChatRequest, CompletionRequest, GenerationRequest, StreamOptions, bad_request
from .service import Service
from .text import Delta


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


_TEXT, _MAYBE, _COUNT = {"type": "string"}, {"type": ["string", "null"]}, {"type": "integer", "minimum": 0}
_ERROR = _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE, code=_MAYBE))
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)


def _response(description: str, **contents: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": schema} for kind, schema in contents.items()}}


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": _response("The request cannot be served.", **{"application/json": _ERROR}),
    "5XX": _response(
        "The answer failed, took too long, or the server is about to end.", **{"application/json": _ERROR}
    ),
}
"""Of every path; FastAPI's own 422 is never sent."""


def documented(kind: str, answer: str) -> dict[int | str, dict[str, Any]]:
    """Describe a response with answers.

    Args:
        kind: its ``object``.
        answer: the field of a choice that holds the answer: a text, or a message.
    """
    message = _object(role={"const": "assistant"}, content=_MAYBE)
    answers = {answer: _TEXT if answer == "text" else message, "logprobs": {"type": ["object", "null"]}}
    choice = _object(index=_COUNT, finish_reason=_TEXT, **answers)
    whole = _object(
        id=_TEXT, object={"const": kind}, created=_COUNT, model=_TEXT, system_fingerprint=_TEXT,
        choices={"type": "array", "minItems": 1, "items": choice}, usage=_USAGE,
    )  # fmt: skip
    events = {"type": "string", "description": "With stream=true: chunks or an error, then [DONE]."}
    return {200: _response("The answers.", **{"application/json": whole, "text/event-stream": events})}


_BODY_SECONDS = 30.0  # to send a body
_OPEN = ("/health", "/")  # paths without a key
_LOOPBACK = re.compile(r"127(\.\d{1,3}){3}|\[?::1\]?|localhost", re.IGNORECASE)


def error_response(error: ApiError) -> Response:
    """Return a response in OpenAI's shape."""
    content = json.dumps(error.body)  # in ASCII: the name of an unknown field may be half of a character
    return Response(content, error.status, error.headers, media_type="application/json")


class Guard:
    """Checks key and host, and reads the body whole before the application sees the request.

    Args:
        app: the application.
        api_key: clients send it as ``Authorization: Bearer KEY``; None asks for none.
    """

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            self._check_host(scope)
            body = await asyncio.wait_for(_read(scope, receive), _BODY_SECONDS)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        except asyncio.TimeoutError:
            late = ApiError(408, f"the request's body did not arrive within {_BODY_SECONDS:g} s", code="timeout")
            await error_response(late)(scope, receive, send)
            return
        if body is None:
            return  # the client has gone
        parts: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return parts.pop() if parts else await receive()

        await self._app(scope, replay, send)

    def _check_key(self, scope: Scope) -> None:
        if self._expected is None or scope["path"] in _OPEN:
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, self._expected):
            raise ApiError(
                401, "this server needs its key: send the header Authorization: Bearer KEY", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    def _check_host(self, scope: Scope) -> None:
        """Refuse requests for another host on this machine's own address, unless there is a key.

        A page of any site may give its name this address after it was loaded (DNS rebinding), and then read what the
        server answers.
        """
        address, host = (scope.get("server") or ("",))[0], dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        name = re.sub(r":\d*$", "", host)
        if self._expected is None and name and _LOOPBACK.fullmatch(address) and not _LOOPBACK.fullmatch(name):
            raise ApiError(
                403, f"without a key this server answers to localhost only, not to {host!r}: start it with --api-key",
                code="host_not_allowed",
            )  # fmt: skip


async def _read(scope: Scope, receive: Receive) -> bytes | None:
    """Return the body of a request; None if the client leaves."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    parts, size = [], int(length) if length.isdigit() else 0
    read = 0
    while max(size, read) <= MAX_REQUEST_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        read += len(parts[-1])
        if not message.get("more_body", False):
            return b"".join(parts)
    raise ApiError(413, f"a request's body may have {MAX_REQUEST_BYTES} bytes, this one has more", code="too_large")


_CLIENT_GONE = 499  # as nginx logs it; nobody reads it

router = APIRouter()


def build_app(service: Service, api_key: str | None = None) -> FastAPI:
    """Return the application.

    Args:
        service: what it serves.
        api_key: asked of clients; None for none.
    """
    # The pages with FastAPI's own documentation load scripts of other hosts.
    app = FastAPI(title="dflash", version=service.version, docs_url=None, redoc_url=None, responses=ERRORS)
    app.state.service = service
    app.include_router(router)
    app.add_middleware(Guard, api_key=api_key)

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> Response:
        if error.status < 500:  # what fails later is counted where its run ends
            service.metrics.requests.labels("refused").inc()
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def refuse_fields(request: Request, error: RequestValidationError) -> Response:
        return await refuse(request, _first(error))

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        message = f"{error.detail}: {request.method} {request.url.path}; /openapi.json lists what this server has"
        return await refuse(request, ApiError(error.status_code, message, headers=headers))

    @app.exception_handler(Exception)
    async def apologize(request: Request, _: Exception) -> Response:
        service.metrics.requests.labels("failed").inc()
        return await refuse(request, ApiError(500, "the server made a mistake; its log has the traceback"))

    return app


def _first(error: RequestValidationError) -> ApiError:
    """Return the first mistake that pydantic found, in what a union takes the one that came furthest."""
    found = max(error.errors(), key=lambda mistake: len(mistake["loc"]))
    place = [str(part) for part in found["loc"][1:]]
    param = next(iter(place), None)
    code = "unsupported_parameter" if found["type"] == "unsupported" else None
    if found["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {found['ctx']['error']}")
    if not place and found["type"] != "pairs":
        return bad_request("the body must be a JSON object, sent with the header Content-Type: application/json")
    return bad_request(f"{'.'.join(place) or 'the body'}: {found['msg']}", param, code)


# ---------------------------------------------------------------------------------------------- completions


@router.post("/v1/chat/completions", response_model=None, responses=documented("chat.completion", "message"))
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation."""
    service = _service(request)
    answers = await to_thread.run_sync(service.read_chat, body)
    return await _respond(request, body, answers, ChatFormat(service.name, service.fingerprint))


@router.post("/v1/completions", response_model=None, responses=documented("text_completion", "text"))
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue texts, or token ids."""
    service = _service(request)
    answers = await to_thread.run_sync(service.read_completion, body)
    prompts = len(answers) // (body.n or 1)
    return await _respond(request, body, answers, CompletionFormat(service.name, service.fingerprint, prompts))


async def _respond(request: Request, body: GenerationRequest, answers: list[Answer], form: Format) -> Response:
    service = _service(request)
    run = service.run(answers, form.id)
    if body.stream:
        return _Stream(service, run, _lines(body, run, form))
    try:
        finished = await _unless_gone(request, _finish(run))
    finally:
        _end(service, run)
    return JSONResponse(form.whole(answers)) if finished else Response(status_code=_CLIENT_GONE)


async def _finish(run: Run) -> None:
    """Read a run to its end."""
    async for _ in run.deltas():
        pass


async def _unless_gone(request: Request, work: Any) -> bool:
    """Await ``work`` unless the client leaves before; return whether it was done."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()  # raises what it raised
        return task.done()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _end(service: Service, run: Run) -> None:
    """Free a run's rows and count it."""
    run.cancel()
    outcome = "completed" if run.is_done else "failed" if run.has_failed else "cancelled"
    service.metrics.ended(run, outcome)


class _Stream(StreamingResponse):
    """A stream of server-sent events whose rows are freed whatever happens."""

    def __init__(self, service: Service, run: Run, lines: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(lines, media_type="text/event-stream", headers=headers)
        self._service, self._run = service, run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            _end(self._service, self._run)


async def _lines(body: GenerationRequest, run: Run, form: Format) -> AsyncIterator[str]:
    """Yield the events of a stream. An error after its beginning is an event too."""
    options = body.stream_options or StreamOptions()

    def line(chunk: dict[str, Any]) -> str:
        if options.continuous_usage_stats:
            chunk |= {"usage": form.usage(run.answers)}
        elif options.include_usage:
            chunk |= {"usage": None}  # as OpenAI does
        return event_line(chunk)

    for index, answer in enumerate(run.answers):
        if (opening := form.opening(index, answer)) is not None:
            yield line(opening)
    try:
        async for index, delta, event in run.deltas():
            answer = run.answers[index]
            if event.prompt_logprobs is not None and (opening := form.opening(index, answer)) is not None:
                yield line(opening)
            drafts = _drafts(answer, delta, event) if options.include_drafts and not answer.is_empty else None
            if any(delta) or drafts is not None:
                yield line(form.chunk(index, delta, None, drafts))
            if (reason := answer.finish_reason) is not None:
                yield line(form.chunk(index, Delta(), reason))
        if options.include_usage:
            yield event_line(form.usage_chunk(run.answers))
    except ApiError as error:
        yield event_line(error.body)
    yield event_line("[DONE]")


def _drafts(answer: Answer, delta: Delta, event: StreamEvent) -> dict[str, int]:
    """Say what of a step was drafted; ``characters`` of its text, counted from the first.

    The bonus token's characters are the last. Where text is held back, they may be those of a token before.
    """
    ids, accepted = event.ids[0], event.accepted[0]
    lengths = [len(answer.call.tokenizer.decode(part, skip_special_tokens=True)) for part in (ids, ids[:accepted])]
    shown = len(delta.reasoning) + len(delta.content)
    return {"tokens": len(ids), "accepted": accepted, "characters": max(0, shown - (lengths[0] - lengths[1]))}


# ---------------------------------------------------------------------------------------------- receipts

Index = Annotated[int, Query(ge=0, lt=2**31, description="Of the answer in `choices`.")]


@router.get("/v1/receipts/{completion}", response_model=None)
async def receipt(completion: str, request: Request, index: Index = 0) -> Response:
    """Return the receipt of an answer, for `dflash verify`."""
    found = await to_thread.run_sync(_service(request).receipts_or_refuse().read, completion, index)
    return Response(found.to_json(), media_type="application/json")


@router.post("/v1/receipts/{completion}/verify", response_model=None)
async def verify_receipt(completion: str, request: Request, index: Index = 0) -> Response:
    """Derive every token of an answer again, with the model of this server."""
    service = _service(request)
    receipts = service.receipts_or_refuse()
    found = await to_thread.run_sync(receipts.read, completion, index)
    try:
        check = service.scheduler.run_between_steps(receipts.passes(found))
    except RuntimeError as error:
        raise refusal_of(error) from error
    try:
        work = asyncio.wait_for(asyncio.wrap_future(check), service.timeout)
        finished = await _unless_gone(request, work)
    except asyncio.CancelledError:
        if service.is_ending:  # the scheduler has dropped it
            raise refusal_of(RuntimeError()) from None
        raise
    except asyncio.TimeoutError:
        raise ApiError(503, f"the check was not ready after {service.timeout:g} s", code="timeout") from None
    except ValueError as error:
        raise bad_request(str(error)) from error
    except (RuntimeError, MemoryError) as error:
        raise ApiError(500, f"the receipt cannot be checked here: {error}", code="engine_error") from error
    return JSONResponse(check.result()) if finished else Response(status_code=_CLIENT_GONE)


# ---------------------------------------------------------------------------------------------- the others


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List the model."""
    return {"object": "list", "data": [_describe(_service(request))]}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """Describe the model."""
    _service(request).check_model(name)
    return _describe(_service(request))


def _describe(service: Service) -> dict[str, Any]:
    length = service.scheduler.generator.max_length
    own = {"id": service.name, "object": "model", "created": service.created, "owned_by": "dflash"}
    return {**own, "max_model_len": length, "has_receipts": service.receipts is not None}


@router.get("/health", response_model=None, responses={503: {"description": "The server is about to end."}})
async def health(request: Request) -> Response:
    """Tell whether requests are taken."""
    is_open = not _service(request).is_ending
    return JSONResponse({"status": "ok" if is_open else "ending"}, 200 if is_open else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return the counters for Prometheus."""
    return Response(_service(request).metrics.page(), media_type=CONTENT_TYPE_LATEST)


# The page shows text of models as text only; this keeps it from loading anything, should that fail.
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@functools.cache
def _page() -> str:
    return Path(__file__).with_name("page.html").read_text(encoding="utf-8")


@router.get("/", response_model=None, include_in_schema=False)
async def page() -> Response:
    """Return the chat page."""
    return Response(_page(), media_type="text/html", headers={"Content-Security-Policy": _PAGE_POLICY})


def _service(request: Request) -> Service:
    return request.app.state.service
