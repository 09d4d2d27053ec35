"""Parts of a request for the model: its prompts, the tools that it offers, and the grammar of its answers."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from dflash import Grammar
from dflash.internals import check_template, render_chat, text_ids, written_calls

from . import requests
from .answer_text import MarkedTokenizer
from .pictures import PictureReader
from .reasoning import ReasoningForm, find_reasoning_form
from .requests import ApiError, bad_request, refusing, refusing_all
from .tool_calls import ANY_ID, QUOTES, TOOL_FORMS, CallText, Rules, ToolForm, find_tool_form

_MAX_WARNING = 200  # characters; they are a header too


@dataclass(frozen=True)
class Tools:
    """The tools of a request: those shown to the chat template, and the functions that may be called."""

    shown: Sequence[dict[str, Any]]
    schemas: dict[str, Grammar]  # of the arguments, by the names of the functions that may be called
    form: ToolForm
    is_forced: bool
    is_single: bool

    def text(self) -> CallText:
        return CallText(self.form, self._plain, self.is_forced)

    @functools.cached_property
    def _plain(self) -> dict[str, dict[str, Any]]:
        return {name: json.loads(schema.text) for name, schema in self.schemas.items()}

    def add_rules(self, rules: Rules, answer: str, unlike: list[str]) -> None:
        """Add the rule ``body`` of an answer, and those that it needs.

        ``answer`` is what text must match instead of calls; if it is empty, free text may not match ``unlike``.
        """
        form, mark = self.form.with_id(ANY_ID), self.form.mark
        calls = "" if self.is_single else "next*"
        section = f"call {calls} {rules.text(form.end)}"
        if self.is_forced or answer:
            rules.add("body", section if self.is_forced else f"{answer} | {section}")
        elif mark:
            # Free text ends with the first mark, and then a call must follow.
            rest = f"{rules.until('marked', mark, 'TEXT')} first {calls} {rules.text(form.end)}"
            rules.add("body", f"TEXT | {rest}" if self.is_single else f"({rest})* TEXT")
        else:
            rules.add("body", f"TEXT | {section}")
            pieces = rules.pieces((form.begin + form.head).lstrip()) or ["''"]
            begin = json.loads(pieces[0]) if pieces[0].startswith('"') else ""
            names = f"({'|'.join(map(_escaped, self.schemas))}){_escaped(form.mid)}" if pieces[0] == "''" else ""
            if begin or names:  # free text has no special token
                unlike = [*unlike, f"[ \\n]{{0,4}}{_escaped(begin)}{names}(?s:.*)"]
        if not self.is_forced and not answer:
            rules.add("TEXT", " & ".join(["/(?s:.*)/", *(f"~/{pattern}/" for pattern in unlike)]))
        heads = {"call": form.begin + form.head, "next": form.between + form.head}
        if mark and not self.is_forced and not answer:
            heads["first"] = heads.pop("call").lstrip().removeprefix(mark)
        bodies: dict[str, list[str]] = {rule: [] for rule in heads if rule != "next" or not self.is_single}
        for number, (name, schema) in enumerate(self._plain.items()):
            if form.values == "json":
                arguments = rules.add(f"arguments_{number}", self.schemas[name].rule)
            else:
                arguments = rules.arguments(f"arguments_{number}", form, schema)
            for rule, body in bodies.items():
                body.append(f"{rules.text(heads[rule] + name + form.mid)} {arguments} {rules.text(form.tail)}")
        for rule, body in bodies.items():
            rules.add(rule, " | ".join(body))


def _escaped(text: str) -> str:
    """Return a pattern in a Lark grammar that matches a text."""
    return re.escape(text).replace("/", "\\/").replace("\\ ", " ").replace("\\\n", "\\n")


def read_tools(request: requests.ChatRequest, form: ToolForm, warnings: list[str]) -> Tools | None:
    """Return the tools of a request; None if none may be called. ``form`` is how the model writes calls.

    What a schema asks for and its grammar does not is added to ``warnings``.

    Raises:
        ApiError: they contradict each other, or a schema cannot be followed.
    """
    functions, choice = [tool.function for tool in request.tools or ()], request.tool_choice
    named = choice.function.name if isinstance(choice, requests.NamedChoice) else None
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
    return Tools(shown, schemas, form, is_forced, single)


def _schema(schema: dict[str, Any], strict: bool | None, where: str, warnings: list[str]) -> Grammar:
    """Return the grammar of a schema, which without ``strict`` may lack what it cannot express."""
    if strict:
        return Grammar.json_schema(schema)
    grammar, left_out = Grammar.lenient_json_schema(schema)
    warnings += [f"{where}not enforced: {words[:_MAX_WARNING]}" for words in left_out]
    return grammar


# How prompts are written whose answer stands between two texts.
FILL_FORMS = (
    "<|fim_prefix|> PREFIX <|fim_suffix|> SUFFIX <|fim_middle|>",  # Qwen, CodeGemma, Granite
    "<fim_prefix> PREFIX <fim_suffix> SUFFIX <fim_middle>",  # StarCoder
    "<fim-prefix> PREFIX <fim-suffix> SUFFIX <fim-middle>",  # SantaCoder
    "<|code_prefix|> PREFIX <|code_suffix|> SUFFIX <|code_middle|>",  # GLM
    "<｜fim▁begin｜> PREFIX <｜fim▁hole｜> SUFFIX <｜fim▁end｜>",  # DeepSeek
    "[SUFFIX] SUFFIX [PREFIX] PREFIX",  # Mistral
)


class EncodedPrompt(NamedTuple):
    """A prompt as token ids, and as text for ``echo``. ``pictures`` are what its processor made of them.

    ``reasoning`` is ``"begun"`` if the prompt ends with the mark of the model's reasoning, ``"optional"`` if the answer
    may begin with that.
    """

    ids: list[int]
    text: str
    reasoning: Literal["", "begun", "optional"] = ""
    pictures: Mapping[str, Tensor] | None = None


class PromptReader:
    """Encodes prompts by a target's tokenizer. Slow for long ones: call it outside of the event loop.

    Args:
        tokenizer: its chat template tells the forms of tool calls and of reasoning.
        tool_form: name of a row of `TOOL_FORMS` instead.
        reasoning_form: name of a row of `REASONING_FORMS` instead, or "none".
        pictures: reads those of conversations; None to refuse them.

    ``specials`` are the special tokens among the marks of these forms; ``shown`` decodes them as text.
    """

    def __init__(
        self, tokenizer: Any, tool_form: str | None = None, reasoning_form: str | None = None,
        pictures: PictureReader | None = None,
    ) -> None:  # fmt: skip
        self.tokenizer, self._tool_form, self.pictures = tokenizer, tool_form, pictures
        self.has_template = tokenizer.chat_template is not None
        self.reasoning = None if reasoning_form == "none" else find_reasoning_form(tokenizer, reasoning_form)
        if self.has_template:
            check_template(tokenizer, "user", tools=True)

    @functools.cached_property
    def tool_form(self) -> ToolForm:
        return find_tool_form(self.tokenizer, self._tool_form)

    @functools.cached_property
    def specials(self) -> dict[str, int]:
        """The ids of special tokens in the marks of tool calls and reasoning."""
        texts = [field for form in CallText(self.tool_form, {}).forms for field in form if isinstance(field, str)]
        texts.append(QUOTES.get(self.tool_form.values, ""))
        texts += self.reasoning.marks if self.reasoning else []
        tokens = [(token.content, number) for number, token in self.tokenizer.added_tokens_decoder.items()]
        special = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        return {mark: number for mark, number in tokens if mark in special and any(mark in text for text in texts)}

    @functools.cached_property
    def shown(self) -> Any:
        """The tokenizer that decodes answers; the target's own unless marks are special tokens."""
        return MarkedTokenizer(self.tokenizer, self.specials) if self.specials else self.tokenizer

    @functools.cached_property
    def fill_form(self) -> Sequence[str] | None:
        """The form of `FILL_FORMS` whose tokens the tokenizer has; None if it has those of none."""
        known = self.tokenizer.get_vocab()
        forms = (form.split() for form in FILL_FORMS)
        return next((form for form in forms if {*form} - {"PREFIX", "SUFFIX"} <= known.keys()), None)

    @functools.cached_property
    def _writes_calls(self) -> bool:
        return bool(written_calls(self.tokenizer))

    def read_chat(self, request: requests.ChatRequest, tools: Tools | None, warnings: list[str]) -> EncodedPrompt:
        """Write a conversation by the chat template, which gets ``tools``.

        Raises:
            ApiError: there is no template, or it does not take these messages or arguments.
        """
        if not self.has_template:
            raise bad_request("this model has no chat template: use /v1/completions", "messages")
        arguments, shown = request.chat_template_kwargs or {}, None if tools is None else tools.shown
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters  # transformers would take these itself
        template = self.tokenizer.get_chat_template(tools=shown)
        for name, value in arguments.items():
            if name in own or name == "messages" or not re.search(rf"\b{re.escape(name)}\b", template):
                what = f"the chat template has no argument {name!r}"
                if name not in _THINKING or value is not False:
                    raise bad_request(what, "chat_template_kwargs")
                warnings.append(f"chat_template_kwargs: {what}")  # off is off
        arguments = _thinking(request, template, warnings) | arguments | {"tools": shown}
        has_pictures = any(
            isinstance(part, requests.ImagePart) for said in request.messages for part in said.content or ()
        )
        if has_pictures and self.pictures is None:
            warnings.append("messages: a text stands for each picture, which this server takes with --pictures only")
        if has_pictures and self.pictures is not None:
            found = self.pictures.read(request.messages)
            text = _write(functools.partial(self._written_with_pictures, arguments, tools), request, {"type": "image"})
            ids, pictures = self.pictures.encode(text, found)
        else:
            text = _write(functools.partial(self._written, arguments, tools, warnings), request)
            ids, pictures = list(self.tokenizer(text, add_special_tokens=False).input_ids), None
        return EncodedPrompt(ids, text, self._reasoning(request, text.rstrip()), pictures)

    def _reasoning(self, request: requests.ChatRequest, text: str) -> Literal["", "begun", "optional"]:
        """Return what a prompt has of the reasoning of its answer."""
        if (form := self.reasoning) is None or text.endswith(form.close.rstrip()):
            return ""
        said = "".join(part.text for part in request.messages[-1].content or () if isinstance(part, requests.TextPart))
        said = said if request.continue_final_message else ""
        if text.endswith(form.open.rstrip()) or said.rfind(form.open.strip()) > said.rfind(form.close.strip()):
            return "begun"
        return "" if said.strip() else "optional"

    def _written_with_pictures(
        self, arguments: dict[str, Any], tools: Tools | None, messages: list[dict[str, Any]], asks: bool
    ) -> str:
        """Write messages with placeholders for the processor. The template must write all the rest by itself."""
        with refusing_all("messages", "the chat template refuses these messages"):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks, **arguments)
        self._check_shown(messages, tools, text)
        return text

    def _check_shown(self, messages: Sequence[dict[str, Any]], tools: Tools | None, text: str) -> None:
        """Refuse a conversation with pictures of which the template loses something."""
        told = [message for message in messages if message["role"] != "assistant"]  # whose reasoning may be left out
        said = [part["text"].strip() for message in told for part in message.get("content") or () if "text" in part]
        lost = "" if all(words in text for words in said) else "text"
        if tools is not None and not all(tool["function"]["name"] in text for tool in tools.shown):
            lost = "tools"
        if not self._writes_calls and any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            lost = "tool calls"
        if lost:
            message = f"the chat template loses {lost} of a conversation with pictures: leave these out"
            raise bad_request(message, "messages")

    @refusing("messages")
    def _written(
        self, arguments: dict[str, Any], tools: Tools | None, warnings: list[str], messages: list[dict[str, Any]],
        asks: bool,
    ) -> str:  # fmt: skip
        """Write messages by the template, and calls and tools as text where it does not write these."""
        render = functools.partial(render_chat, self.tokenizer, asks=asks, template=arguments)
        if self._writes_calls:
            text = render(messages)
        else:
            messages = [_call_as_text(message, self.tool_form) for message in messages]
            try:
                text = render(messages)
            except ValueError:
                if not any(message["role"] == "tool" for message in messages):
                    raise
                messages = [{**m, "role": "user"} if m["role"] == "tool" else m for m in messages]
                text = render(messages)
        if tools is None or all(tool["function"]["name"] in text for tool in tools.shown):
            return text
        told = [{"role": "system", "content": _TOLD.format(_example(self.tool_form), json.dumps(tools.shown))}]
        if messages[0]["role"] == "system" and isinstance(messages[0].get("content"), list):
            told[0]["content"] = [*messages[0]["content"], {"type": "text", "text": told[0]["content"]}]
            messages = messages[1:]
        try:
            return render([*told, *messages])
        except ValueError:
            warnings.append("tools: the chat template does not show them, and takes no system message that could")
            return text

    def read_completion(self, request: requests.CompletionRequest) -> list[EncodedPrompt]:
        """Return the prompts; raises ApiError if one is empty or not Unicode."""
        given = request.prompt
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        if request.suffix and request.echo:
            raise bad_request("echo cannot be combined with suffix, which is a part of the prompt", "echo")
        fill = self._fill(request.suffix) if request.suffix else None
        prompts = [self._read(prompt, bool(request.echo), fill) for prompt in ([given] if is_one else given)]
        if not prompts or not all(prompt.ids for prompt in prompts):
            raise bad_request("prompt must hold at least one token", "prompt")
        return prompts

    def _fill(self, suffix: str) -> Callable[[str], str]:
        """Return what makes a prompt one whose answer stands before ``suffix``."""
        if self.fill_form is None:
            raise bad_request("suffix: this model's tokenizer has no tokens to fill in the middle", "suffix")
        return lambda text: "".join({"PREFIX": text, "SUFFIX": suffix}.get(word, word) for word in self.fill_form)

    def _read(self, prompt: str | list[int], needs_text: bool, fill: Callable[[str], str] | None) -> EncodedPrompt:
        if isinstance(prompt, str):
            return EncodedPrompt(text_ids(self.tokenizer, prompt if fill is None else fill(prompt)), prompt)
        if fill is not None:
            raise bad_request("suffix needs a prompt that is a text, and got token ids", "suffix")
        return EncodedPrompt(prompt, self.decode(prompt, "prompt") if needs_text else "")

    def decode(self, ids: list[int], field: str) -> str:
        """Return the text of tokens; raise ApiError if there is no such token."""
        if (most := max(ids, default=0)) >= len(self.tokenizer):
            raise bad_request(f"token ids must lie in 0 .. {len(self.tokenizer) - 1}, got {most}", field)
        return self.tokenizer.decode(ids)


