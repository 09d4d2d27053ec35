"""How models write tool calls: a table of forms, which one a chat template has, a parser, and rules for grammars."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import regex

from dflash import Grammar
from dflash.internals import WRITTEN, open_suffix, written_calls


class ToolForm(NamedTuple):
    """How calls are written: ``begin head NAME mid ARGUMENTS tail between head ... tail end``.

    ``$ID`` stands for a call's number or id, ``$KEY`` for a parameter's name, ``$TYPE`` for its type. Where a form has
    spaces, any are read, or none.

    Attributes:
        values: arguments are a JSON object, or parameters ``key_head KEY key_mid VALUE key_tail``, with ``key_sep``
            between two. Their values are texts as they are and JSON (with ``tags``, parameters of their own), or
            literals of Python or of Gemma.
        types: what ``$TYPE`` says of a text; of other values it says ``"false"`` or JSON's type. ``cdata``: texts may
            stand in ``<![CDATA[`` and ``]]>``.
        sign: part of the source of a template whose calls cannot be rendered.
        is_first: calls come first in an answer, because nothing else tells them from text.
        other: name of a form that such models write too.
    """

    head: str
    mid: str
    tail: str = ""
    begin: str = ""
    between: str = "\n"
    end: str = ""
    key_head: str = ""
    key_mid: str = ""
    key_tail: str = ""
    key_sep: str = ""
    values: Literal["json", "text", "tags", "python", "gemma"] = "json"
    types: Literal["", "true", "string", "cdata"] = ""
    sign: str = "\0"
    is_first: bool = False
    other: str = ""

    @property
    def mark(self) -> str:
        """Text with which calls begin wherever it stands; empty if only the beginning of an answer tells."""
        return "" if self.is_first else regex.split(r"\n|\[?\{|\$", self.begin + self.head)[0].strip()

    def with_id(self, text: str) -> ToolForm:
        """Return the form with a text in the place of ``$ID``. What it is filled with later may hold such words."""
        return self._replace(
            **{name: part.replace("$ID", text) for name, part in self._asdict().items() if name in _PARTS}
        )


_PARTS = ToolForm._fields[:10]  # texts
_OBJECT = ToolForm('{"name": "', '", "arguments": ', "}")


def _invoke(begin: str, end: str, tag: str = "", **fields: Any) -> ToolForm:
    keys = {"key_head": f'<{tag}parameter name="', "key_tail": f"</{tag}parameter>", "key_sep": "\n", "key_mid": '">'}
    form = ToolForm(f'<{tag}invoke name="', '">\n', f"\n</{tag}invoke>", begin + "\n", "\n", "\n" + end, values="text")
    return form._replace(**keys)._replace(**fields)


def _functions(begin: str, end: str, inner: str = "") -> ToolForm:
    form = ToolForm(f"{begin}\n<function=", ">\n", f"\n</function>\n{end}", key_head="<parameter=", values="text")
    return form._replace(key_mid=f">{inner}", key_tail=f"{inner}</parameter>", key_sep="\n")


def _keys(mid: str, mark: str = "") -> ToolForm:
    keys = [f"<{sign}{kind}{mark}>" for kind in ("arg_key", "arg_value", "tool_call") for sign in ("", "/")]
    form = ToolForm(keys[4], mid, f"\n{keys[5]}", key_head=keys[0], key_tail=keys[3], key_sep="\n", values="text")
    return form._replace(key_mid=f"{keys[1]}\n{keys[2]}")


_ACTION = ToolForm('{"tool_call_id": "$ID", "tool_name": "', '", "parameters": ', "}", between=",\n    ")
_DSML = {"types": "true", "key_mid": '" string="$TYPE">'}
_K3_TAG, _K3_END = "<|open|>%s<|sep|>", "<|close|>%s<|sep|>"

# The first whose calls are found in what a template writes is the template's; the last serves all others.
TOOL_FORMS = {
    "qwen3-coder": _functions("<tool_call>", "</tool_call>", "\n"),
    "hermes": ToolForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    "seed": _functions("<seed:tool_call>", "</seed:tool_call>"),
    "glm": _keys("\n"),
    "hunyuan": _keys("<tool_sep:opensource>\n", ":opensource")._replace(
        begin="<tool_calls:opensource>\n", end="\n</tool_calls:opensource>"),
    "minimax": _invoke("<minimax:tool_call>", "</minimax:tool_call>"),
    "minimax-m1": _OBJECT._replace(begin="<tool_calls>\n", end="\n</tool_calls>"),
    "minimax-m3": ToolForm(
        ']<]minimax[>[<invoke name="', '">', "]<]minimax[>[</invoke>", "]<]minimax[>[<tool_call>\n", "\n",
        "\n]<]minimax[>[</tool_call>", "]<]minimax[>[<", ">", "]<]minimax[>[</$KEY>", values="tags"),
    "deepseek": ToolForm(
        "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "",
        "<｜tool▁calls▁end｜>"),
    "deepseek-r1": ToolForm(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>", sign="+ '```json'"),
    "deepseek-v3.2": _invoke("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜", **_DSML),
    "deepseek-v4": _invoke("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", "｜DSML｜", **_DSML),
    "gpt-oss": ToolForm(
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", between="<|start|>assistant",
        sign="<|channel|>commentary", other="gpt-oss-role"),
    "gemma4": ToolForm(
        "<|tool_call>call:", "{", "}<tool_call|>", between="", key_mid=":", key_sep=",", values="gemma"),
    "mistral-nemo": ToolForm(
        '{"name": "', '", "arguments": ', ', "id": "$ID"}', "[TOOL_CALLS][", ", ", "]", other="mistral"),
    "mistral-small": ToolForm("[TOOL_CALLS]", "[CALL_ID]$ID[ARGS]", between="", other="mistral"),
    "mistral": ToolForm("[TOOL_CALLS]", "[ARGS]", between=""),
    "kimi": ToolForm(
        "<|tool_call_begin|>functions.", ":$ID<|tool_call_argument_begin|>", "<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>", sign="<|tool_calls_section_begin|>"),
    "kimi-k3": ToolForm(
        '<|open|>call tool="', '" index="$ID"<|sep|>', _K3_END % "call", _K3_TAG % "tools", "", _K3_END % "tools",
        '<|open|>argument key="', '" type="$TYPE"<|sep|>', _K3_END % "argument", values="text", types="string"),
    "muse": _invoke(
        "to=$ID<|message|><atem:function_calls>", "</atem:function_calls>", "atem:",
        between="\n</atem:function_calls><|eom|><|start|>assistant to=$ID<|message|><atem:function_calls>\n",
        is_first=True),
    "lfm2": ToolForm(
        "", "(", ")", "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", key_mid="=", key_sep=", ", values="python",
        sign="<|tool_list_start|>"),
    "command-r": _ACTION._replace(begin="<|START_ACTION|>[\n    ", end="\n]<|END_ACTION|>"),
    "command-r-plus": ToolForm(
        '{\n        "tool_name": "', '",\n        "parameters": ', "\n    }", "Action:\n```json\n[\n    ", ",\n    ",
        "\n]```"),
    "apertus": ToolForm('{"', '": ', "}", "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    "apriel": _OBJECT._replace(begin="<tool_calls>[", between=", ", end="]</tool_calls>"),
    "nemotron": _OBJECT._replace(begin="<TOOLCALL>[", between=", ", end="]</TOOLCALL>"),
    "gigachat": _OBJECT._replace(begin="function call<|role_sep|>\n"),
    "gigachat-3.1": _OBJECT._replace(begin="<|function_call|>"),
    "granite-3": _OBJECT._replace(begin="<|tool_call|>[", between=", ", end="]", sign="only with <|tool_call|>"),
    "firefunction": _OBJECT._replace(begin=" functools[", between=", ", end="]", sign=" functools["),
    "functionary": ToolForm("<function=", ">", "</function>", between=""),
    "functionary-v3.2": ToolForm("", "\n", between=">>>", sign=">>>all", is_first=True),
    "minicpm": ToolForm(
        '<function name="', '">', "</function>", key_head='<param name="', key_mid='">', key_tail="</param>",
        values="text", types="cdata"),
    "solar": ToolForm(
        "<|tool_call:begin|>$ID<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>", "<|tool_calls|>", ""),
    "llama3": ToolForm('{"name": "', '", "parameters": ', "}", between="; ", other="json"),
    "json": _OBJECT,
}  # fmt: skip


# Of gpt-oss in the header of a message, where its template writes a call's function.
_ROLE = ToolForm("to=functions.", "<|channel|>commentary json<|message|>", is_first=True)
_OTHERS = TOOL_FORMS | {"gpt-oss-role": _ROLE}


def find_tool_form(tokenizer: Any, name: str | None = None) -> ToolForm:
    """Return the form of a tokenizer's template, or the one named, with the spaces that the template writes."""
    source, text = str(tokenizer.chat_template), written_calls(tokenizer)
    forms = TOOL_FORMS if name is None else {name: TOOL_FORMS[name]}
    fitted = (_fitted(form, text) for form in forms.values())
    signed = (form for form in forms.values() if form.sign in source)
    return next(filter(None, itertools.chain(fitted, signed)), [*forms.values()][-1])


