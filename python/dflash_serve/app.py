"""The server: the APIs that it has, what is refused before a request is read, and its run to an orderly end."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
import logging
import math
import re
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash.light import terminal

from . import anthropic, ollama, openai, openai_responses, receipts
from .api import Api, Served
from .connections import BACKLOG, connections_of_server
from .log import request_id
from .requests import ApiError, bad_request
from .service import Service

# The last has all other paths: their errors are OpenAI's too.
APIS = (openai_responses.API, anthropic.API, ollama.API, receipts.API, openai.API)

_VERSIONED = [route.path for api in APIS for route in api.router.routes if route.path.startswith("/v1/")]
_SHORT = tuple({path.partition("/{")[0].removeprefix("/v1") for path in _VERSIONED})  # also served without /v1
# Of a request: ids of a context of 2 million tokens, or a few pictures for which a text will stand.
_MAX_BODY_BYTES = 16 * 2**20
_MAX_PICTURES_BYTES = 64 * 2**20  # of a body, where pictures are taken
_MAX_REASON = 500  # characters of an error in the log
_BODY_SECONDS = 30.0  # to send a body
_AFTER_GRACE = 5.0  # seconds for streams to send their last event
_LOAD_SECONDS = 10  # between two lines of the log about all answers
_REQUEST_ID = re.compile("[A-Za-z0-9._:/+=-]{1,128}")
_OPEN = re.compile("/health|/|/page/.*")  # paths without a key
_SURROGATE = re.compile("[\ud800-\udfff]")
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


# ---------------------------------------------------------------------------------------------- the application


def build_app(service: Service, keys: Sequence[str] = (), origins: Sequence[str] = ()) -> ASGIApp:
    """Return the application that serves ``service``. Clients must send one of ``keys``, if there are any.

    Pages of ``origins`` may use it from a browser; ``"*"`` is any.
    """
    # The pages with FastAPI's own documentation load scripts of other hosts.
    app = FastAPI(title="dflash", version=service.version, docs_url=None, redoc_url=None, responses=openai.ERRORS)
    app.state.service, app.state.conversations = service, openai_responses.Conversations()
    for included in (*(api.router for api in APIS), router):
        app.include_router(included)
    most = _MAX_BODY_BYTES if service.reader.pictures is None else _MAX_PICTURES_BYTES
    app.add_middleware(_Guard, keys=keys, most=most)

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
    return CORSMiddleware(app, **taken, expose_headers=["X-DFlash-Warnings", "X-Request-Id"])


def _refuse(error: ApiError, method: str, path: str) -> Response:
    """Return an error as a response of the path's API, and log why."""
    api, param = _api_of(path), error.param or ""
    if name := api.names.get(param):
        message = name + error.message.removeprefix(param) if error.message.startswith(param) else error.message
        error = dataclasses.replace(error, message=message, param=name)
    reason = terminal.printable(error.message[:_MAX_REASON])
    _LOG.info("%d %s %s: %s", error.status, terminal.named(method), terminal.named(path), reason)
    content = json.dumps(api.error_body(error))  # ASCII: an unknown field's name may be half a character
    return Response(content, error.status, error.headers, media_type="application/json")