_NO_PICTURE = {"type": "text", "text": "[picture: not shown, because this model is served without pictures]"}


def _message(picture: dict[str, Any], message: requests.Message) -> dict[str, Any]:
    """Return a message for the template, with ``picture`` as the part that stands for each of its pictures."""
    fields = {"content", "reasoning_content", "name", "tool_calls", "tool_call_id"}
    given = message.model_dump(include=fields, exclude_none=True)
    parts = given.get("content") or ()
    if any(part["type"] == "image_url" for part in parts):
        parts = [picture if part["type"] == "image_url" else part for part in parts]
        given["content"] = requests.join_texts(parts, "\n")
    return {**given, "role": "system" if message.role == "developer" else message.role}


_CUT = "zcontinue"  # the end of a message that is continued; no template has or changes such a word


def _write(
    write: Callable[[list[dict[str, Any]], bool], str],
    request: requests.ChatRequest,
    picture: dict[str, Any] = _NO_PICTURE,
) -> str:
    """Return a conversation as text, with its system messages where the template takes them.

    ``write`` gets messages, and True for the beginning of an answer after them. ``picture`` stands for each picture.

    Raises:
        ApiError: the template refuses all that `_foldings` yields, and why the conversation as it is; or its last
            message cannot be continued.
    """
    messages, continues = [_message(picture, said) for said in request.messages], bool(request.continue_final_message)
    if continues:
        last = messages[-1]
        if last["role"] != "assistant" or last.get("tool_calls") or request.add_generation_prompt:
            rule = "only a last message of the assistant without tool calls can be continued"
            raise bad_request(f"{rule}, and add_generation_prompt must be false then", "messages")
        *parts, end = last.get("content") or [{"type": "text", "text": ""}]
        messages[-1] = {**last, "content": [*parts, {**end, "text": end["text"] + _CUT}]}

    def whole(messages: list[dict[str, Any]]) -> str:
        if continues and messages[:-1]:
            write(messages[:-1], True)  # refuses what the template loses of them
        return write(messages, not continues and request.add_generation_prompt is not False)

    text = None
    for folded in _foldings(messages):
        with contextlib.suppress(ApiError):
            text = whole(folded)
            break
    text = whole(messages) if text is None else text
    if continues and _CUT not in text:
        raise bad_request("the chat template does not show the last message, which should be continued", "messages")
    return text.rpartition(_CUT)[0] if continues else text


