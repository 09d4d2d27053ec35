"""Errors of the server, in OpenAI's shape."""

from __future__ import annotations

from typing import Any

__all__ = ["ApiError", "bad_request"]

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a request is answered with if it cannot be served.

    Args:
        status: of HTTP.
        message: what must hold, what came, what to do.
        param: the field of the request that is wrong.
        code: a name for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    @property
    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that can never be served."""
    return ApiError(400, message, param=param, code=code)