def _refusal(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        message = f"{error.detail}: {request.method} {request.url.path}; /openapi.json lists what this server has"
        if "embed" in request.url.path:
            message = "this server has no embeddings: its model writes text; serve an embedding model elsewhere"
        return ApiError(error.status_code, message, headers=dict(error.headers or {}))
    if not isinstance(error, RequestValidationError):
        return ApiError(500, "the server made a mistake; its log has the traceback")
    # The first mistake that pydantic found; of a union's, the one that came furthest.
    found = max(error.errors(), key=lambda mistake: len(mistake["loc"]))
    place = [str(part) for part in found["loc"][1:]]
    if found["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {found['ctx']['error']}")
    if not place and found["type"] != "pairs":
        return bad_request("the body must be a JSON object, sent with the header Content-Type: application/json")
    code = "unsupported_parameter" if found["type"] == "unsupported" else None
    return bad_request(f"{'.'.join(place) or 'the body'}: {found['msg']}", place[0] if place else None, code)


def _whole_path(path: str) -> str:
    return f"/v1{path}" if path in _SHORT or path.startswith(tuple(f"{short}/" for short in _SHORT)) else path


def _api_of(path: str) -> Api:
    return next(api for api in APIS if path.startswith(api.prefix))


class _Guard:
    """Checks key and host, and reads the body, of ``most`` bytes, before the application sees the request.

    It also gives the request the id that the log has and the client gets, by default the client's own.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], most: int) -> None:
        self._app, self._most = app, most
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, method = dict(scope["headers"]), scope["method"]
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id.set(given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8))
        send = _tagged(send, request_id.get())
        path = _whole_path(scope["path"])
        # uvicorn leaves the body of an answer to HEAD out.
        scope = {**scope, "path": path, "method": "GET" if method == "HEAD" else method}
        if _api_of(path).assumes_json and b"origin" not in headers:
            scope["headers"] = [*{**headers, b"content-type": b"application/json"}.items()]
        try:
            self._check(scope, headers)
            body = await asyncio.wait_for(_read_body(headers, receive, self._most), _BODY_SECONDS)
            _check_values(body or b"")
        except (asyncio.TimeoutError, ApiError) as error:
            late = ApiError(408, f"the request's body did not arrive within {_BODY_SECONDS:g} s", code="timeout")
            refusal = error if isinstance(error, ApiError) else late
            await _refuse(refusal, method, path)(scope, receive, send)
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
        if self._keys:
            scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
            given = bearer if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
            matches = [hmac.compare_digest(given, key) for key in self._keys]  # of all, which takes equally long
            if not _OPEN.fullmatch(scope["path"]) and not any(matches):
                message = "this server needs its key: send the header Authorization: Bearer KEY, or x-api-key: KEY"
                raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            return
        address, host = (scope.get("server") or ("",))[0], headers.get(b"host", b"").decode("latin-1")
        name = re.sub(r":\d*$", "", host)
        if name and _LOOPBACK.fullmatch(address) and not _LOOPBACK.fullmatch(name):
            message = f"without a key this server answers to localhost only, not to {host!r}: start it with --api-key"
            raise ApiError(403, message, code="host_not_allowed")


def _tagged(send: Send, request: str) -> Send:
    """Return ``send`` with the id of the request in the answer's header."""

    async def tagged(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request.encode())]}
        await send(message)

    return tagged


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


def _check_values(body: bytes) -> None:
    """Refuse values of a JSON body that no answer could repeat, by their field."""
    try:
        rest = [("the body", json.loads(body))]
    except (ValueError, RecursionError):
        return  # the application says why
    while rest:
        field, value = rest.pop()
        if isinstance(value, dict):
            rest += [(field if field != "the body" else key, part) for key in value for part in (key, value[key])]
        elif isinstance(value, list):
            rest += [(field, part) for part in value if isinstance(part, (str, float, list, dict))]
        elif isinstance(value, str) and (half := _SURROGATE.search(value)):
            raise bad_request(f"{field}: text must be Unicode, got half of a character, \\u{ord(half[0]):x}", field)
        elif isinstance(value, float) and not math.isfinite(value):
            raise bad_request(f"{field}: numbers must be finite and fit in 64 bits, got {value}", field)


# ---------------------------------------------------------------------------------------------- the server's own routes


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
        self, service: Service, *, keys: Sequence[str] = (), grace: float = 30.0, origins: Sequence[str] = ()
    ) -> None:
        app, end = build_app(service, keys, origins), int(grace + _AFTER_GRACE) + 1
        quiet: dict[str, Any] = {"log_config": None, "access_log": False, "server_header": False}  # answers are logged
        own: dict[str, Any] = {"http": connections_of_server(), "backlog": BACKLOG, "ws": "none", "lifespan": "off"}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=end, **own, **quiet))
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
