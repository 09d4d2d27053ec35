"""Structured output of the server: schemas, tools, regular expressions, reasoning, and what is refused."""

import functools
import json
import re

import openai
import pydantic
import pytest
import served
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from served import CHAT, SUM, ask, chat, chunks, cut, direct, pair, prompt_ids, refused, serve, serving

import dflash
from dflash.sampling import LogitRules
from dflash_serve.prompts import EncodedPrompt, answer_grammar, read_tools
from dflash_serve.reasoning import REASONING_FORMS
from dflash_serve.requests import ApiError, ChatRequest
from dflash_serve.tool_calls import TOOL_FORMS, CallText

RECORD = "ini to json:\n[item]\nname=oak\nsize=12\ncolor=amber\nport=8080"
# Tools and calls as Qwen's template writes them, the rest as the pair's own.
HERMES = r"""
{%- for tool in tools or [] %}{{ '<tools>' + tool | tojson + '</tools>' }}{% endfor -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}{{ '<tool_response>' + message.content + '</tool_response>' }}
  {%- else -%}{{ message.content }}{%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
    {{- call.function.arguments | tojson + '}\n</tool_call>' -}}
  {%- endfor -%}
{%- endfor -%}
{{- '\n=>\n' if add_generation_prompt -}}
"""
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99999}
ITEM = {
    "type": "object",
    "properties": {"color": {"enum": ["amber", "blue"]}, "port": {"$ref": "#/$defs/port"}},
    "required": ["color", "port"],
    "additionalProperties": False,
    "$defs": {"port": NUMBER},
}
TOOLS = [
    {"type": "function", "function": {"name": "store", "description": "Store an item.", "parameters": ITEM}},
    {"type": "function", "function": {"name": "list_all"}},
]
STORE = {"type": "function", "function": {"name": "store"}}


class Item(pydantic.BaseModel):
    port: int = pydantic.Field(ge=0, le=99999)
    color: str = pydantic.Field(max_length=8)


@pytest.fixture(scope="module")
def hermes():
    with served.client(template=HERMES) as client:
        yield client


def asked(content: str = RECORD, **fields) -> dict:
    return {"model": "pair", "messages": [{"role": "user", "content": content}], "max_tokens": 200} | fields


def schema_of(model: type[pydantic.BaseModel]) -> dict:
    return openai.lib._pydantic.to_strict_json_schema(model)


# ---------------------------------------------------------------------------------------------- formats


def test_a_parsed_answer_is_that_of_generate(client):
    fields = {"temperature": 1, "seed": 5}
    done = client.chat.completions.parse(response_format=Item, **asked(**fields))
    assert isinstance(done.choices[0].message.parsed, Item)
    with client.chat.completions.stream(response_format=Item, **asked(**fields)) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == done.choices[0].message.parsed
    grammar = dflash.Grammar.json_schema(schema_of(Item))
    assert done.choices[0].message.content == direct(
        prompt_ids(RECORD), grammar=grammar, max_new_tokens=200, temperature=1.0, seed=5
    )[0]  # fmt: skip


FORMS = {
    "object": ({"response_format": {"type": "json_object"}}, r"(?s)\{.*\}"),
    "guided_regex": ({"guided_regex": "(ab|c){3}-[0-9]"}, "(ab|c){3}-[0-9]"),
    "guided_json": ({"guided_json": json.dumps({"const": [1]})}, r"\[\s*1\s*\]"),
    "guided_grammar": ({"guided_grammar": 'start: ("ab" | "c") "d"'}, "(ab|c)d"),
    "structured_outputs": ({"structured_outputs": {"regex": "/x{2}}"}}, "/xx}"),
}


