"""The server: its routes, what is refused before a request is read, and its run to an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from anyio import to_thread
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash.internals import terminal

from . import ollama, requests
from .anthropic import CountRequest, MessagesFormat, MessagesRequest, error_body
from .openai import ChatFormat, Format, TextFormat
from .openai_responses import Conversations, ResponsesFormat, ResponsesRequest
from .requests import ApiError, ChatRequest, CompletionRequest, GenerationRequest, bad_request
from .service import Completion, Service, refusal_of

_CLIENT_GONE = 499  # as nginx logs it; nobody reads it
# Of a request: 128 bytes per token of a context of 32,768, and ids of one of 500,000.
_MAX_BODY_BYTES = 4 * 2**20
_MAX_PICTURES_BYTES = 64 * 2**20  # of a body, where pictures are taken
_MAX_HEADER = 2048  # bytes of warnings; servers and proxies refuse headers of 4 or 8 KB
_MAX_REASON = 500  # characters of an error in the log
_BODY_SECONDS = 30.0  # to send a body
_AFTER_GRACE = 5.0  # seconds for streams to send their last event
_LOAD_SECONDS = 10  # between two lines of the log about all answers
_OPEN = re.compile("/health|/|/page/.*")  # paths without a key
# Also served without /v1
_SHORT = re.compile("/(chat/completions|completions|messages|models|receipts|responses)(/.*)?")
_LOOPBACK = re.compile(r"127(\.\d{1,3}){3}|\[?::1\]?|localhost", re.IGNORECASE)
_PAGE = Path(__file__).with_name("page")
_PAGE_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_PAGE_FILES = {str(path.relative_to(_PAGE)): path for path in _PAGE.rglob("*") if path.suffix in _PAGE_TYPES}
# The page makes safe what a model writes; this keeps it from running or loading anything, should that fail.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
    ),
    "Cache-Control": "no-cache",  # its files are of one version
    "X-Content-Type-Options": "nosniff",
}

_LOG = logging.getLogger(__name__)

router = APIRouter()


# ---------------------------------------------------------------------------------------------- the OpenAPI document


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def _documented(description: str, **contents: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {kind: {"schema": schema} for kind, schema in contents.items()}}


_TEXT, _MAYBE, _COUNT = {"type": "string"}, {"type": ["string", "null"]}, {"type": "integer", "minimum": 0}


def _errors(**properties: Any) -> dict[int | str, dict[str, Any]]:  # FastAPI's own 422 is never sent
    body = {"application/json": _object(**properties)}
    failed = "The answer failed, took too long, or the server is about to end."
    return {"4XX": _documented("The request cannot be served.", **body), "5XX": _documented(failed, **body)}


_ERRORS = _errors(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE, code=_MAYBE))
_CHOICE = _object(index=_COUNT, finish_reason=_TEXT, logprobs={"type": ["object", "null"]})
_USAGE = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_CHOICES = {"type": "array", "minItems": 1, "items": _CHOICE}
_WHOLE = _object(id=_TEXT, object=_TEXT, created=_COUNT, model=_TEXT, choices=_CHOICES, usage=_USAGE)
# No type: some readers of the document take it for that of the stream, others for that of each event.
_EVENTS = {"description": "With stream=true: chunks or an error, then [DONE]."}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: _documented("The answers.", **{"application/json": _WHOLE, "text/event-stream": _EVENTS})
}
_TYPED_EVENTS = {"description": "With stream=true: events of the API, each with its type; the last may be an error."}
_RESPONSE = _object(id=_TEXT, object=_TEXT, status=_TEXT, model=_TEXT, output={"type": "array"})
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: _documented("The answer.", **{"application/json": _RESPONSE, "text/event-stream": _TYPED_EVENTS})
}
_MESSAGE = _object(id=_TEXT, type=_TEXT, role=_TEXT, model=_TEXT, content={"type": "array"}, stop_reason=_MAYBE)
_REFUSED_MESSAGES = _errors(type=_TEXT, error=_object(type=_TEXT, message=_TEXT))
_MESSAGES: dict[int | str, dict[str, Any]] = {
    200: _documented("The answer.", **{"application/json": _MESSAGE, "text/event-stream": _TYPED_EVENTS}),
    **_REFUSED_MESSAGES,
}
_REFUSED_BY_OLLAMA = _errors(error=_TEXT)
_RECORD = _object(model=_TEXT, created_at=_TEXT, done={"type": "boolean"})
_LINES = {"description": "Without stream=false: such records, or an error, one per line."}
_RECORDS: dict[int | str, dict[str, Any]] = {
    200: _documented("The answer.", **{"application/json": _RECORD, "application/x-ndjson": _LINES}),
    **_REFUSED_BY_OLLAMA,
}


# ---------------------------------------------------------------------------------------------- the application


def build_app(service: Service, api_key: str | None = None, origins: Sequence[str] = ()) -> ASGIApp:
    """Return the application that serves ``service``. Clients must send ``api_key``, if there is one.

    Pages of ``origins`` may use it from a browser; ``"*"`` is any.
    """
    # The pages with FastAPI's own documentation load scripts of other hosts.
    app = FastAPI(title="dflash", version=service.version, docs_url=None, redoc_url=None, responses=_ERRORS)
    app.state.service, app.state.conversations = service, Conversations()
    app.include_router(router)
    most = _MAX_BODY_BYTES if service.pictures is None else _MAX_PICTURES_BYTES
    app.add_middleware(_Guard, api_key=api_key, most=most)

    async def refuse(request: Request, error: Exception) -> Response:
        refusal = _refusal(request, error)
        if refusal.status < 500:
            service.metrics.requests.labels("refused").inc()
        elif refusal is not error:  # an ApiError is counted where its completion ends
            service.metrics.requests.labels("failed").inc()
        return _refuse(refusal, request.method, _whole_path(request.url.path))

    for kind in (ApiError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, refuse)
    if not origins:
        return app
    # Around the application, so that a page can read its status 500 too.
    taken: dict[str, Any] = {"allow_origins": origins, "allow_methods": ["*"], "allow_headers": ["*"]}
    return CORSMiddleware(app, **taken, expose_headers=["X-DFlash-Warnings"])


def _refuse(error: ApiError, method: str, path: str) -> Response:
    """Return an error as a response, and log why."""
    _LOG.info(
        "%d %s %s: %s",
        error.status,
        terminal.named(method),
        terminal.named(path),
        terminal.printable(error.message[:_MAX_REASON]),
    )
    bodies = {"/v1/messages": error_body, "/api/": ollama.error_body}
    body = next((body(error) for begin, body in bodies.items() if path.startswith(begin)), error.body)
    content = json.dumps(body)  # in ASCII: the name of an unknown field may be half of a character
    return Response(content, error.status, error.headers, media_type="application/json")


def _refusal(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        message = f"{error.detail}: {request.method} {request.url.path}; /openapi.json lists what this server has"
        return ApiError(error.status_code, message, headers=dict(error.headers or {}))
    if not isinstance(error, RequestValidationError):
        return ApiError(500, "the server made a mistake; its log has the traceback")
    # The first mistake that pydantic found; of a union's, the one that came furthest.
    found = max(error.errors(), key=lambda mistake: len(mistake["loc"]))
    place = [str(part) for part in found["loc"][1:]]
    if found["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {found['ctx']['error']}")
    if not place and found["type"] not in ("pairs", "string_unicode"):
        return bad_request("the body must be a JSON object, sent with the header Content-Type: application/json")
    code = "unsupported_parameter" if found["type"] == "unsupported" else None
    return bad_request(f"{'.'.join(place) or 'the body'}: {found['msg']}", place[0] if place else None, code)


def _whole_path(path: str) -> str:
    return f"/v1{path}" if _SHORT.fullmatch(path) else path


class _Guard:
    """Checks key and host, and reads the body, of ``most`` bytes, before the application sees the request."""

    def __init__(self, app: ASGIApp, api_key: str | None, most: int) -> None:
        self._app, self._most = app, most
        self._expected = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, method = dict(scope["headers"]), scope["method"]
        path = _whole_path(scope["path"])
        # uvicorn leaves the body of an answer to HEAD out.
        scope = {**scope, "path": path, "method": "GET" if method == "HEAD" else method}
        if path.startswith("/api/") and b"origin" not in headers:  # curl as in Ollama's docs, and no page of a site
            scope["headers"] = [*{**headers, b"content-type": b"application/json"}.items()]
        try:
            self._check(scope, headers)
            body = await asyncio.wait_for(_read_body(headers, receive, self._most), _BODY_SECONDS)
        except asyncio.TimeoutError:
            late = ApiError(408, f"the request's body did not arrive within {_BODY_SECONDS:g} s", code="timeout")
            await _refuse(late, method, path)(scope, receive, send)
            return
        except ApiError as error:
            await _refuse(error, method, path)(scope, receive, send)
            return
        if body is None:
            return  # the client has gone
        parts: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return parts.pop() if parts else await receive()

        await self._app(scope, replay, send)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse requests without the key or, if there is none, for another host on this machine's own address.

        A page of any site may give its name this address after it was loaded (DNS rebinding), and then read answers.
        """
        if self._expected is not None:
            scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
            given = bearer if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
            if not _OPEN.fullmatch(scope["path"]) and not hmac.compare_digest(given, self._expected):
                message = "this server needs its key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
                raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            return
        address, host = (scope.get("server") or ("",))[0], headers.get(b"host", b"").decode("latin-1")
        name = re.sub(r":\d*$", "", host)
        if name and _LOOPBACK.fullmatch(address) and not _LOOPBACK.fullmatch(name):
            message = f"without a key this server answers to localhost only, not to {host!r}: start it with --api-key"
            raise ApiError(403, message, code="host_not_allowed")


