"""Read a server's answer. Nothing in it is trusted: each value is checked before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...files import parse_json
from ...limits import MAX_TOKEN_ID
from ...terminal import printable
from .jobs import Answer

__all__ = ["read_completion"]


def read_completion(body: bytes, where: str, *, raw: bool, token_ids: bool, max_new_tokens: int) -> Answer:
    """Return the answer in a completion of OpenAI's protocol.

    Args:
        body: the HTTP body.
        where: whose answer to which prompt it is, the first words of an error.
        raw: it completes a text, instead of a chat.
        token_ids: the ids were asked for.
        max_new_tokens: what was asked for.

    Raises:
        ValueError: it is not such an answer, or it cannot be trained on.
    """
    # 1. The text
    reply = parse_json(body, where)
    found = _first_choice(reply, raw)
    if found is None:
        raise ValueError(
            f"{where}: not an answer of OpenAI's protocol: {printable(body[:200].decode(errors='replace'))}"
        )
    choice, message = found
    if message.get("reasoning_content") or message.get("reasoning"):
        raise ValueError(
            f"{where} has its thoughts apart from its text, and the drafter needs the text as it was written: start "
            "the server without a reasoning parser"
        )
    text, reason = message.get("text" if raw else "content"), choice.get("finish_reason")
    if not isinstance(text, str) or reason not in ("stop", "length"):
        raise ValueError(f"{where} has finish_reason {reason!r:.60} and content {text!r:.60}")
    # 2. The number of tokens and, if they were asked for, their ids
    num_tokens = _num_tokens(reply.get("usage"), where, max_new_tokens)
    if not token_ids:
        return Answer(text, reason, num_tokens=num_tokens)
    ids = choice.get("token_ids")
    prompt_ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
    for name, found in (("token_ids", ids), ("prompt_token_ids", prompt_ids)):
        _check_ids(found, f"{where}: {name}")
    if len(ids) > max_new_tokens:
        raise ValueError(f"{where} has {len(ids)} token_ids, and at most {max_new_tokens} were asked for")
    return Answer(text, reason, prompt_ids, ids, num_tokens or len(ids))


def _first_choice(reply: Any, raw: bool) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the first choice and what holds its text; None if ``reply`` is something else."""
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice if raw or not isinstance(choice, dict) else choice.get("message")
    return (choice, message) if isinstance(choice, dict) and isinstance(message, dict) else None


def _num_tokens(usage: Any, where: str, most: int) -> int:
    """Return ``usage["completion_tokens"]``; 0 if the server does not tell."""
    if usage is None:
        return 0
    count = usage.get("completion_tokens", 0) if isinstance(usage, Mapping) else usage
    if count is None:
        return 0
    if type(count) is not int or not 0 <= count <= most:
        raise ValueError(
            f"{where}: usage.completion_tokens must be an integer in 0 .. {most}, as many as were asked for at most, "
            f"got {count!r:.60}"
        )
    return count


def _check_ids(ids: Any, where: str) -> None:
    """Raise ``ValueError`` unless ``ids`` is a list of token ids."""
    if ids is None or ids == []:
        raise ValueError(f"{where} was asked for, and is not there (return_token_ids is vLLM's)")
    if not isinstance(ids, list):
        raise ValueError(f"{where} must be a list of integers, got {ids!r:.60}")
    for token in ids:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise ValueError(f"{where} must hold integers in 0 .. {MAX_TOKEN_ID}, got {token!r:.60}")
