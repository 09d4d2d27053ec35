"""Forms of tool calls and of reasoning: found in chat templates, parsed while they stream, kept to by grammars."""

import copy
import functools
import json
import os
import random
import re
import time
from pathlib import Path

import pytest
from examples import is_long
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from served import CHAT, ask, chat, chunks, cut, pair, serving

from dflash.loading import render_chat
from dflash_serve.answer_text import AnswerText
from dflash_serve.prompts import EncodedPrompt, PromptReader, answer_grammar, read_tools
from dflash_serve.reasoning import REASONING_FORMS, find_reasoning_form
from dflash_serve.requests import ChatRequest
from dflash_serve.tool_calls import TOOL_FORMS, CallText, ToolForm, find_tool_form

KINDS = {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}}
KINDS["more"] = {"type": "object"}
SCHEMA = {"type": "object", "properties": KINDS, "required": ["city"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
FUNCTIONS = {"weather": SCHEMA, "now": {}}
FIRST = {"city": 'Oslo "north"', "days": 5, "unit": "C", "more": {"x": [1, True, "y, z"]}}
SECOND = {"city": "12"}


def written(form, calls) -> str:
    """Write calls as a model does that keeps to a form."""
    texts = []
    for number, (name, arguments) in enumerate(calls):
        if form.values == "json":
            shown = json.dumps(arguments)
        else:
            shown = form.key_sep.join(parameter(form, key, value) for key, value in arguments.items())
        texts.append((form.head + name + form.mid + shown + form.tail).replace("$ID", str(number)))
    return form.begin.replace("$ID", "weather") + form.between.replace("$ID", "weather").join(texts) + form.end


def parameter(form, key, value) -> str:
    kind = {str: form.types, dict: "object"}.get(type(value), "number") if form.types == "string" else (
        form.types if isinstance(value, str) else "false"
    )  # fmt: skip
    text = value if isinstance(value, str) else json.dumps(value)
    if form.values == "python":
        text = repr(value)
    elif form.values == "gemma":
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace('\\"', "'").replace('"', '<|"|>')
        text = re.sub(r'<\|"\|>([\w ]+)<\|"\|>:', r"\1:", text)  # keys have no quotes
    return f"{form.key_head}{key}{form.key_mid}{text}{form.key_tail}".replace("$TYPE", kind).replace("$KEY", key)


def split(text, form, ends=(), functions=FUNCTIONS, reasoning=None):
    """Split an answer that comes in pieces; return its content, its calls as they are written, and its reasoning."""
    answer, calls, content, thought = AnswerText(form=reasoning), CallText(form, functions), "", ""
    streamed: dict[int, str] = {}
    for piece, is_last in cut(text, ends):
        delta = answer.push(piece, is_last=is_last)
        shown, pieces = calls.push(delta.content, is_last=is_last)
        content, thought = content + shown, thought + delta.reasoning
        assert len({piece["index"] for piece in pieces}) == len(pieces)  # one piece of a call
        for piece in pieces:
            streamed[piece["index"]] = streamed.get(piece["index"], "") + piece["function"]["arguments"]
    made = [(call["function"]["name"], call["function"]["arguments"]) for call in calls.calls]
    assert [*streamed.values()] == [arguments for _, arguments in made]
    return content, made, thought, calls.is_whole


def parsed(text, form, ends=(), reasoning=None, functions=FUNCTIONS):
    """Return content, reasoning and calls of an answer that comes in pieces."""
    content, made, thought, _ = split(text, form, ends, functions, reasoning)
    return content, thought, [(name, json.loads(arguments)) for name, arguments in made]


@pytest.mark.parametrize(("name", "text"), [("lfm2", "[" + "a" * 300), ("gemma4", "{" * 99), ("gpt-oss", "\n" * 3000)])
def test_text_that_never_becomes_a_call_is_read_at_once(name, text):
    """Patterns with many ways to match would take ages."""
    form = TOOL_FORMS[name]
    begun = written(form, [("weather", {})]).split("}")[0].removesuffix(")]<|tool_call_end|>") + "city" + form.key_mid
    begun = begun if form.key_mid else written(form, [("weather", {})])
    splitter = CallText(form, FUNCTIONS)
    for piece in (begun, text, "x"):
        splitter.push(piece, is_last=False)
    splitter.push("", is_last=True)
    assert [call["function"]["name"] for call in splitter.calls] == ["weather"]


@functools.cache
def tokens_of(tokenizer):
    return from_tokenizer(tokenizer, eos_token=[tokenizer.eos_token_id])


def taken(grammar, text: str, tokenizer=None) -> bool:
    """Return whether a grammar takes a text as a whole answer."""
    tokenizer = tokenizer or pair()[2]
    matcher = LLMatcher(tokens_of(tokenizer), grammar.source, log_level=0)
    return matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False)) and matcher.is_accepting()


