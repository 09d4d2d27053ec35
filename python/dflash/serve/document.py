"""Responses as the OpenAPI document shows them. Requests are described by their models."""

from __future__ import annotations

from typing import Any

__all__ = ["ERRORS", "documented"]


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