@pytest.mark.parametrize(("fields", "pattern"), FORMS.values(), ids=FORMS)
def test_texts_and_chats_take_every_form(client, fields, pattern):
    chatted = client.chat.completions.create(**asked(extra_body=fields)).choices[0]
    continued = client.completions.create(model="pair", prompt=RECORD, max_tokens=200, extra_body=fields).choices[0]
    for text, reason in ((chatted.message.content, chatted.finish_reason), (continued.text, continued.finish_reason)):
        assert reason == "stop"
        assert re.fullmatch(pattern, text)


# ---------------------------------------------------------------------------------------------- tools


def test_a_named_function_is_called(hermes):
    call = asked(tools=TOOLS, tool_choice=STORE, seed=2, temperature=1)
    done = hermes.chat.completions.create(**call).choices[0]
    assert done.finish_reason == "tool_calls"
    assert done.message.content is None
    (made,) = done.message.tool_calls
    assert made.function.name == "store"
    assert json.loads(made.function.arguments).keys() == {"color", "port"}
    # In a stream: the name once, then the arguments in pieces.
    deltas = [chunk.choices[0] for chunk in hermes.chat.completions.create(**call, stream=True)]
    pieces = [piece for delta in deltas for piece in delta.delta.tool_calls or ()]
    assert [piece.index for piece in pieces] == [0] * len(pieces)
    assert [(piece.function.name, piece.type) for piece in pieces] == [("store", "function")] + [(None, None)] * (
        len(pieces) - 1
    )
    assert pieces[0].id.startswith("call_")
    assert "".join(piece.function.arguments for piece in pieces) == made.function.arguments
    assert deltas[-1].finish_reason == "tool_calls"
    assert not any(delta.delta.content for delta in deltas)


def test_several_calls_may_be_written(client):
    unlikely = {str(pair()[2].eos_token_id): -100}
    call = asked(tools=TOOLS[1:], tool_choice="required", max_tokens=60, logit_bias=unlikely)
    (choice,) = client.chat.completions.create(**call).choices
    made = choice.message.tool_calls
    assert choice.finish_reason == "length"
    assert len(made) > 1
    assert len({one.id for one in made}) == len(made)
    assert all(json.loads(one.function.arguments) == {} for one in made[:-1])


def test_free_answers_are_text_until_a_call_begins(hermes):
    plain = hermes.chat.completions.create(**asked()).choices[0].message.content
    text = hermes.chat.completions.create(**asked(tools=TOOLS, tool_choice="none")).choices[0]
    assert (text.message.content, text.message.tool_calls, text.finish_reason) == (plain, None, "stop")
    free = hermes.chat.completions.create(**asked(tools=TOOLS)).choices[0]
    assert free.message.tool_calls is None
    assert free.message.content


