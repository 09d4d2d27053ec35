"""Parts of a request for the model: its prompts, the tools that it offers, and the grammar of its answers."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..evaluate import call_marks, check_template, check_text, render_chat, text_ids
from ..grammar import Grammar
from . import protocol
from .answers import CLOSE, OPEN, CallText
from .protocol import bad_request, refusing


class ToolForm(NamedTuple):
    """How a model writes a call: ``begin{"name": ..., "arguments": ...}end``, and what stands between two calls."""

    begin: str = ""
    end: str = ""
    between: str = "\n"


_MAX_WARNING = 200  # characters; they are a header too


def is_special(tokenizer: Any, mark: str) -> bool:
    """Return True if a mark is a special token, which is not part of an answer's text."""
    return any(token.special and token.content == mark for token in tokenizer.added_tokens_decoder.values())


@dataclass(frozen=True)
class Tools:
    """The tools of a request: those shown to the chat template, and the functions that may be called."""

    shown: Sequence[dict[str, Any]]
    schemas: dict[str, Grammar]  # of the arguments, by the names of the functions that may be called
    form: ToolForm
    is_forced: bool
    is_single: bool

    def text(self) -> CallText:
        return CallText(self.form.begin.rstrip(), self.form.end)

    def rules(self, answer: Grammar | None, unlike: str) -> list[str]:
        """Return the Lark rules of an answer, of which ``body`` is the first.

        ``answer`` is what text must match instead of calls; if that is None, free text may not match ``unlike``.
        """
        begin, mark = self.form.begin, self.form.begin.rstrip()
        calls = "call" if self.is_single else f"call ({json.dumps(self.form.between)} call)*"
        if self.is_forced:
            rules = [f"body: {calls}"]
        elif answer is not None:
            rules = [f"body: answer | {calls}", f"answer: {answer.rule}"]
        else:
            # A lazy lexeme ends with the first mark, and then a call must follow.
            begin, free = begin.removeprefix(mark), f" & ~/{unlike}/" if unlike else ""
            rules = [
                "body: TEXT | marked call" if self.is_single else "body: (marked call)* TEXT",
                f"marked[lazy]: TEXT {json.dumps(mark)}",
                f"TEXT: /(?s:.*)/{free}",
            ]
        end, calls, schemas = json.dumps("}" + self.form.end), [], []
        for number, (name, schema) in enumerate(self.schemas.items()):
            head = begin + f'{{"name": "{name}", "arguments": '
            calls.append(f"{json.dumps(head)} arguments_{number} {end}")
            schemas.append(f"arguments_{number}: {schema.rule}")
        return [*rules, "call: " + " | ".join(calls), *schemas]


def read_tools(request: protocol.ChatRequest, form: ToolForm | None, warnings: list[str]) -> Tools | None:
    """Return the tools of a request; None if none may be called. ``form`` is the chat template's for calls, if known.

    What a schema asks for and its grammar does not is added to ``warnings``.

    Raises:
        ApiError: they contradict each other, a schema cannot be followed, or the template has no form for free calls.
    """
    functions, choice = [tool.function for tool in request.tools or ()], request.tool_choice
    named = choice.function.name if isinstance(choice, protocol.NamedChoice) else None
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
        message = "this server knows no form of free tool calls for this chat template: set tool_choice to "
        raise bad_request(f'{message}"required", to a function or to "none"', "tool_choice" if choice else "tools")
    schemas = {}
    for number, function in enumerate(functions):
        where = f"tools.{number}.function.parameters: "
        with refusing("tools", where):
            nothing = {"properties": {}, "additionalProperties": False}
            schema = {"type": "object"} | (nothing if function.parameters is None else function.parameters)
            if named not in (None, function.name):
                continue  # it cannot be called
            try:
                if schema["type"] != "object":
                    raise ValueError('"type" must be "object"')
                schemas[function.name] = _schema(schema, function.strict, where, warnings)
            except (ValueError, TypeError) as error:
                if is_forced or function.strict:
                    raise
                schemas[function.name] = Grammar.json_schema({"type": "object"})
                warnings.append(f"{where}not enforced: {str(error)[:_MAX_WARNING]}")
    shown = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in request.tools or ()]
    single = named is not None or request.parallel_tool_calls is False
    return Tools(shown, schemas, form or ToolForm(), is_forced, single)


def _schema(schema: dict[str, Any], strict: bool | None, where: str, warnings: list[str]) -> Grammar:
    """Return the grammar of a schema, which without ``strict`` may lack what it cannot express."""
    if strict:
        return Grammar.json_schema(schema)
    grammar, left_out = Grammar.lenient_json_schema(schema)
    warnings += [f"{where}not enforced: {words[:_MAX_WARNING]}" for words in left_out]
    return grammar


class EncodedPrompt(NamedTuple):
    """A prompt as token ids, and as text for ``echo``.

    ``reasoning`` is ``"begun"`` if the prompt ends with the mark of the model's reasoning, ``"optional"`` if the answer
    may begin with that. ``hides_reasoning``: the mark that ends the reasoning is not part of an answer's text.
    """

    ids: list[int]
    text: str
    reasoning: Literal["", "begun", "optional"] = ""
    hides_reasoning: bool = False