# ---------------------------------------------------------------------------------------------- patterns

# Bounded: a pattern is matched again from its start whenever text comes.
_WORDS = {"$ID": r"[\w.:-]{0,256}+", "$TYPE": r"(?P<type>\w{0,256}+)", "$KEY": r"[\w.-]+"}
_KEY = regex.compile(r"[^\n\"'<>=:/(){}\[\],]{1,256}")
_TAGS = regex.compile(r"\]<\]minimax\[>\[<(?P<key>[^/>]+)>(?P<value>.*?)\]<\]minimax\[>\[</\1>", regex.DOTALL)
_GEMMA_KEY = regex.compile(r"([{,]\s*+)([^][{},:]+?)\s*+:")
EMPTY = '""'
ANY_ID = "\udfff"  # half of a character, which no request can hold
QUOTES = {"python": "'", "gemma": '<|"|>'}  # before and after a text
_CDATA = regex.compile(r"<!\[CDATA\[")
# The signs in a value, and one that pieces of a text may cut.
_SIGNS = {
    "json": (regex.compile(r'\\.|["[\]{}]', regex.DOTALL), "\\."),
    "python": (regex.compile(r"\\.|['\"[\](){},]", regex.DOTALL), "\\."),
    "gemma": (regex.compile(r'<\|"\|>|[[\](){},]'), QUOTES["gemma"]),
}