def first(form) -> dict:
    return FIRST | {"city": "Oslo north"} if form.values == "gemma" else FIRST


# Names that begin others, and keys that no identifier is.
NAMED = {
    "type": "object",
    "properties": {"my key": {"type": "string"}, "a/b:c": {"type": "string"}, "more": {"type": "object"}},
}
MANY = {"Bash": NAMED, "BashOutput": NAMED, "get": {}, "now": {"properties": None}}
WORDS = ["Oslo", "a b", "x", "\n", '"', "'", "\\", "{", "}", "[", "]", ",", ":", "<", "é", "12", "true", "  "]


def some_calls(draw: random.Random, words: list[str], names: list[str]) -> list[tuple[str, dict]]:
    """Draw calls of functions whose arguments are made of these words."""

    def text() -> str:
        return "".join(draw.choices(words, k=draw.randrange(5)))

    def value(key: str) -> object:
        return {"k k": text(), "x": [1, True, text()]} if key == "more" else text()

    keys = [*NAMED["properties"]]
    made = []
    for name in draw.choices(names, k=draw.randrange(1, 4)):
        made.append((name, {key: value(key) for key in draw.sample(keys, draw.randrange(4) if "Bash" in name else 0)}))
    return made


@pytest.mark.parametrize("name", [name for name, form in TOOL_FORMS.items() if form.mark])
def test_a_mark_without_a_call_stays_text(name):
    form, calls = TOOL_FORMS[name], [("weather", {"city": "Oslo"})]
    said = f"I will use {form.mark} as in the docs."
    text = f"{said} {written(form, calls)}"
    for size in (1, 2, 7, len(text)):
        content, _, found = parsed(text, form, range(0, len(text), size))
        assert (content.strip(), found) == (said, calls)


@pytest.mark.long
@pytest.mark.parametrize("name", TOOL_FORMS)
def test_every_cut_of_a_text_gives_the_same_calls(name):
    """A call that was written is read. Whatever else stands there, pieces are read as the whole is."""
    form, draw = TOOL_FORMS[name], random.Random(name)
    marks = [part for each in (form, *TOOL_FORMS.values()) for part in each[:10] if part.strip()]
    marks += [part for part in form[:10] if part] * 9

    def some_text() -> str:
        return "".join(draw.choice(draw.choice([WORDS, marks])) for _ in range(draw.randrange(4)))

    for _ in range(10_000 if is_long() else 10):
        # 1. Calls as a model writes them
        before, calls = "I look." * bool(form.mark), some_calls(draw, ["Oslo", "é", "a b"], [*MANY])
        text = before + written(form, calls)
        content, _, made = parsed(text, form, draw.choices(range(len(text)), k=9), functions=MANY)
        assert (content.strip(), made) == (before, calls), text
        # 2. Any texts: other functions, marks in arguments, sections without an end
        parts = [some_text() * bool(form.mark)]
        for _ in range(draw.randrange(1, 4)):
            section = written(form, some_calls(draw, WORDS + marks, [*MANY, "get_other", "Bas"]))
            parts += [section[: draw.choice([len(section), draw.randrange(len(section))])], some_text()]
        text = "".join(parts)
        whole = split(text, form, (), MANY)
        for ends in (range(len(text)), draw.choices(range(len(text) + 1), k=5)):
            assert split(text, form, ends, MANY) == whole, (text, ends)


def test_a_function_that_was_not_offered_is_no_other():
    for name, form in TOOL_FORMS.items():
        for called in ("get_other", "get-other", "get.other", "getother", "get other"):
            text = written(form, [(called, {})])
            for ends in ((), range(len(text))):
                assert parsed(text, form, ends, functions=MANY)[2] == [], (name, called)


@pytest.mark.parametrize("name", ["gemma4", "lfm2", "qwen3-coder", "hermes"])
def test_time_is_linear_in_the_length_of_arguments(name):
    """A literal that was matched again for each piece took 10 s for 20 KB."""
    text = written(TOOL_FORMS[name], [("Bash", {"my key": "x, " * 8000, "more": {"k k": "y" * 8000}})])
    began = time.process_time()
    assert len(split(text, TOOL_FORMS[name], range(0, len(text), 3), MANY)[1]) == 1
    assert time.process_time() - began < 2


