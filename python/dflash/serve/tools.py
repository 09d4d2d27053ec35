"""The tools that a request offers: which form their calls have, and what grammar they follow."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..evaluate import render_chat
from ..sampling import Grammar
from .calls import CallText
from .errors import bad_request
from .protocol import ChatRequest, Function, NamedChoice

__all__ = ["ToolForm", "Tools", "find_form", "is_special", "read_tools"]


class ToolForm(NamedTuple):
    """How a model writes a call: ``begin{"name": ..., "arguments": ...}end``.

    Attributes:
        begin: before the JSON object.
        end: after it.
        between: two calls.
    """

    begin: str = ""
    end: str = ""
    between: str = "\n"

    @property
    def mark(self) -> str:
        """What tells a call from text."""
        return self.begin.rstrip()


_CALL = {"type": "function", "function": {"name": "probe", "arguments": {"a": "b"}}}
_PROBE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [_CALL, _CALL]}]
_HERMES = re.compile(r'(<tool_call>\s*)\{"name": "probe", "arguments": \{"a": "b"\}\}(\s*</tool_call>)(\s*)<tool_call>')


def find_form(tokenizer: Any) -> ToolForm | None:
    """Return the form in which a chat template writes calls, if it is Hermes' (Qwen 2.5 and 3, Hermes 3); else None."""
    try:
        found = _HERMES.search(render_chat(tokenizer, _PROBE, False))
    except ValueError:
        return None
    if found is None or is_special(tokenizer, "<tool_call>") or is_special(tokenizer, "</tool_call>"):
        return None
    return ToolForm(*found.groups())


def is_special(tokenizer: Any, mark: str) -> bool:
    """Return True if a mark is a special token, which is no part of an answer's text."""
    return any(token.special and token.content == mark for token in tokenizer.added_tokens_decoder.values())


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
        shown: to the chat template.
        callable: the functions that may be called.
        form: of a call.
        is_forced: the answer must be calls.
        is_single: it has one call at most.
    """

    shown: Sequence[dict[str, Any]]
    callable: Sequence[Function]
    form: ToolForm
    is_forced: bool
    is_single: bool

    def text(self) -> CallText:
        """Return what splits the calls off an answer."""
        return CallText(self.form.mark, self.form.end)

    def rules(self, answer: Grammar | None, unlike: str) -> list[str]:
        """Return the Lark rules of an answer, of which ``body`` is the first.

        Args:
            answer: what text must match instead of calls; None if it is free.
            unlike: a regular expression that no free text may match.
        """
        begin, marked = self.form.begin, self.form.begin.removeprefix(self.form.mark)
        calls = "call" if self.is_single else f"call ({json.dumps(self.form.between)} call)*"
        if self.is_forced:
            rules = [f"body: {calls}"]
        elif answer is not None:
            rules = [f"body: answer | {calls}", f"answer: {answer.rule}"]
        else:
            # A lazy lexeme ends with the first mark, and then a call must follow.
            begin, free = marked, f" & ~/{unlike}/" if unlike else ""
            rules = [
                "body: TEXT | marked call" if self.is_single else "body: (marked call)* TEXT",
                f"marked[lazy]: TEXT {json.dumps(self.form.mark)}",
                f"TEXT: /(?s:.*)/{free}",
            ]
        heads = [begin + f'{{"name": "{function.name}", "arguments": ' for function in self.callable]
        end = json.dumps("}" + self.form.end)
        ways = [f"{json.dumps(head)} arguments_{number} {end}" for number, head in enumerate(heads)]
        schemas = [f"arguments_{number}: {_schema(one).rule}" for number, one in enumerate(self.callable)]
        return [*rules, "call: " + " | ".join(ways), *schemas]


def read_tools(request: ChatRequest, form: ToolForm | None) -> Tools | None:
    """Return the tools of a request; None if none may be called.

    Args:
        request: a chat.
        form: that the chat template has for calls, if one is known.

    Raises:
        ApiError: they contradict each other, a schema cannot be followed, or the template has no form for free calls.
    """
    functions, choice = [tool.function for tool in request.tools or ()], request.tool_choice
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    names = [function.name for function in functions]
    if not names and (named or choice == "required"):
        raise bad_request(f"tool_choice {named or choice!r} needs tools, and there are none", "tool_choice")
    if len({*names}) < len(names):
        raise bad_request(f"each function must have a name of its own, got {', '.join(names)}", "tools")
    if named is not None and named not in names:
        raise bad_request(f"tool_choice names the function {named!r}, and tools has {', '.join(names)}", "tool_choice")
    if not names or choice == "none":
        return None
    is_forced = named is not None or choice == "required"
    if form is None and not is_forced:
        raise bad_request(
            'this server knows no form of free tool calls for this chat template: set tool_choice to "required", to a '
            'function or to "none"',
            "tool_choice" if choice else "tools",
        )
    for number, function in enumerate(functions):
        _check_schema(number, function)
    shown = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in request.tools or ()]
    single = named is not None or request.parallel_tool_calls is False
    callable_ = [function for function in functions if named in (None, function.name)]
    return Tools(shown, callable_, form or ToolForm(), is_forced, single)


def _schema(function: Function) -> Grammar:
    """Return the grammar of a function's arguments, an object."""
    nothing = {"properties": {}, "additionalProperties": False}
    return Grammar.json_schema({"type": "object"} | (nothing if function.parameters is None else function.parameters))


def _check_schema(number: int, function: Function) -> None:
    try:
        if (function.parameters or {}).get("type", "object") != "object":
            raise ValueError('"type" must be "object"')
        _schema(function)
    except (ValueError, TypeError) as error:
        raise bad_request(f"tools.{number}.function.parameters: {error}", "tools") from error
