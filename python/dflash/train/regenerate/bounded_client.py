"""An HTTP client for the ``openai`` package that bounds each request's time and each answer's size."""

from __future__ import annotations

import importlib
from typing import Any

from ...limits import MAX_ANSWER_BYTES

__all__ = ["bounded_client"]

_RETRY_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")  # what openai's client obeys


def bounded_client(openai: Any, seconds: float) -> Any:
    """Return an HTTP client for ``openai.AsyncOpenAI(http_client=...)``.

    A request that takes longer than ``seconds`` from its first to its last byte times out, even if bytes keep coming.
    An answer that is larger than the limit, compressed or a redirect is an ``openai.OpenAIError`` without retries.
    """
    import anyio

    base = openai.DefaultAsyncHttpxClient.__mro__[1]
    http = importlib.import_module(base.__module__.partition(".")[0])  # httpx, or httpx2 in newer versions of openai

    class BoundedClient(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, **options: Any) -> Any:
            request.headers["Accept-Encoding"] = "identity"  # a small compressed answer can fill the memory
            options |= {"stream": True, "follow_redirects": False}
            try:
                with anyio.fail_after(seconds):
                    response = await super().send(request, **options)
                    try:
                        body = await _read_bounded(openai, response)
                    finally:
                        await response.aclose()
            except TimeoutError as error:
                raise http.ReadTimeout(f"no complete answer within {seconds:g} seconds", request=request) from error
            # Other headers could choose a codec for the text.
            headers = {name: response.headers[name] for name in _RETRY_HEADERS if name in response.headers}
            return http.Response(response.status_code, headers=headers, content=body, request=request)

    return BoundedClient()


async def _read_bounded(openai: Any, response: Any) -> bytes:
    """Return the body of an answer."""
    if response.is_redirect:
        raise openai.OpenAIError(
            f"the server redirects to {response.headers.get('location', '')[:200]!r}, which is not followed: if that "
            "server is yours, give its URL"
        )
    if (coding := response.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise openai.OpenAIError(f"the answer is compressed ({coding[:40]!r}), although that was not accepted")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise openai.OpenAIError(f"the answer is larger than {MAX_ANSWER_BYTES // 2**20} MiB")
    return bytes(body)