CALLED = '<tool_call>\n{"name": "store", "arguments": {"color": "blue", "port": 7}}\n</tool_call>'
LIST = '<tool_call>\n{"name": "list_all", "arguments": {}}\n</tool_call>'
WRONG = CALLED.replace("blue", "red")
# Request, reasoning of the prompt, and which texts are whole answers, beginnings of one, or neither.
GRAMMARS = {
    "free": (
        {}, "",
        ["", "hi", CALLED, f"hi {CALLED}", f"{CALLED}\n{LIST} bye", "<tool_call"], ["<tool_call>", CALLED[:-3]],
        [WRONG, "<tool_call> hi", f"a{CALLED}\n{WRONG}"],
    ),
    "one": ({"parallel_tool_calls": False}, "", ["hi", f"hi {CALLED}"], [], [f"{CALLED}\n{LIST}", f"{LIST}a", WRONG]),
    "required": ({"tool_choice": "required"}, "", [CALLED, f"{LIST}\n{CALLED}"], ["<tool", ""], ["hi", WRONG]),
    "required one": (
        {"tool_choice": "required", "parallel_tool_calls": False}, "", [CALLED, LIST], [], [f"{LIST}\n{CALLED}"]
    ),
    "or JSON": ({"response_format": {"type": "json_object"}}, "", ['{"a": 1}', LIST, f"{LIST}\n{LIST}"], [], ["hi"]),
    "after reasoning": (
        {"tool_choice": "required"}, "begun", [f"{WRONG}</think>\n\n{CALLED}"], [CALLED, "hi"], [f"</think>{WRONG}"]
    ),
    "free after reasoning": (
        {}, "begun", [f"<tool_call></think>{CALLED}", "a</think>b"], ["a"], [f"</think>{WRONG}"]
    ),
    "after reasoning or none": (
        {}, "optional", [f"<think><tool_call></think>{CALLED}", "hi", CALLED], ["<think>a"],
        [f"<think></think>{WRONG}", WRONG],
    ),
    "schema after reasoning or none": (
        {"guided_json": {"const": 1}, "tools": None}, "optional", ["1", "<think>a</think>\n\n1"], ["<think>1"], ["a"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "reasoning", "whole", "begun", "wrong"), GRAMMARS.values(), ids=GRAMMARS)
def test_answers_keep_to_what_was_asked(fields, reasoning, whole, begun, wrong):
    request, tokenizer = ChatRequest.model_validate(chat(**{"tools": TOOLS} | fields)), pair()[2]
    tools = read_tools(request, TOOL_FORMS["hermes"], [])
    grammar = answer_grammar(request, EncodedPrompt([], "", reasoning), tools, [], REASONING_FORMS["think"])
    tokens = from_tokenizer(tokenizer, eos_token=[tokenizer.eos_token_id])
    for text in (*whole, *begun, *wrong):
        matcher = LLMatcher(tokens, grammar.source, log_level=0)
        fits = matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False))
        assert fits == (text not in wrong), text
        assert (fits and matcher.is_accepting()) == (text in whole), text


def written(service, body: dict) -> str:
    """Ask for an answer; return what the chat template wrote for it."""
    seen, tokenizer = [], service.reader.tokenizer
    render = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *a, **k: seen.append(render(*a, **k)) or seen[-1]
    response = ask(service, CHAT, {"max_tokens": 2} | body)
    del tokenizer.apply_chat_template
    assert response.status_code == 200, response.text
    return seen[-1]


def test_arguments_that_are_no_object_are_refused():
    with serving(template=HERMES) as service:
        for given in ([], 0, False, [1], "[]", 3.5):
            call = {"id": "call_1", "type": "function", "function": {"name": "store", "arguments": given}}
            said = [*chat("hi")["messages"], {"role": "assistant", "tool_calls": [call]}, *chat("hi")["messages"]]
            refused(ask(service, CHAT, {"messages": said}), "arguments")


LISTED = "<tools>" + json.dumps({"type": "function", "function": {"name": "list_all"}}) + "</tools>"


NAMED = {"default": "{% for m in messages %}{{ m.content }}{% endfor %}", "tool_use": HERMES}
PARTS = HERMES.replace("message.content", "message.content | map(attribute='text') | join('+')")