async def _read_body(headers: dict[bytes, bytes], receive: Receive, most: int) -> bytes | None:
    """Return the body of a request; None if the client leaves."""
    length = headers.get(b"content-length", b"0")
    announced, body = int(length) if length.isdigit() else 0, bytearray()
    while max(announced, len(body)) <= most:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)
    raise ApiError(413, f"a request's body may have {most} bytes, this one has more", code="too_large")


# ---------------------------------------------------------------------------------------------- completions


async def _service(request: Request) -> Service:  # a plain function would run in a thread
    return request.app.state.service


Served = Annotated[Service, Depends(_service)]


@router.post("/v1/chat/completions", response_model=None, responses=_ANSWERS)
async def chat_completions(body: ChatRequest, request: Request, service: Served) -> Response:
    """Answer a conversation."""
    return await _respond(service, request, body, ChatFormat)


@router.post("/v1/completions", response_model=None, responses=_ANSWERS)
async def completions(body: CompletionRequest, request: Request, service: Served) -> Response:
    """Continue texts, or token ids."""
    return await _respond(service, request, body, TextFormat)


@router.post("/v1/messages", response_model=None, responses=_MESSAGES)
async def messages(body: MessagesRequest, request: Request, service: Served) -> Response:
    """Answer a conversation, as Anthropic's API does."""
    return await _respond_translated(service, request, body, MessagesFormat)


