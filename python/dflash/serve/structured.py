"""The grammar of an answer, by what a request asks of its form."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ..grammar import Grammar
from .prompts import EncodedPrompt, Tools
from .protocol import GenerationRequest, bad_request, refusing
from .text import CLOSE, OPEN

# They may ban all that a grammar allows.
_CONTRADICTING = ("ignore_eos", "min_tokens", "no_repeat_ngram_size")


_KINDS: dict[str, Callable[[Any], Grammar]] = {
    "json": lambda value: Grammar.json_schema(json.loads(value) if isinstance(value, str) else value),
    "regex": Grammar.regex,
    "grammar": Grammar.lark,
}


def answer_grammar(request: GenerationRequest, prompt: EncodedPrompt, tools: Tools | None) -> Grammar | None:
    """Return what an answer must match, its reasoning included; None if its text is free.

    Raises:
        ApiError: a grammar is invalid, or fields contradict each other.
    """
    field, answer = _asked(request)
    if tools is not None and answer is not None and field != "response_format":
        raise bad_request(f"{field} cannot be combined with tools: set tool_choice to none", field)
    if answer is None and tools is None:
        return None
    for name in _CONTRADICTING:
        if getattr(request, name):
            raise bad_request(f"{name} cannot be combined with {field or 'tools'}: leave one of them out", name)
    if tools is None and answer is not None:
        if not prompt.reasoning:
            return answer
        rules = [f"body: {answer.rule}"]
    elif tools is not None:
        rules = tools.rules(answer, f"[ \\n]{{0,2}}{OPEN}(?s:.*)" if prompt.reasoning == "optional" else "")
    return _lark(prompt, rules, field or "tools")


def _lark(prompt: EncodedPrompt, rules: list[str], field: str) -> Grammar:
    """Return the grammar with these rules, the reasoning before."""
    if prompt.reasoning and prompt.hides_reasoning:
        raise bad_request(f"the tokenizer's {CLOSE} is a special token: {field} cannot follow reasoning", field)
    start = {"": "body", "begun": "thought SPACE body", "optional": "(OPEN thought SPACE)? body"}[prompt.reasoning]
    head = [f"start: {start}"]
    if prompt.reasoning:
        head += [f"thought[lazy]: /(?s:.*)/ {json.dumps(CLOSE)}", "SPACE: /[ \\n]{0,4}/"]
    if prompt.reasoning == "optional":
        head += [f"OPEN: /[ \\n]{{0,2}}{OPEN}/"]
    with refusing(field):
        return Grammar.lark("\n".join([*head, *rules]))


def _asked(request: GenerationRequest) -> tuple[str, Grammar | None]:
    """Return the field that asks for a form, and its grammar."""
    given = [(f"guided_{kind}", kind, getattr(request, f"guided_{kind}")) for kind in _KINDS]
    given += [("structured_outputs", kind, value) for kind, value in (request.structured_outputs or {}).items()]
    if (form := request.response_format) is not None and form.type != "text":
        schema = form.json_schema.schema_ if form.json_schema is not None else None
        given.append(("response_format", "json", {"type": "object"} if schema is None else schema))
    given = [item for item in given if item[2] is not None]
    if len(given) > 1:
        raise bad_request(f"give one of {' and '.join(field for field, _, _ in given)}", given[1][0])
    for field, kind, value in given:
        with refusing(field, f"{field}: "):
            return field, _KINDS[kind](value)
    return "", None