@pytest.mark.parametrize(("template", "tools", "result", "givens"), [
    (HERMES, TOOLS[1:], "do\nne", ['{"port": 3}', {"port": 3}, "", " ", "null", None, "nothing"]),
    (NAMED, TOOLS[1:], "do\nne", ["null"]), (NAMED, None, "do\nne", ['{"port": 3}']),
    (PARTS, None, "do+ne", [{"port": 3}]),
], ids=["Hermes", "named, tools", "named", "parts"])  # fmt: skip
def test_a_conversation_with_calls_is_written_by_the_template(template, tools, result, givens):
    parts = [{"type": "text", "text": text} for text in ("do", "ne")]
    with serving(template=template) as service:
        assert service.reader.tool_form == TOOL_FORMS["hermes"]
        for given in givens:
            function = {"name": "store"} | ({} if given == "nothing" else {"arguments": given})
            call = {"id": "call_1", "index": 0, "function": function}
            messages = [
                *chat("hi")["messages"], {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_1", "content": parts},
            ]  # fmt: skip
            shown = '{"port": 3}' if "port" in str(given) else "{}"
            calls = f'\n<tool_call>\n{{"name": "store", "arguments": {shown}}}\n</tool_call>'
            text = written(service, {"messages": messages, "tools": tools})
            assert text == f"{LISTED * bool(tools)}hi{calls}<tool_response>{result}</tool_response>\n=>\n"


def test_a_template_that_the_form_of_calls_is_not_known_of_gets_what_it_asks_for():
    template = (
        "{% for t in tools %}{{ t.function.description + t.function.name }}{% endfor %}{% for m in messages %}"
        "{% if m.role == 'tool' and m.name is not defined %}{{ raise_exception('no name') }}{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments + c.id }}{% endfor %}"
        "{{ m.name }}{{ m.tool_call_id }}{% endfor %}"
    )
    call = {"id": "call_123456789", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages = [
        *chat("hi")["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "done"},
    ]
    with serving(template=template) as service:
        text = written(service, {"messages": messages, "tools": TOOLS[1:], "tool_choice": "required"})
    assert text == 'list_allhif{"a":1}123456789donef123456789'


def test_a_template_that_loses_the_users_text_is_not_served():
    with pytest.raises(ValueError, match="the chat template for tools shows no text of user messages"):
        serve(template={"default": HERMES, "tool_use": "{% for m in messages %}{{ m.role }}{% endfor %}"})


def test_json_ends_with_the_tokenizers_eos_if_the_config_has_none(monkeypatch):
    monkeypatch.setattr(pair()[0].generation_config, "eos_token_id", None)
    with serving() as service:
        body = chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}})
        (choice,) = ask(service, CHAT, body).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("1", "stop")
        text = ask(service, CHAT, chat(max_tokens=99)).json()["choices"][0]
        assert text["finish_reason"] == "length"  # as transformers' generate does without a stop token


# ---------------------------------------------------------------------------------------------- reasoning

THINKING = HERMES.replace("'\\n=>\\n'", "'\\n=>\\n' + ('<think>' if thinks else '')") + "{#- </think> #}"


def test_a_grammar_does_not_bind_the_reasoning():
    with serving(template=THINKING) as service:
        begun, optional = (
            ask(service, CHAT, asked("a", guided_regex="<[0-9]>", chat_template_kwargs={"thinks": thinks})).json()
            for thinks in (True, False)
        )
    (choice,) = begun["choices"]  # the pair never ends its reasoning
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "")
    assert len(choice["message"]["reasoning_content"]) > 20
    (choice,) = optional["choices"]
    assert re.fullmatch("<[0-9]>", choice["message"]["content"])


def test_a_schema_binds_what_follows_a_thought_whatever_is_drafted(monkeypatch):
    """The end of a thought is several tokens, and drafts may cross it."""
    apply, end = LogitRules.apply, pair()[2].encode("</think>", add_special_tokens=False)

    def ending(rules, logits, block, state):
        first = 1 + state.length - state.prompt_length  # of a row's logits, in its answer
        for row, number in enumerate(first.tolist()):
            for at, token in enumerate(end, 6 - number):
                if 0 <= at < logits.shape[1]:
                    logits[row, at, token] = 1e4
        return apply(rules, logits, block, state)

    assert len(end) > 1
    monkeypatch.setattr(LogitRules, "apply", ending)
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"enum": ["Oslo", "Rome"]}}}
    bodies = [
        asked("a", response_format=form, temperature=1, seed=seed, max_tokens=60, chat_template_kwargs={"thinks": True})
        for seed in range(5)
    ]
    found = []
    for options in ({}, {"block_size": 1}):
        with serving(template=THINKING, **options) as service:
            for body in bodies:
                whole = ask(service, CHAT, body).json()["choices"][0]
                deltas = [chunk["choices"][0]["delta"] for chunk in chunks(ask(service, CHAT, body | {"stream": True}))]
                texts = [whole["message"].get(field) or "" for field in ("reasoning_content", "content")]
                assert whole["finish_reason"] == "stop"
                assert json.loads(texts[1]) in ("Oslo", "Rome")
                assert texts[0]
                streamed = ["".join(d.get(field) or "" for d in deltas) for field in ("reasoning_content", "content")]
                assert streamed == texts
                found.append(texts)
    assert found[:5] == found[5:]