@router.post("/v1/messages/count_tokens", responses=_REFUSED_MESSAGES)
async def count_tokens(body: CountRequest, service: Served) -> dict[str, int]:
    """Count the tokens of a conversation."""
    service.check_fields(body)
    with _refusing_body():
        chat = body.chat()
    return {"input_tokens": len(await to_thread.run_sync(service.encode, chat))}


@router.post("/v1/responses", response_model=None, responses=_RESPONSES)
async def create_response(body: ResponsesRequest, request: Request, service: Served) -> Response:
    """Answer a conversation, or continue that of an earlier response."""
    warnings, kept = [*service.check_fields(body), *body.warnings], request.app.state.conversations
    conversation = body.messages_after(kept.of(body.previous_response_id))
    with _refusing_body():
        chat = body.chat(conversation)
    return await _respond(service, request, chat, partial(ResponsesFormat, body, conversation, kept), warnings)


@router.post("/api/chat", response_model=None, responses=_RECORDS)
async def ollama_chat(body: ollama.OllamaChat, request: Request, service: Served) -> Response:
    """Answer a conversation, as Ollama does."""
    if not body.messages:
        return _loaded(service, body, ollama.ChatRecords)
    return await _respond_translated(service, request, body, ollama.ChatRecords)


@router.post("/api/generate", response_model=None, responses=_RECORDS)
async def ollama_generate(body: ollama.OllamaGenerate, request: Request, service: Served) -> Response:
    """Answer a prompt, as Ollama does; with ``raw``, continue it."""
    if not body.prompt:
        return _loaded(service, body, ollama.GenerateRecords)
    return await _respond_translated(service, request, body, ollama.GenerateRecords)