class PromptReader:
    """Encodes prompts by a target's tokenizer. Slow for long ones: call it outside of the event loop.

    ``thinks`` is True if the chat template knows reasoning.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        template = tokenizer.chat_template
        self.has_template, self.thinks = template is not None, CLOSE in str(template)
        if self.has_template:
            check_template(tokenizer, "user", tools=True)

    @functools.cached_property
    def tool_form(self) -> ToolForm | None:
        """How the chat template writes tool calls, if that is Hermes' form (Qwen 2.5 and 3, Hermes 3)."""
        marks = call_marks(self.tokenizer)
        is_hidden = any(is_special(self.tokenizer, mark) for mark in ("<tool_call>", "</tool_call>"))
        return None if marks is None or is_hidden else ToolForm(*marks)

    @functools.cached_property
    def _hides_reasoning(self) -> bool:
        return is_special(self.tokenizer, CLOSE)

    def read_chat(self, request: protocol.ChatRequest, tools: Tools | None = None) -> EncodedPrompt:
        """Write a conversation by the chat template, which gets ``tools``.

        Raises:
            ApiError: there is no template, or it does not take these messages or arguments.
        """
        if not self.has_template:
            raise bad_request("this model has no chat template: use /v1/completions", "messages")
        arguments, shown = request.chat_template_kwargs or {}, None if tools is None else tools.shown
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters  # transformers would take these itself
        for name in arguments:
            template = self.tokenizer.get_chat_template(tools=shown)
            if name in own or name == "messages" or not re.search(rf"\b{re.escape(name)}\b", template):
                raise bad_request(f"the chat template has no argument {name!r}", "chat_template_kwargs")
        with refusing("messages"):
            messages = [*map(_message, request.messages)]
            text = render_chat(self.tokenizer, messages, True, {**arguments, "tools": shown})
        ids = list(self.tokenizer(_unicode(text, "messages"), add_special_tokens=False).input_ids)
        if not self.thinks or text.rstrip().endswith(CLOSE):
            return EncodedPrompt(ids, text)
        reasoning = "begun" if text.rstrip().endswith(OPEN) else "optional"
        return EncodedPrompt(ids, text, reasoning, self._hides_reasoning)

    def read_completion(self, request: protocol.CompletionRequest) -> list[EncodedPrompt]:
        """Return the prompts; raises ApiError if one is empty or not Unicode."""
        given = request.prompt
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        prompts = [self._read(prompt, bool(request.echo)) for prompt in ([given] if is_one else given)]
        if not prompts or not all(prompt.ids for prompt in prompts):
            raise bad_request("prompt must hold at least one token", "prompt")
        return prompts

    def _read(self, prompt: str | list[int], needs_text: bool) -> EncodedPrompt:
        if isinstance(prompt, str):
            return EncodedPrompt(text_ids(self.tokenizer, _unicode(prompt, "prompt")), prompt)
        if needs_text and prompt and max(prompt) >= len(self.tokenizer):
            raise bad_request(f"token ids must lie in 0 .. {len(self.tokenizer) - 1}, got {max(prompt)}", "prompt")
        return EncodedPrompt(prompt, self.tokenizer.decode(prompt) if needs_text else "")


def _message(message: protocol.Message) -> dict[str, Any]:
    fields = {"content", "reasoning_content", "name", "tool_calls", "tool_call_id"}
    given = message.model_dump(include=fields, exclude_none=True)
    return {**given, "role": "system" if message.role == "developer" else message.role}


def _unicode(text: str, field: str) -> str:
    with refusing(field):
        return check_text(text, field)


_CONTRADICTING = ("ignore_eos", "min_tokens", "no_repeat_ngram_size")  # they may ban all that a grammar allows
_KINDS: dict[str, Callable[[Any], Grammar]] = {
    "json": lambda value: Grammar.json_schema(json.loads(value) if isinstance(value, str) else value),
    "regex": Grammar.regex,
    "grammar": Grammar.lark,
}


def answer_grammar(
    request: protocol.GenerationRequest, prompt: EncodedPrompt, tools: Tools | None, warnings: list[str]
) -> Grammar | None:
    """Return what an answer must match, its reasoning included; None if its text is free.

    What a schema asks for and its grammar does not is added to ``warnings``.

    Raises:
        ApiError: a grammar is invalid, or fields contradict each other.
    """
    field, answer = _asked(request, warnings)
    if tools is not None and answer is not None and field != "response_format":
        raise bad_request(f"{field} cannot be combined with tools: set tool_choice to none", field)
    if answer is None and tools is None:
        return None
    for name in _CONTRADICTING:
        if getattr(request, name):
            raise bad_request(f"{name} cannot be combined with {field or 'tools'}: leave one of them out", name)
    if tools is None and not prompt.reasoning:
        return answer
    # The rules of the answer, after those of the reasoning.
    field = field or "tools"
    if prompt.reasoning and prompt.hides_reasoning:
        raise bad_request(f"the tokenizer's {CLOSE} is a special token: {field} cannot follow reasoning", field)
    unlike = f"[ \\n]{{0,2}}{OPEN}(?s:.*)" if prompt.reasoning == "optional" else ""
    rules = [f"body: {answer.rule}"] if tools is None else tools.rules(answer, unlike)
    if prompt.reasoning:
        rules += [f"thought[lazy]: /(?s:.*)/ {json.dumps(CLOSE)}", "SPACE: /[ \\n]{0,4}/"]
    if prompt.reasoning == "optional":
        rules += [f"OPEN: /[ \\n]{{0,2}}{OPEN}/"]
    start = {"": "body", "begun": "thought SPACE body", "optional": "(OPEN thought SPACE)? body"}[prompt.reasoning]
    with refusing(field):
        return Grammar.lark("\n".join([f"start: {start}", *rules]))


def _asked(request: protocol.GenerationRequest, warnings: list[str]) -> tuple[str, Grammar | None]:
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
            if field == "response_format" and form is not None and form.json_schema is not None:
                return field, _schema(value, form.json_schema.strict, f"{field}: ", warnings)
            return field, _KINDS[kind](value)
    return "", None