# ---------------------------------------------------------------------------------------------- refusals

BAD = {
    "schema": ({"response_format": {"type": "json_schema"}}, "response_format", "must be given there"),
    "not JSON": ({"guided_json": "{"}, "guided_json", "Expecting"),
    "regex": ({"guided_regex": "(a"}, "guided_regex", "cannot be used"),
    "other form": ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs", "'json', 'regex' or 'grammar'"),
    "two forms": ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "give one of guided_json and guided_regex"),
    "both": ({"guided_regex": "a", "tools": TOOLS, "tool_choice": STORE}, "guided_regex", "combined with tools"),
    "least": ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "cannot be combined with guided_regex"),
    "stop": ({"guided_regex": "a", "stop_token_ids": [17]}, "stop_token_ids", "are text to this tokenizer"),
    "no tools": ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    "twice": ({"tools": TOOLS[1:] * 2, "tool_choice": "required"}, "tools", "a name of its own"),
    "arguments": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
         "tool_choice": "required"}, "tools", 'tools.0.function.parameters: "type" must be "object"',
    ),
    "result": ({"messages": [{"role": "tool", "content": ""}]}, "messages", "must have it"),
}  # fmt: skip


LOOKS = {"type": "string", "pattern": "^(?=b)[a-c]{3}$"}
UNLIKE = {  # a value's schema, words of the warning, and of the refusal where it is strict
    "lookahead": (LOOKS, r'pattern "^(?=b)[a-c]{3}$"', "look-ahead"),
    "name": ({"type": "object", "patternProperties": {"^(?!a)": {}}}, 'patternProperties "^(?!a)"', "look-ahead"),
    "reference": ({"type": "string", "pattern": r"(a)\1"}, r'pattern "(a)\\1"', "backreferences"),
    "multiple": ({"type": "integer", "multipleOf": 999983}, "multipleOf 999983", "must be at most 100000"),
    "uniqueItems": ({"type": "array", "uniqueItems": True, "maxItems": 1}, "uniqueItems", "uniqueItems"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, "propertyNames", "propertyNames"),
    "format": ({"type": "string", "format": "color", "maxLength": 3}, "format: color", "Unknown format: color"),
    "oneOf": ({"oneOf": [{"const": 1}, {"const": 2}]}, "oneOf not fully supported", "oneOf"),
    "if, not": ({"enum": [1], "if": {}, "then": {"enum": [1]}, "not": {}}, *['["if", "not", "then"]'] * 2),
}


@pytest.mark.parametrize(("value", "words", "refusal"), UNLIKE.values(), ids=UNLIKE)
def test_what_a_grammar_cannot_say_is_left_out_with_a_warning_or_refused_where_strict(service, value, words, refusal):
    parameters = {"type": "object", "properties": {"a": value}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = {"tools": [tool], "tool_choice": "required"}
    response = ask(service, CHAT, chat(SUM, **asked, max_tokens=1))
    assert response.status_code == 200, response.text
    warning, unshown = response.json()["warnings"]
    assert "does not show them" in unshown
    assert warning.startswith("tools.0.function.parameters: not enforced: ")
    assert words in warning
    assert json.loads(response.headers["x-dflash-warnings"]) == [warning, unshown]
    tool["function"]["strict"] = True
    refused(ask(service, CHAT, chat(SUM, **asked)), refusal)
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": parameters}}
    events = ask(service, CHAT, chat(SUM, response_format=form, max_tokens=1, stream=True))
    assert words in json.loads(events.headers["x-dflash-warnings"])[0]
    assert words in json.loads(events.text.split("data: ")[1])["warnings"][0]


def test_the_header_of_warnings_is_bounded(service):
    names = {f"a{i}": {"type": "string", "pattern": f"(?=é{i}){'€' * 300}"} for i in range(100)}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"type": "object", "properties": names}}}
    response = ask(service, CHAT, chat(SUM, response_format=form, max_tokens=1))
    assert len(response.headers["x-dflash-warnings"]) <= 2048
    shown, warnings = json.loads(response.headers["x-dflash-warnings"]), response.json()["warnings"]
    assert 0 < len(shown) < len(warnings) <= 16
    assert shown == warnings[: len(shown)]


