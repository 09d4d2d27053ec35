"""Conversations as text. Probes, rendered once per tokenizer, tell in which form its chat template shows messages."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ..files import parse_json
from ..terminal import shortened

# Words of probes: no template has them, and none changes such words.
_TEXT, _NEXT, _ASKED, _NAME, _KEY, _VALUE = "zprobea", "zprobeb", "zprobec", "zname", "zkey", "zvalue"
_DUMPED = re.compile(f"""text['"]: ['"]{_TEXT}|'{_KEY}|\\\\"{_KEY}""")  # a list or an object where text belongs
WRITTEN = (_NAME, _KEY, _VALUE, "zlast")  # of a call: function, key and value of a text, key of the number 5
_NOTHING = {"description": "", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": {"name": _NAME, **_NOTHING}}]


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _called(arguments: Any, count: int = 1) -> dict[str, Any]:
    call = {"type": "function", "id": "zprobe123", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call] * count}


_USER: dict[str, Any] = {"role": "user", "content": _ASKED}
# By form: a message, and the words that must be shown of it.
_PROBES: dict[str, Any] = {
    "string": ({"content": _TEXT}, [_TEXT]),
    "part": ({"content": _parts(_TEXT)}, [_TEXT]),
    "parts": ({"content": _parts(_TEXT, _NEXT)}, [_TEXT, _NEXT]),
    "object": (_called({_KEY: _VALUE}), [_NAME, _KEY, _VALUE]),
    "json": (_called(json.dumps({_KEY: _VALUE})), [_NAME, _KEY, _VALUE]),
}
# By role: what a conversation has before and after a message. The first that the template does not refuse decides.
_PLACES: dict[str, Any] = {
    "system": [([], [_USER]), ([], [])],
    "user": [([], []), ([{"role": "system", "content": _NAME}], [])],
    "assistant": [([_USER], [])],
    "tool": [([_USER, _called({})], []), ([_USER], [])],
    "": [([], []), ([_USER], []), ([], [_USER])],
}


def render_chat(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], asks: bool, template: Mapping[str, Any] | None = None
) -> str:
    """Write messages by the chat template, each in the form in which the template shows it.

    Args:
        tokenizer: transformers'. Of several templates it chooses ``tool_use`` if there are tools, else ``default``.
        messages: with ``role``, ``content`` (a text or text parts) and, of the assistant, ``tool_calls``.
        asks: add the beginning of the next message, the assistant's.
        template: arguments of the template, ``tools`` among them.

    Raises:
        ValueError: there is no template, it refuses these messages, or it would lose a text or a call; or messages or
            tools are not what this text says.
    """
    arguments = dict(template or {})
    tools = arguments.pop("tools", None)
    _check_given(messages, tools)
    try:
        fitted = [_fitted(tokenizer, tools is not None, message) for message in messages]
        if asks:  # an answered turn may drop what was shown when it was asked, such as a system message
            _check_shown(tokenizer, fitted, tools, arguments)
        return _render(tokenizer, fitted, asks, tools, **arguments)
    except ValueError:
        has_calls = any(message.get("tool_calls") for message in messages)
        if tools is not None or not (has_calls and isinstance(tokenizer.chat_template, dict)):
            raise
    return render_chat(tokenizer, messages, asks, {**arguments, "tools": []})  # the template for tools may write calls


def _check_shown(tokenizer: Any, messages: Sequence[Any], tools: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the template loses a text or a call: render once more, with words in their places.

    It may forget earlier turns, a text next to calls, and thoughts. It may not forget what the last message or the
    system says, nor a part of a message.
    """
    marked, words = [], []
    for number, message in enumerate(messages, 1):
        content, calls = message["content"], message.get("tool_calls") or ()
        parts = content if isinstance(content, list) and not calls else ()
        count = len(parts or calls) or bool(content and content.rpartition("</think>")[2].strip())
        found = [f"zword{number}and{i}z" for i in range(count)]
        words.append(found)
        if calls:
            pairs = zip(calls, found, strict=True)
            calls = [{**call, "function": {**call["function"], "name": word}} for call, word in pairs]
            marked.append({**message, "tool_calls": calls})
        elif parts:
            marked.append({**message, "content": _parts(*found)})
        else:
            marked.append({**message, "content": found[0] if found else content})
    try:
        text = _render(tokenizer, marked, True, tools, **arguments)
    except ValueError:  # the template does not take every text
        return
    for number, (message, found) in enumerate(zip(messages, words, strict=True), 1):
        shown = sum(word in text for word in found)
        must_show = number == len(messages) or message["role"] in ("system", "developer") or shown
        if shown < len(found) and must_show:
            what = "a call" if message.get("tool_calls") else "text"
            advice = "leave it out, or correct the model's chat_template.jinja"
            raise ValueError(f"the chat template loses {what} of message {number}: {advice}")


def _check_given(messages: Sequence[Any], tools: Any) -> None:
    """Raise ``ValueError`` for what cannot be shown: parts that are no text, and functions without a name."""
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} must be an object with a role, got {shortened(message)}")
        content = message.get("content")
        for part in [] if content is None or isinstance(content, str) else _listed(content, f"message {number}"):
            is_text = isinstance(part, Mapping) and part.get("type", "text") == "text"
            if not is_text or not isinstance(part.get("text"), str):
                raise ValueError(f"message {number} must be text, or have only parts of text, got {shortened(part)}")
        _check_functions(message.get("tool_calls"), f"tool_calls of message {number}")
    _check_functions(tools, "tools")


