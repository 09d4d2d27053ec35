"""What is refused before a request is read: a wrong key, another host, a body that is too large or too slow."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from typing import Any

from fastapi import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..limits import MAX_REQUEST_BYTES
from .errors import ApiError

__all__ = ["Guard", "error_response"]

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