def _foldings(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield a conversation as it is, then in forms that more templates take and that say the same.

    First the system messages at its beginning are one and later ones the user's, then all are the user's, each time
    with adjacent messages of the user or of the assistant as one.
    """
    yield messages
    roles = [message["role"] for message in messages]
    first = next((number for number, role in enumerate(roles) if role != "system"), len(roles))
    for count in dict.fromkeys((first, 0)):
        folded: list[dict[str, Any]] = []
        for number, message in enumerate(messages):
            role = "user" if roles[number] == "system" and number >= count else roles[number]
            before = folded[-1] if folded and folded[-1]["role"] == role != "tool" else None
            if before is not None and (message.get("tool_calls") or not before.get("tool_calls")):  # calls stand last
                folded[-1] = requests.join_messages(before, message, "\n\n")
            else:
                folded.append({**message, "role": role})
        yield folded


_TOLD = "You may call functions. To call one, write nothing but\n{}\nThe functions are: {}"


def _example(form: ToolForm) -> str:
    form = form.with_id("0")
    return f"{form.begin}{form.head}NAME{form.mid}{{ARGUMENTS}}{form.tail}{form.end}"


def _call_as_text(message: dict[str, Any], form: ToolForm) -> dict[str, Any]:
    """Return a message with its tool calls as text, as the model writes them."""
    if not (calls := message.get("tool_calls")):
        return message
    form, texts = form if form.values == "json" else TOOL_FORMS["json"], []
    for number, call in enumerate(calls):
        name, given = call["function"]["name"], call["function"].get("arguments")
        given = given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False)
        one = form.with_id(str(number))
        texts.append(f"{one.head}{name}{one.mid}{given.strip() or '{}'}{one.tail}")
    text = form.begin + form.between.join(texts) + form.end
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**plain, "content": [*(message.get("content") or []), {"type": "text", "text": text}]}


_THINKING = ("reasoning_effort", "enable_thinking", "thinking")  # of templates: variables, not fields of messages


def _thinking(request: requests.ChatRequest, template: str, warnings: list[str]) -> dict[str, Any]:
    """Return the template's arguments for ``reasoning_effort`` and ``enable_thinking``; warn if it reads neither."""
    effort, thinks, found = request.reasoning_effort, request.enable_thinking, {}
    reads = [name for name in _THINKING if re.search(rf"(?<![.\w'\"]){name}\b", template)]
    if effort is not None and "reasoning_effort" in reads and effort != "none":
        found["reasoning_effort"] = effort
    if thinks is None and effort is not None and not found:
        thinks = effort != "none"
    if thinks is not None and (names := [name for name in reads if name != "reasoning_effort"]):
        found[names[0]] = thinks
    if (effort, request.enable_thinking) != (None, None) and not found:
        warnings.append("reasoning_effort, enable_thinking: not applied, the chat template does not read them")
    return found


_CONTRADICTING = ("ignore_eos", "min_tokens", "no_repeat_ngram_size")  # they may ban all that a grammar allows
_KINDS: dict[str, Callable[[Any], Grammar]] = {
    "json": lambda value: Grammar.json_schema(json.loads(value) if isinstance(value, str) else value),
    "regex": Grammar.regex,
    "grammar": Grammar.lark,
}


def answer_grammar(
    request: requests.GenerationRequest, prompt: EncodedPrompt, tools: Tools | None, warnings: list[str],
    form: ReasoningForm | None = None, specials: Mapping[str, int] | None = None,
) -> Grammar | None:  # fmt: skip
    """Return what an answer must match, its reasoning included; None if its text is free.

    What a schema asks for and its grammar does not is added to ``warnings``. ``form`` is that of reasoning, and
    ``specials`` are the special tokens among the marks.

    Raises:
        ApiError: a grammar is invalid, or fields contradict each other.
    """
    field, answer = _asked(request, warnings)
    if tools is not None and answer is not None and field != "response_format":
        raise bad_request(f"{field} cannot be combined with tools: set tool_choice to none", field)
    if answer is None and tools is None:
        return None
    if request.continue_final_message and (answer is not None or (tools is not None and tools.is_forced)):
        field = field or "tool_choice"
        raise bad_request(f"{field} cannot be combined with a last message that is continued: leave it out", field)
    for name in _CONTRADICTING:
        if getattr(request, name):
            raise bad_request(f"{name} cannot be combined with {field or 'tools'}: leave one of them out", name)
    if tools is not None and not tools.is_forced and answer is None and form is not None and form.reply:
        return None  # such models write several messages, and only between marks
    if tools is None and not prompt.reasoning:
        return answer
    # The rules of the answer, after those of the reasoning.
    field, rules, reasoning, unlike = field or "tools", Rules(specials or {}), "", []
    if answer is not None:
        rules.add("answer", f"{rules.text(form.reply) if form is not None else ''} {answer.rule}")
    if prompt.reasoning and form is not None:
        space = rules.add("SPACE", "/[ \\n]{0,4}/")
        reasoning = f"{rules.until('thought', form.close)} {rules.text(form.next)} {space}"
        if prompt.reasoning == "optional":
            first, *rest = rules.pieces(form.open)
            is_plain = first.startswith('"')
            begin = f"[ \\n]{{0,2}}{_escaped(json.loads(first)) if is_plain else ''}"
            first = rules.add("OPEN", f"/{begin}/") if is_plain else f"{rules.add('OPEN', f'/{begin}/')} {first}"
            reasoning = f"({' '.join([first, *rest])} {reasoning})?"
            unlike = [f"{begin}(?s:.*)"] if is_plain else []
    if tools is not None:
        tools.add_rules(rules, "answer" if answer is not None else "", unlike)
    rules.add("start", f"{reasoning} {'answer' if tools is None else 'body'}")
    with refusing(field):
        return Grammar.lark("\n".join(rules.lines))


def _given(request: requests.GenerationRequest) -> list[tuple[str, str, Any]]:
    """Return what an answer must match, as the request says it: fields, kinds and values."""
    given = [(f"guided_{kind}", kind, getattr(request, f"guided_{kind}")) for kind in _KINDS]
    given += [("structured_outputs", kind, value) for kind, value in (request.structured_outputs or {}).items()]
    if (form := request.response_format) is not None and form.type != "text":
        schema = form.json_schema.schema_ if form.json_schema is not None else None
        given.append(("response_format", "json", {"type": "object"} if schema is None else schema))
    return [item for item in given if item[2] is not None]


def grammar_field(request: requests.GenerationRequest) -> str:
    """Return the field that an answer's grammar comes from."""
    return next((field for field, _, _ in _given(request)), "tools")


def _asked(request: requests.GenerationRequest, warnings: list[str]) -> tuple[str, Grammar | None]:
    given, form = _given(request), request.response_format
    if len(given) > 1:
        raise bad_request(f"give one of {' and '.join(field for field, _, _ in given)}", given[1][0])
    for field, kind, value in given:
        with refusing(field, f"{field}: "):
            if field == "response_format" and form is not None and form.json_schema is not None:
                return field, _schema(value, form.json_schema.strict, f"{field}: ", warnings)
            return field, _KINDS[kind](value)
    return "", None