@pytest.mark.parametrize("name", TOOL_FORMS)
def test_grammars_of_every_form_take_its_calls_and_no_others(name):
    form = TOOL_FORMS[name]
    good = written(form, [("weather", first(form)), ("now", {})])
    wrong = [good.replace("Oslo", "Oslo").replace("weather", "rain"), good.replace('"C"', '"K"').replace(">C<", ">K<")]
    cases = {"required": [good], "auto": [good, "Hello."] + (["Hm. " + good] if form.mark else [])}
    for choice, texts in cases.items():
        request = ChatRequest.model_validate(chat(tools=TOOLS, tool_choice=choice))
        form_of = REASONING_FORMS["think"]
        grammar = answer_grammar(request, EncodedPrompt([], ""), read_tools(request, form, []), [], form_of)
        for text in [*texts, *(wrong if choice == "required" else ())]:
            assert taken(grammar, text) == (text in texts), (choice, text)


@pytest.mark.parametrize("name", TOOL_FORMS)
def test_words_that_stand_for_something_in_a_form_are_text_in_a_schema(name):
    form = TOOL_FORMS[name]
    schema = SCHEMA | {"properties": {"city": {"enum": ["$ID", "$KEY"]}, "$ID": {"type": "string"}}}
    function = {"name": "weather", "parameters": schema}
    request = ChatRequest.model_validate(
        chat(tools=[{"type": "function", "function": function}], tool_choice="required")
    )
    grammar = answer_grammar(request, EncodedPrompt([], ""), read_tools(request, form, []), [])
    for value, fits in (("$ID", True), ("7", False)):
        text = written(form, [("weather", {"city": "VALUE"})]).replace("VALUE", value)
        assert taken(grammar, text) == fits
        assert parsed(text, form, functions={"weather": schema})[2] == [("weather", {"city": value})]


# ---------------------------------------------------------------------------------------------- templates


def template_of(form) -> str:
    """Return a chat template that writes calls in a form."""

    def text(words: str) -> str:
        quoted = json.dumps(words, ensure_ascii=False).replace("$ID", '" ~ loop.index0 ~ "')
        kind = f"('{form.types}' if v is string else 'false')"
        return "{{ " + quoted.replace("$KEY", '" ~ k ~ "').replace("$TYPE", f'" ~ {kind} ~ "') + " }}"

    value = "{{ v if v is string else v | tojson }}"
    value = text(form.key_head) + "{{ k }}" + text(form.key_mid) + value + text(form.key_tail)
    sep = "{% if not loop.last %}" + text(form.key_sep) + "{% endif %}"
    values = "{% for k, v in c.function.arguments.items() %}" + value + sep + "{% endfor %}"
    values = "{{ c.function.arguments | tojson }}" if form.values == "json" else values
    between = "{% if not loop.last %}" + text(form.between) + "{% endif %}"
    call = text(form.head) + "{{ c.function.name }}" + text(form.mid) + values + text(form.tail) + between
    return (
        "{% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
        "{% if m.tool_calls %}{% for c in m.tool_calls[:1] %}" + text(form.begin) + "{% endfor %}"
        "{% for c in m.tool_calls %}" + call + "{% endfor %}" + text(form.end) + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )  # fmt: skip


def with_template(template: str):
    tokenizer = copy.deepcopy(pair()[2])
    tokenizer.chat_template = template
    return tokenizer