def _pattern(text: str) -> str:
    """Return a pattern of text that takes any spaces where it has some."""
    parts = regex.split(r"(\s+|\$[A-Z]+)", text)
    return "".join(_WORDS.get(part, r"\s*+" if part.isspace() else regex.escape(part)) for part in parts)


def _fitted(form: ToolForm, text: str) -> ToolForm | None:
    """Return a form as it is written in ``text``, which calls a function once or twice; None if it is not there."""
    name, key, value, number = WRITTEN

    def pattern(*fields: str) -> str:
        return "".join(f"(?P<{field}>{_pattern(getattr(form, field))})" for field in fields)

    if form.values == "json":
        arguments = rf'{{\s*+"{key}":\s*+"{value}",\s*+"{number}":\s*+5\s*+}}'
    else:
        quote = r"""(?:['"]|<\|"\|>)?"""
        arguments = f"{pattern('key_head')}{key}{pattern('key_mid')}{quote}{value}{quote}"
        arguments += f"{pattern('key_tail', 'key_sep')}(?:(?!{name}|{value}).)+?5(?:(?!{name}|{value}).)*?"
    again = f"{_pattern(form.head)}{name}(?:(?!{name}).)+{_pattern(form.tail)}"
    call = f"{pattern('begin', 'head')}{name}{pattern('mid')}{arguments}{pattern('tail')}"
    found = regex.search(f"{call}(?:{pattern('between')}{again})?{pattern('end')}", text, regex.DOTALL)
    if found is None:
        return None
    seen = {field: part for field, part in found.groupdict().items() if part is not None and field in form._fields}
    return form._replace(**{field: part for field, part in seen.items() if "$" not in getattr(form, field)})