DEEP = functools.reduce(lambda inner, _: {"anyOf": [inner]}, range(90), {"type": "null"})


@pytest.mark.parametrize("wrong", [DEEP, {"type": "any"}, {"x-guidance": 3}, {"$ref": "http://a/b"}], ids=str)
def test_a_schema_that_cannot_be_used_fails_forced_calls_only(wrong):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": wrong}} | (
        wrong if "x-guidance" in wrong else {}
    )}}  # fmt: skip
    form = TOOL_FORMS["hermes"]
    read, warnings = (lambda **fields: read_tools(ChatRequest.model_validate(chat(**fields)), form, warnings)), []
    with pytest.raises(ApiError, match=r"tools\.0\.function\.parameters: "):
        read(tools=[tool], tool_choice="required")
    tools = read(tools=[*TOOLS, tool | {"function": tool["function"] | {"strict": False}}])
    assert [*tools.schemas] == ["store", "list_all", "f"]
    assert warnings[0].startswith("tools.2.function.parameters: not enforced: ")
    assert [*read(tools=[tool, *TOOLS], tool_choice=STORE).schemas] == ["store"]


@pytest.mark.parametrize(("fields", "param", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_followed_is_refused(service, fields, param, message):
    assert refused(ask(service, CHAT, chat(SUM, **fields)), message)["param"] == param


# ---------------------------------------------------------------------------------------------- splitting

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\n</tool_call>\\"", "b": [{}]}}\n</tool_call>'
ARGUMENTS = '{"a": "}\\n</tool_call>\\"", "b": [{}]}'
SPLITS = [
    (f"<tool one{CALL}\n{CALL}\nend <tool", "<tool_call>", "<tool oneend <tool", [ARGUMENTS] * 2, True),
    (f"{CALL}{CALL[:-30]}", "<tool_call>", "", [ARGUMENTS, CALL[CALL.index('{"a"') : -30]], False),
    ('{"name": "f", "arguments": {}}\n{"name": "f", "arguments":  {"a": 1}}', "", "", ["{}", '{"a": 1}'], True),
    ('{"name": "f', "", '{"name": "f', [], False),
]


@pytest.mark.parametrize(("text", "mark", "content", "arguments", "is_whole"), SPLITS)
@given(places=st.lists(st.integers(0, 150), max_size=30))
def test_calls_are_split_off_wherever_pieces_end(text, mark, content, arguments, is_whole, places):
    splitter, shown, joined = CallText(TOOL_FORMS["hermes" if mark else "json"], {"f": {}}), "", {}
    for piece, is_last in cut(text, places):
        new, pieces = splitter.push(piece, is_last=is_last)
        shown += new
        for piece in pieces:
            index, function = piece["index"], piece["function"]
            assert ("id" in piece) == (function.get("name") == "f") == (index not in joined)
            joined[index] = joined.get(index, "") + function["arguments"]
    assert shown == content
    assert [*joined.values()] == [call["function"]["arguments"] for call in splitter.calls] == arguments
    assert splitter.is_whole == is_whole