def messages_of(calls) -> list[dict]:
    made = [
        {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": made}]


RENDERED = [name for name, form in TOOL_FORMS.items() if form.values in ("json", "text")]


@pytest.mark.parametrize("name", RENDERED)
def test_the_form_is_found_in_what_a_template_writes(name):
    """Templates loop over tools, as Hermes 3's does, and fail without any."""
    form, calls = TOOL_FORMS[name], [("weather", FIRST), ("weather", SECOND)]
    single = "{% if (messages | last).tool_calls | length > 1 %}{{ raise_exception('single calls only') }}{% endif %}"
    for template in (template_of(form), single * (name == "llama3") + template_of(form)):
        tokenizer = with_template(template)
        assert find_tool_form(tokenizer) == form
        calls = calls[: 1 if single in template else 2]
        prompt, text = (render_chat(tokenizer, messages_of(calls)[:n], n == 1, {"tools": TOOLS}) for n in (1, 2))
        assert parsed(text.removeprefix(prompt), form)[2] == calls


def test_spaces_of_a_template_are_those_of_its_form():
    template = template_of(TOOL_FORMS["glm"]).replace("\\n", "")
    assert find_tool_form(with_template(template)).mid == ""
    named = find_tool_form(with_template(template), "hermes")
    assert named == TOOL_FORMS["hermes"]
    assert find_tool_form(pair()[2]) == TOOL_FORMS["json"]


COLLECTION = os.environ.get("DFLASH_TEMPLATES", "")


@pytest.mark.skipif(not COLLECTION, reason="DFLASH_TEMPLATES names no folder of chat templates")
def test_calls_of_a_collection_of_templates_are_parsed():
    """llama.cpp's ``models/templates``: 56 of those that read tools write calls that are parsed, or have a form."""
    good, wrong = [], {}
    for path in sorted(Path(COLLECTION).glob("*.jinja")):
        if "tools" not in (template := path.read_text()):
            continue
        tokenizer = with_template(template)
        form, reasoning = find_tool_form(tokenizer), find_reasoning_form(tokenizer)
        for count in (2, 1):
            calls = [("weather", FIRST), ("weather", SECOND)][:count]
            try:
                prompt, text = (
                    render_chat(tokenizer, messages_of(calls)[:n], n == 1, {"tools": TOOLS[:1]}) for n in (1, 2)
                )
            except ValueError as error:
                wrong[path.name] = str(error)
                continue
            answer = text[len(prompt) :] if text.startswith(prompt) else text.rpartition("hi")[2]
            made = parsed(answer, form, range(len(answer)), reasoning)[2]
            wrong.pop(path.name, None)
            if made and made == calls[: len(made)]:
                good.append(path.name)
            else:
                wrong[path.name] = f"{made} of {answer}"
            break
        else:
            if form not in (TOOL_FORMS["json"], TOOL_FORMS["hermes"]):
                good.append(path.name)  # it writes no calls here, and its source tells its form
    assert len(good) >= 56, wrong


# ---------------------------------------------------------------------------------------------- reasoning

OSS = (
    "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>More.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "12"}<|call|>'
)
ANSWERS = {
    "gpt-oss": ("gpt-oss", OSS, ("I look.", "Think.More.", [("weather", SECOND)])),
    "gpt-oss, final": (
        "gpt-oss", "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>final<|message|>B<|return|>",
        ("B", "A", []),
    ),
    "gpt-oss, role": (
        "gpt-oss", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "12"}',
        ("", "", [("weather", SECOND)]),
    ),
    "kimi": ("kimi", "◁think▷A◁/think▷B", ("B", "A", [])),
    "kimi-k3": (
        "kimi-k3", "<|open|>think<|sep|>A<|close|>think<|sep|><|open|>response<|sep|>B<|close|>response<|sep|>",
        ("B", "A", []),
    ),
    "gemma4": ("gemma4", "<|channel>thought\nA<channel|>B", ("B", "A", [])),
    "mistral": ("mistral", "[THINK]A[/THINK]B", ("B", "A", [])),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), ANSWERS.values(), ids=ANSWERS)
@given(ends=st.lists(st.integers(0, 400), max_size=30))
def test_reasoning_is_told_from_content_wherever_pieces_end(name, text, expected, ends):
    form = TOOL_FORMS["gpt-oss" if name == "gpt-oss" else "hermes"]
    content, thought, made = parsed(text, form, ends, REASONING_FORMS[name])
    assert (content.strip(), thought, made) == expected


@pytest.mark.parametrize("name", REASONING_FORMS)
def test_the_form_of_reasoning_is_found_in_the_template(name):
    signs = {"gpt-oss": "'<|channel|>analysis'", "kimi-k3": "'<|open|>'"}
    tokenizer = with_template("{# " + signs.get(name, REASONING_FORMS[name].close) + " #}")
    assert find_reasoning_form(tokenizer) == REASONING_FORMS[name]
    assert find_reasoning_form(tokenizer, "mistral") == REASONING_FORMS["mistral"]
    assert find_reasoning_form(pair()[2]) is None


# ---------------------------------------------------------------------------------------------- requests