# ---------------------------------------------------------------------------------------------- calls of an answer


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return JSON's types that a schema allows, as far as it says; empty for any."""
    if not isinstance(schema, dict):
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        kind, _, name = reference.removeprefix("#/").partition("/")
        found = root.get(kind)
        return types_of(found.get(name), {}) if isinstance(found, dict) else set()
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [types_of(part, root) for part in schema[key]]
            return set().union(*found) if all(found) else set()
    if "const" in schema or isinstance(schema.get("enum"), list):
        return {_type(value) for value in schema.get("enum", [schema.get("const")])}
    kinds = schema.get("type", [])
    return {"number" if kind == "integer" else kind for kind in ([kinds] if isinstance(kinds, str) else kinds)}


def _type(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", dict: "object", list: "array", type(None): "null"}
    return kinds.get(type(value), "number")


def _read_value(text: str, values: str, types: set[str]) -> Any:
    """Return the value that a parameter's text stands for: the text itself, unless its types allow what it reads as."""
    plain = text.strip()
    if values == "tags" and (found := _TAGS.findall(plain)):
        pairs = [(key, _read_value(part, values, set())) for key, part in found]
        return [part for _, part in pairs] if {key for key, _ in pairs} == {"item"} else dict(pairs)
    if values == "python":
        plain = plain.replace("\n", "\\n")
    if values == "gemma":
        pieces = plain.split('<|"|>')
        pieces[::2] = [_GEMMA_KEY.sub(lambda key: f"{key[1]}{json.dumps(key[2])}:", part) for part in pieces[::2]]
        pieces[1::2] = [json.dumps(piece) for piece in pieces[1::2]]
        plain = "".join(pieces)
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(plain)
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if values in ("python", "gemma") or not types or _type(value) in types or "string" not in types:
            return value
    return {"true": True, "false": False, "null": None}.get(plain.lower(), text) if types != {"string"} else text


class CallText:
    """Splits calls off an answer's text while it grows.

    Args:
        form: how calls are written. What only looks like one, such as that of an unknown function, stays text.
        functions: the schemas of the arguments, by the functions' names.
        is_forced: nothing but calls is written.

    ``calls`` and pieces of them are as OpenAI's API has them. ``is_whole``: there is a call, and the last is complete.
    """

    def __init__(self, form: ToolForm, functions: Mapping[str, Mapping[str, Any]], is_forced: bool = False) -> None:
        self.forms = [form, *([_OTHERS[form.other]] if form.other else [])]
        self._functions, self._is_forced = functions, is_forced
        keys = {key for schema in functions.values() for key in schema.get("properties") or ()}
        self._keys = tuple(sorted(key for key in keys if not _KEY.fullmatch(key)))
        self._marks = [each.mark for each in self.forms]
        self.calls: list[dict[str, Any]] = []
        self.is_whole = self._is_open = self._is_last = False
        self._held, self._parser = "", self._parse()

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Add text; return what of it is content, and pieces of calls: the first of each has its id and name."""
        self._held, self._is_last = self._held + text, is_last
        self._content: list[str] = []
        self._pieces: list[dict[str, Any]] = []
        next(self._parser)
        if is_last and not self._is_open:
            self._show(len(self._held))
        return "" if self._is_forced else "".join(self._content), self._pieces

    def _show(self, count: int) -> None:
        self._content.append(self._held[:count])
        self._held = self._held[count:]

    def _match(self, pattern: Any) -> Generator[None, None, Any]:
        """Take what a pattern matches, and wait for text that may change this; return None if it cannot match."""
        while found := pattern.match(self._held, partial=True):
            if not found.partial and (self._is_last or found.end() < len(self._held)):
                self._held = self._held[found.end() :]
                return found
            yield
        return None

    def _parse(self) -> Generator[None, None, None]:
        """Take what is held, and yield where more text is needed."""
        is_first, is_after_call = True, False
        while True:
            if (is_first or is_after_call) and not self._held.strip():
                self._held = "" if is_after_call else self._held
                yield
                continue
            # 1. Text, until a call may begin.
            self._held = self._held.lstrip() if is_after_call else self._held
            places = [self._held.find(mark) if mark else -(not is_first) for mark in self._marks]
            is_first = is_after_call = False
            place = min((place for place in places if place >= 0), default=-1)
            if place < 0:
                self._show(len(self._held) - open_suffix(self._held, [*filter(None, self._marks)]))
                yield
                continue
            self._show(place)
            # 2. Calls. If they are none, the mark is text.
            for number, found in enumerate(places):
                self._is_open = bool(self._marks[number])
                if found == place and (yield from self._take_calls(number)):
                    is_after_call = True
                    break
            else:
                self._show(max(len(mark) for mark, found in zip(self._marks, places, strict=True) if found == place))
            self._is_open = False

    def _take_calls(self, number: int) -> Generator[None, None, bool]:
        """Take one section's calls; return False, and take nothing, if there is none."""
        form = self.forms[number]
        first, again, end, parameter = _patterns(form, tuple(self._functions), self._keys)
        found = yield from self._match(first)
        if found is None:
            return False
        while found is not None:
            self._is_open, self.is_whole = True, False
            function = {"name": found["name"], "arguments": ""}
            call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            self.calls.append(call)
            self._pieces.append({"index": len(self.calls) - 1, **call, "function": {**function}})
            if form.values == "json":
                yield from self._take_value("json")
            else:
                yield from self._take_parameters(form, parameter, self._functions[function["name"]])
            self.is_whole = True
            found = yield from self._match(again)
        yield from self._match(end)
        return True

    def _write(self, text: str) -> None:
        """Add text to the last call's arguments. It joins a piece of the call: some clients read only one per chunk."""
        if text:
            self.calls[-1]["function"]["arguments"] += text
            index = len(self.calls) - 1
            if not self._pieces or self._pieces[-1]["index"] != index:
                self._pieces.append({"index": index, "function": {"arguments": ""}})
            self._pieces[-1]["function"]["arguments"] += text

    def _take_value(self, values: str) -> Generator[None, None, str]:
        """Take a JSON object and write it while it grows, or a literal up to the comma or bracket after it; return it.

        Quoted signs belong to it.
        """
        (signs, cut), is_json = _SIGNS[values], values == "json"
        taken, quote, depth = "", "", 0
        while True:
            place, end = 0, None
            for found in signs.finditer(self._held):
                sign, place = found.group(), found.end()
                if quote or sign in ("'", '"', QUOTES["gemma"]):
                    quote = "" if quote == sign else quote or sign
                    continue
                if not depth and sign in ",)]}":
                    end = found.start()
                    break
                depth += (sign in "[({") - (sign in "])}")
                if is_json and not depth:
                    end = place
                    break
            rest = 0 if self._is_last else open_suffix(self._held[place:], [cut])
            count = len(self._held) - rest if end is None else end
            text, self._held = self._held[:count], self._held[count:]
            taken += text
            if is_json:
                self._write(text)
            if end is not None:
                return taken
            yield

    def _take_parameters(self, form: ToolForm, pattern: Any, schema: Mapping[str, Any]) -> Generator[None, None, None]:
        """Take parameters, and write them as a JSON object."""
        properties, before = schema.get("properties") or {}, "{"
        while (found := (yield from self._match(pattern))) is not None and (key := found["key"]):
            self._write(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before, types = ", ", types_of(properties.get(key), schema)
            if found["type"]:
                said = found["type"]
                types = {"string"} if said == form.types else {"number", "boolean", "object", "array", "null"}
            if not form.key_tail:
                literal = yield from self._take_value(form.values)
                self._write(json.dumps(_read_value(literal, form.values, types), ensure_ascii=False))
                continue
            # A text can be shown while it grows, anything else when it is complete.
            tail, is_text = form.key_tail.replace("$KEY", key), types == {"string"}
            if form.types == "cdata" and (yield from self._match(_CDATA)):
                tail = f"]]>{tail}"
            mark, whole = tail.strip(), ""
            self._write('"' * is_text)
            while True:
                text, is_end, rest = self._held.partition(mark)
                if is_end:
                    text = text.removesuffix(tail[: tail.index(mark)])
                else:
                    count = len(text) - open_suffix(text, [tail, mark, *([f"{tail[0]}{mark}"] if tail != mark else [])])
                    text, rest = text[:count], text[count:]
                self._held = rest
                whole += text
                if is_text:
                    self._write(json.dumps(text, ensure_ascii=False)[1:-1])
                if is_end:
                    break
                yield
            self._write('"' if is_text else json.dumps(_read_value(whole, form.values, types), ensure_ascii=False))
        self._write("{}" if before == "{" else "}")


@functools.lru_cache(64)
def _patterns(form: ToolForm, names: Sequence[str], keys: Sequence[str]) -> tuple[Any, ...]:
    """Return patterns: of calls up to the first one's arguments, from these to the next one's, to the end; of a key.

    Arguments must begin, or what follows a name might go on with it. ``keys`` are parameters that `_KEY` does not read.
    """
    known, special = ("|".join(map(regex.escape, sorted(words, key=len, reverse=True))) for words in (names, keys))
    key = rf"{_pattern(form.key_head)}(?P<key>{special}{'|' * bool(special)}{_KEY.pattern})"
    key += _pattern(form.key_mid.rstrip()) + "\n?" * form.key_mid.endswith("\n") + "(?P<type>(?!))?"
    parameter = rf"\s*+(?:{_pattern(form.key_sep)})?\s*+(?:{key}|(?={_pattern(form.tail.lstrip())}))"
    begun = r"\{" if form.values == "json" else parameter
    call = rf"{_pattern(form.head)}\s*+(?P<name>{known}){_pattern(form.mid.rstrip())}\s*+(?={begun})"
    first = rf"\s*+{_pattern(form.begin)}\s*+{call}"
    again = rf"\s*+{_pattern(form.tail)}\s*+(?:{_pattern(form.between)})?{call}"
    end = rf"\s*+{_pattern(form.tail)}\s*+{_pattern(form.end)}"
    return tuple(map(regex.compile, (first, again, end, parameter)))


# ---------------------------------------------------------------------------------------------- grammars


class Rules:
    """Rules of a Lark grammar, in which special tokens stand for themselves and free text has none.

    ``specials`` are the tokenizer's special tokens: text by id.
    """

    def __init__(self, specials: Mapping[str, int]) -> None:
        self.lines = ["ID: /[A-Za-z0-9_.-]{0,64}/"]
        self.specials = specials
        self._split = regex.compile("(" + "|".join(map(regex.escape, [ANY_ID, *specials])) + ")")

    def add(self, name: str, body: str) -> str:
        self.lines.append(f"{name}: {body}")
        return name

    def pieces(self, text: str) -> list[str]:
        """Return what text stands for in a rule, special tokens apart from others."""
        quoted = (piece for piece in self._split.split(text) if piece)
        others = {ANY_ID: "ID"} | {name: f"<[{number}]>" for name, number in self.specials.items()}
        return [others.get(piece, json.dumps(piece, ensure_ascii=False)) for piece in quoted]

    def text(self, text: str) -> str:
        return " ".join(self.pieces(text)) or EMPTY

    def until(self, name: str, text: str, free: str = "/(?s:.*)/") -> str:
        """Add a rule of ``free`` text up to the first ``text``; return its name and the rest of that text."""
        first, *rest = self.pieces(text)
        self.add(name if first.startswith("<[") else f"{name}[lazy]", f"{free} {first}")
        return " ".join([name, *rest])

    def arguments(self, name: str, form: ToolForm, schema: Mapping[str, Any]) -> str:
        """Add the rules of a function's arguments as parameters, in the schema's order; return the first one's name."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        if not properties and schema.get("additionalProperties") is not False:
            heads, value = self._parameter(f"{name}_any", form, "", {}, schema)
            return self.add(name, f"({heads[0]} {value} ({heads[1]} {value})*)?")
        following = ["", ""]  # what comes next, by whether there was a parameter before
        for number, key in reversed([*enumerate(properties)]):
            heads, value = self._parameter(f"{name}_{number}", form, key, properties[key], schema)
            bodies = [f"{head} {value} {following[1]}" for head in heads]
            if key not in required:
                bodies = [f"{body} | {rest or EMPTY}" for body, rest in zip(bodies, following, strict=True)]
            following = [self.add(f"{name}_{number}_{when}", bodies[when]) for when in (0, 1)]
        return self.add(name, following[0] or EMPTY)

    def _parameter(
        self, name: str, form: ToolForm, key: str, schema: Any, root: Mapping[str, Any]
    ) -> tuple[list[str], str]:
        """Return what stands before a parameter's value, first or after another, and the rule of the value.

        The lexer takes the longest text that may come next, so a separator is one piece with what follows it.
        """
        types = types_of(schema, root)
        is_text = not types or "string" in types
        kind = form.types if is_text else "false"
        if form.types == "string" and not is_text:
            kind = sorted(types)[0]
        mid = form.key_mid.replace("$TYPE", kind)
        befores = [before + form.key_head for before in ("", form.key_sep)]
        heads = [self.text(before + key + mid) for before in befores if key]
        heads = heads or [f"{self.text(before)} /[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {self.text(mid)}" for before in befores]
        tail, plain = form.key_tail.replace("$KEY", key), {**schema} if isinstance(schema, dict) else {}
        whole = {name: root[name] for name in ("$defs", "definitions", "x-guidance") if name in root} | plain
        value = Grammar("json_schema", json.dumps(whole)).rule
        choices = plain.get("enum", [plain["const"]] if "const" in plain else None)
        if choices and types == {"string"}:
            quote = QUOTES.get(form.values, "")
            return heads, self.add(name, " | ".join(self.text(f"{quote}{choice}{quote}{tail}") for choice in choices))
        if form.values in QUOTES:
            is_json = types and types <= ({"number", "null", "boolean"} if form.values == "gemma" else {"number"})
            return heads, self.add(name, value) if is_json else self._literal(form.values)
        if is_text:
            return heads, self.until(name, tail)
        return heads, self.add(name, f"{value} {self.text(tail)}")

    def _literal(self, values: str) -> str:
        """Add the rules of any literal once; return the name."""
        if not any(line.startswith("literal:") for line in self.lines):
            names = ("True", "False", "None") if values == "python" else ("true", "false", "null")
            words = " | ".join(map(json.dumps, names))
            sep, key = (", ", "quoted") if values == "python" else (",", "/[A-Za-z0-9_.-]+/")
            text = r"/'([^'\\\n]|\\.)*'/" + r' | /"([^"\\\n]|\\.)*"/'
            if values == "gemma":
                text = f"{self.text(QUOTES[values])} {self.until('rest', QUOTES[values])}"
            colon = '": "' if values == "python" else '":"'
            self.add("quoted", text)
            self.add("literal", f'quoted | /-?[0-9]+(\\.[0-9]+)?/ | {words} | "[" items? "]" | "{{" pairs? "}}"')
            self.add("items", f'literal ("{sep}" literal)*')
            self.add("pairs", f'{key} {colon} literal ("{sep}" {key} {colon} literal)*')
        return "literal"