def _listed(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{what} must be a list, got {shortened(value)}")
    return value


def _check_functions(value: Any, what: str) -> None:
    for each in [] if value is None else _listed(value, what):
        function = each.get("function") if isinstance(each, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{what} must be objects with a function that has a name, got {shortened(each)}")


def check_template(tokenizer: Any, *roles: str, tools: bool = False) -> None:
    """Raise ``ValueError`` if the chat template, that for ``tools`` too, loses the text of messages of these roles."""
    for has_tools in (False, True)[: 1 + tools]:
        for role in roles:
            _fitted(tokenizer, has_tools, {"role": role, "content": _TEXT})


def written_calls(tokenizer: Any) -> str:
    """Return what the template writes of two calls, or of one if it refuses two, with the words `WRITTEN`; else ""."""
    _, key, value, number = WRITTEN
    for count in (2, 1):
        with contextlib.suppress(ValueError):
            message = _called({key: value, number: 5}, count)
            return render_chat(tokenizer, [_USER, message], False, {"tools": _TOOLS})
    return ""


def _render(tokenizer: Any, messages: Sequence[Any], asks: bool, tools: Any, **arguments: Any) -> str:
    """Render by transformers; if that fails, once more with what some templates need and clients leave out."""
    render = functools.partial(tokenizer.apply_chat_template, add_generation_prompt=asks, tokenize=False)
    try:
        return render(messages, tools=tools, **arguments)
    except Exception as error:  # templates raise their own: a role they do not know, roles that do not alternate
        if type(error).__name__ != "TemplateError":  # raised by the template itself, which may refuse to have no tools
            if tools is None and isinstance(tokenizer.chat_template, dict):
                arguments["chat_template"] = "default"
            tools = [{**tool, "function": _NOTHING | tool["function"]} for tool in tools or ()]
        for blank in ("", _parts("")):
            with contextlib.suppress(Exception):
                return render(_completed(messages, blank), tools=tools, **arguments)
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def _completed(messages: Sequence[Any], blank: Any) -> list[Any]:
    """Return messages with ``blank`` before calls, their ids of nine characters, and the function's name in results."""
    completed, names = [], {}
    for message in messages:
        if calls := message.get("tool_calls"):
            names |= {str(call["id"]): call["function"]["name"] for call in calls if "id" in call}
            calls = [{**call, "id": str(call["id"])[-9:]} if "id" in call else call for call in calls]
            message = {**message, "content": message["content"] or blank, "tool_calls": calls}
        elif (key := str(message.get("tool_call_id"))) in names:
            message = {"name": names[key], **message, "tool_call_id": key[-9:]}
        completed.append(message)
    return completed


# ---------------------------------------------------------------------------------------------- what a template reads

_known: weakref.WeakKeyDictionary[Any, dict[Any, int | None]] = weakref.WeakKeyDictionary()


def _shown(tokenizer: Any, has_tools: bool, role: str, form: str) -> int | None:
    """Return how the template shows a role's message in a form: 2 as it should, 1 as code, 0 not; None: refuses it."""
    if tokenizer.chat_template is None:
        raise ValueError("messages need a chat template, and this tokenizer has none")
    template = tokenizer.get_chat_template(tools=[] if has_tools else None)  # it may be replaced
    known, key = _known.setdefault(tokenizer, {}), (template, has_tools, role, form)
    if key not in known:
        known[key] = _probe(tokenizer, has_tools, role, form)
    return known[key]


def _probe(tokenizer: Any, has_tools: bool, role: str, form: str) -> int | None:
    message, words = _PROBES[form]
    message = {**message, "role": role, **({"tool_call_id": "zprobe123"} if role == "tool" else {})}
    for before, after in _PLACES.get(role, _PLACES[""]):
        with contextlib.suppress(ValueError):
            if role != "user":
                before, after = ([_fitted(tokenizer, has_tools, m) for m in part] for part in (before, after))
            text = _render(tokenizer, [*before, message, *after], False, _TOOLS if has_tools else None)
            is_shown = all(word in text for word in [*words, *[_ASKED] * len(after)])
            return (1 if _DUMPED.search(text) else 2) if is_shown else 0
    return None


def _form(tokenizer: Any, has_tools: bool, role: str, *forms: str) -> str | None:
    """Return the form in which the template shows messages best, any if it refuses all; None if it loses them."""
    shown = {form: _shown(tokenizer, has_tools, role, form) for form in forms}
    best = max(forms, key=lambda form: shown[form] or 0)
    is_text = "string" in forms  # which must not come as code; arguments may
    return best if shown[best] == 2 or (shown[best] and not is_text) or not {0, 1} & {*shown.values()} else None


def _fitted(tokenizer: Any, has_tools: bool, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form that the template shows; raise ``ValueError`` if it would lose text or a call."""
    role, content, calls = message["role"], message.get("content") or "", message.get("tool_calls")
    if not isinstance(content, str) and not (len(content) > 1 and _shown(tokenizer, has_tools, role, "parts") == 2):
        content = "\n".join(part["text"] for part in content)
    if isinstance(content, str):
        form = _form(tokenizer, has_tools, role, "string", "part")
        if form is None and content.strip():
            raise ValueError(
                f"the chat template{' for tools' * has_tools} shows no text of {role} messages, as a string or as "
                "parts: correct the model's chat_template.jinja (tokenizer.chat_template)"
                f"{', or leave these messages out' * (role != 'user')}"
            )
        content = _parts(content) if form == "part" else content
    fitted = {**message, "content": content}
    if calls:
        if (form := _form(tokenizer, has_tools, role, "object", "json")) is None:
            raise ValueError("the chat template does not write tool_calls with their arguments: leave them out")
        fitted["tool_calls"] = [_fitted_call(call, form) for call in calls]
    return fitted


def _fitted_call(call: Mapping[str, Any], form: str) -> dict[str, Any]:
    given, what = call["function"].get("arguments"), "the arguments of a call"
    if given is None or (isinstance(given, str) and given.strip() in ("", "null")):
        given = {}
    if form == "json":
        given = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    elif not isinstance(given := parse_json(given, what) if isinstance(given, str) else given, dict):
        raise ValueError(f"{what} must be an object, got {shortened(given)}")
    return {**call, "function": {**call["function"], "arguments": given}}