def test_marks_that_are_special_tokens_are_written_and_read(monkeypatch):
    monkeypatch.setitem(TOOL_FORMS, "masked", ToolForm("<|mask|>", " ", between=""))
    with serving() as service:
        service.reader.__init__(service.reader.tokenizer, "masked")
        body = chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "now"}})
        (choice,) = ask(service, CHAT, body).json()["choices"]
        streamed = chunks(ask(service, CHAT, body | {"stream": True}))
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("now", "tool_calls")
    pieces = [piece for chunk in streamed for c in chunk["choices"] for piece in c["delta"].get("tool_calls", ())]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == call["function"]["arguments"]


SPECIAL = {  # forms of calls and reasoning, the marks that are special tokens, and what a model writes before its calls
    "gpt-oss": ("gpt-oss", ["<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"],
                "<|channel|>analysis<|message|>A<|end|><|start|>assistant"),
    "gemma4": ("gemma4", ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
               "<|channel>thought\nA<channel|>"),
    "mistral": ("mistral", ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"], "[THINK]A[/THINK]"),
    "kimi": ("think", ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
                       "<|tool_call_end|>", "<|tool_calls_section_end|>"], "<think>A</think>"),
    "hermes": ("think", ["</think>"], "<think>A</think>"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
def test_grammars_and_answers_keep_special_tokens_apart(name):
    reasoning, marks, thought = SPECIAL[name]
    form, tokenizer = TOOL_FORMS[name], copy.deepcopy(pair()[2])
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = PLAIN
    reader = PromptReader(tokenizer, name, reasoning)
    assert {*reader.specials} == {*marks}
    calls = written(form, [("weather", first(form)), ("weather", SECOND)])
    for choice in ("required", "auto"):
        request = ChatRequest.model_validate(chat(tools=TOOLS, tool_choice=choice))
        tools, prompt = read_tools(request, form, []), EncodedPrompt([], "", "optional")
        grammar = answer_grammar(request, prompt, tools, [], reader.reasoning, reader.specials)
        for text in (calls, thought + calls):
            ids = tokenizer.encode(text, add_special_tokens=False)
            shown = reader.shown.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True)
            assert parsed(shown, form, [9], reader.reasoning)[1:] == (
                "A" * (text != calls), [("weather", first(form)), ("weather", SECOND)]
            )  # fmt: skip
            if grammar is not None:  # of Harmony, free answers have none
                assert taken(grammar, text, tokenizer), (choice, text)


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("template", ["", PLAIN], ids=["pair", "plain"])
def test_auto_is_answered_whatever_the_template_knows(template):
    call = messages_of([("weather", {"city": "$ID"})])[1]["tool_calls"]
    history = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "tool_call_id": call[0]["id"], "content": "rain"}, {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    with serving(template=template) as service:
        for messages in (history[:1], history):
            prompt = service.reader.read_chat(
                ChatRequest.model_validate({"messages": messages, "tools": TOOLS}),
                read_tools(ChatRequest.model_validate(chat(tools=TOOLS)), service.reader.tool_form, []),
                [],
            )
            response = ask(service, CHAT, {"messages": messages, "tools": TOOLS, "max_tokens": 4})
            assert response.status_code == 200, response.text
            if template:
                assert prompt.text.startswith("[system]You may call functions.")
                assert '"name": "weather"' in prompt.text
            else:
                assert "does not show them" in response.json()["warnings"][0]
            if template and messages is history:
                assert '[assistant]{"name": "weather", "arguments": {"city": "$ID"}}[tool]rain' in prompt.text


THINKS = PLAIN + "({{ reasoning_effort }}|{{ enable_thinking }}){# <think></think> #}"


SHOWN = [
    ({"reasoning_effort": "high"}, "(high|)"), ({"reasoning_effort": "none"}, "(|False)"),
    ({"enable_thinking": False}, "(|False)"), ({"chat_template_kwargs": {"enable_thinking": 3}}, "(|3)"),
]  # fmt: skip


def test_effort_and_thinking_reach_the_template():
    with serving(template=THINKS) as service:
        for fields, shown in SHOWN:
            assert service.reader.read_chat(ChatRequest.model_validate(chat(**fields)), None, []).text.endswith(shown)
    with serving(template=PLAIN) as service:
        for fields, _ in SHOWN:
            response = ask(service, CHAT, chat(max_tokens=1, **fields))
            applied = "chat_template_kwargs" in fields
            assert (response.status_code == 400) == applied
            assert ("not applied" in response.text) != applied