def _loaded(service: Service, body: Any, kind: type[ollama.ChatRecords]) -> Response:
    service.check_fields(body)
    return JSONResponse(kind(service.name_of(body.model), service.fingerprint).empty())


async def _respond_translated(service: Service, request: Request, body: Any, kind: type[Format]) -> Response:
    warnings = service.check_fields(body)
    with _refusing_body():
        translated = body.chat()
    return await _respond(service, request, translated, kind, warnings)


@contextlib.contextmanager
def _refusing_body() -> Iterator[None]:
    """Refuse a body that cannot be made a chat request of."""
    try:
        yield
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error


async def _respond(
    service: Service,
    request: Request,
    body: GenerationRequest,
    kind: Callable[..., Format],
    warnings: Sequence[str] = (),
) -> Response:
    choices = await to_thread.run_sync(service.read, body, warnings)
    warnings = choices[-1].warnings  # of all prompts
    form = kind(service.name_of(body.model), service.fingerprint, len(choices) // (body.n or 1), warnings)
    shown = [*warnings]
    while len(json.dumps(shown)) > _MAX_HEADER:
        shown.pop()
    headers = {"X-DFlash-Warnings": json.dumps(shown)} if warnings else {}
    completion = Completion(service, choices, form.id)
    if body.stream:
        return _Stream(completion, form.lines(body, completion), form.media_type, headers)
    try:
        is_finished = await _unless_gone(request, completion.finish())
    finally:
        completion.end()
    if not is_finished:
        return Response(status_code=_CLIENT_GONE)
    return JSONResponse(form.whole(completion), headers=headers)


async def _unless_gone(request: Request, work: Any) -> bool:
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


class _Stream(StreamingResponse):
    """A stream of events whose rows are freed whatever happens."""

    def __init__(
        self, completion: Completion, lines: AsyncIterator[str], media_type: str, headers: dict[str, str]
    ) -> None:
        headers = {**headers, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(lines, media_type=media_type, headers=headers)
        self._completion = completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._completion.end()


# ---------------------------------------------------------------------------------------------- receipts

Index = Annotated[int, Query(ge=0, lt=2**31, description="Of the answer in `choices`.")]


@router.get("/v1/receipts/{completion}", response_model=None)
async def receipt(completion: str, service: Served, index: Index = 0) -> Response:
    """Return the receipt of an answer, for `dflash verify`."""
    found = await to_thread.run_sync(service.receipts_or_refuse().read, completion, index)
    return Response(found.to_json(), media_type="application/json")


@router.post("/v1/receipts/{completion}/verify", response_model=None)
async def verify_receipt(completion: str, request: Request, service: Served, index: Index = 0) -> Response:
    """Derive every token of an answer again, with the model of this server."""
    receipts = service.receipts_or_refuse()
    found = await to_thread.run_sync(receipts.read, completion, index)
    try:
        check = service.scheduler.run_between_steps(receipts.passes(found))
    except RuntimeError as error:
        raise refusal_of(error) from error
    try:
        is_finished = await _unless_gone(request, asyncio.wait_for(asyncio.wrap_future(check), service.timeout))
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
    return JSONResponse(check.result()) if is_finished else Response(status_code=_CLIENT_GONE)


# ---------------------------------------------------------------------------------------------- the others


@router.get("/v1/models")
async def models(service: Served) -> dict[str, Any]:
    """List the model, under each of its names."""
    return {"object": "list", "data": [await model(name, service) for name in (service.name, *service.aliases)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Served) -> dict[str, Any]:
    """Describe the model."""
    generator = service.scheduler.generator
    return {
        **{"id": service.name_of(name), "object": "model", "created": service.created, "owned_by": "dflash"},
        **{"max_model_len": generator.max_length, "has_drafter": generator.block_size > 1},
        "has_receipts": service.receipts is not None,
    }


@router.get("/api/tags", responses=_REFUSED_BY_OLLAMA)
@router.get("/api/ps", responses=_REFUSED_BY_OLLAMA)
async def ollama_models(service: Served) -> dict[str, Any]:
    """List the model under each of its names, as Ollama does."""
    return {"models": ollama.models(service)}


@router.post("/api/show", responses=_REFUSED_BY_OLLAMA)
async def ollama_show(body: ollama.ShowRequest, service: Served) -> dict[str, Any]:
    """Describe the model, as Ollama does."""
    service.check_fields(body)
    service.name_of(body.model or body.name)
    return ollama.show(service)


@router.get("/api/version", responses=_REFUSED_BY_OLLAMA)
async def ollama_version() -> dict[str, str]:
    """Return the version of Ollama whose API this is."""
    return {"version": ollama.VERSION}


@router.post("/tokenize")
async def tokenize(body: requests.TokenizeRequest, service: Served) -> dict[str, Any]:
    """Return the tokens of a text or of a conversation."""
    ids = await to_thread.run_sync(service.tokenize, body)
    words = service.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    room = service.scheduler.generator.max_length
    return {"count": len(ids), "max_model_len": room, "tokens": ids, "token_strs": words}


@router.post("/detokenize")
async def detokenize(body: requests.DetokenizeRequest, service: Served) -> dict[str, str]:
    """Return the text of tokens."""
    return {"prompt": await to_thread.run_sync(service.detokenize, body)}


@router.get("/version")
async def version(service: Served) -> dict[str, str]:
    """Return this package's version."""
    return {"version": service.version}


@router.get("/health", response_model=None, responses={503: {"description": "The server is about to end."}})
async def health(service: Served) -> Response:
    """Return 200 while requests are taken."""
    return JSONResponse({"status": "ending"}, 503) if service.is_ending else JSONResponse({"status": "ok"})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Served) -> Response:
    """Return the counters for Prometheus."""
    return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)


@router.get("/", response_model=None, include_in_schema=False)
@router.get("/page/{name:path}", response_model=None, include_in_schema=False)
async def page(name: str = "index.html") -> Response:
    """Return the chat page, or a file that it loads."""
    if (path := _PAGE_FILES.get(name)) is None:
        raise HTTPException(404, "Not Found")
    return FileResponse(path, media_type=_PAGE_TYPES[path.suffix], headers=_PAGE_HEADERS)


# ---------------------------------------------------------------------------------------------- the server


class Server(uvicorn.Server):
    """A server whose answers may still take ``grace`` seconds at its end; then their streams end in an error."""

    def __init__(
        self, service: Service, *, api_key: str | None = None, grace: float = 30.0, origins: Sequence[str] = ()
    ) -> None:
        app, end = build_app(service, api_key, origins), int(grace + _AFTER_GRACE) + 1
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}  # answers are logged
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=end, lifespan="off", **quiet))
        self._service, self._grace = service, grace
        self._written = 0  # tokens, when the log last told of them

    async def on_tick(self, counter: int) -> bool:
        """Log what is being done, while there is any: uvicorn calls it ten times per second."""
        if counter % (10 * _LOAD_SECONDS) == 0:
            scheduler, written = self._service.scheduler, self._service.metrics.fresh_tokens
            if scheduler.running or written > self._written:
                speed = (written - self._written) / _LOAD_SECONDS
                _LOG.info("%d running, %d waiting: %.0f tokens/s", scheduler.running, scheduler.waiting, speed)
            self._written = written
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, let answers finish, end the others, and stop the scheduler.

        A second Ctrl-C ends them at once.
        """
        self._service.is_ending = True
        if count := self._service.scheduler.running + self._service.scheduler.waiting:
            _LOG.info("ending: %d answers may take %g s more; a second Ctrl-C ends them", count, self._grace)
        closing = asyncio.ensure_future(self._close())
        await super().shutdown(sockets)
        await closing

    async def _close(self) -> None:
        scheduler, until = self._service.scheduler, time.monotonic() + self._grace
        finished = asyncio.ensure_future(asyncio.to_thread(scheduler.close))
        while not (finished.done() or self.force_exit or time.monotonic() > until):
            await asyncio.sleep(0.05)
        await asyncio.to_thread(scheduler.close, drain=False)
        await finished
