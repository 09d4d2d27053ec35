"""Forms of tool calls and of reasoning: found in chat templates, parsed while they stream, kept to by grammars."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from served import chat, pair

from dflash.serve.answers import AnswerText
from dflash.serve.forms import REASONING_FORMS, TOOL_FORMS, CallText
from dflash.serve.prompts import EncodedPrompt, answer_grammar, read_tools
from dflash.serve.protocol import ChatRequest

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "more": {"type": "object"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
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
        text = json.dumps(value, separators=(",", ":")).replace('\\"', "'").replace('"', '<|"|>')
        text = text.replace('<|"|>x<|"|>:', "x:")
    return f"{form.key_head}{key}{form.key_mid}{text}{form.key_tail}".replace("$TYPE", kind).replace("$KEY", key)


def parsed(text, form, ends=(), reasoning=None):
    """Split an answer that comes in pieces; return its content, reasoning and calls."""
    answer, calls, content, thought = AnswerText(form=reasoning), CallText(form, FUNCTIONS), "", ""
    places = sorted({min(end, len(text)) for end in ends} | {len(text)})
    streamed: dict[int, str] = {}
    for start, end in zip([0, *places], places, strict=False):
        delta = answer.push(text[start:end], is_last=end == len(text))
        shown, pieces = calls.push(delta.content, is_last=end == len(text))
        content, thought = content + shown, thought + delta.reasoning
        for piece in pieces:
            streamed[piece["index"]] = streamed.get(piece["index"], "") + piece["function"]["arguments"]
    assert [*streamed.values()] == [call["function"]["arguments"] for call in calls.calls]
    made = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls.calls]
    return content, thought, made


def first(form) -> dict:
    return FIRST | {"city": "Oslo north"} if form.values == "gemma" else FIRST


@pytest.mark.parametrize("name", TOOL_FORMS)
@given(ends=st.lists(st.integers(0, 600), max_size=40))
def test_calls_of_every_form_are_parsed_wherever_pieces_end(name, ends):
    form = TOOL_FORMS[name]
    calls = [("weather", first(form)), ("now", {}), ("weather", SECOND)]
    before = "" if not form.mark else "I look."
    content, _, made = parsed(before + written(form, calls), form, ends)
    assert (content.strip(), made) == (before, calls)


@pytest.mark.parametrize("name", TOOL_FORMS)
def test_grammars_of_every_form_take_its_calls_and_no_others(name):
    form, tokenizer = TOOL_FORMS[name], pair()[2]
    tokens = from_tokenizer(tokenizer, eos_token=[tokenizer.eos_token_id])
    good = written(form, [("weather", first(form)), ("now", {})])
    wrong = [good.replace("Oslo", "Oslo").replace("weather", "rain"), good.replace('"C"', '"K"').replace(">C<", ">K<")]
    cases = {"required": [good], "auto": [good, "Hello."] + (["Hm. " + good] if form.mark else [])}
    for choice, texts in cases.items():
        request = ChatRequest.model_validate(chat(tools=TOOLS, tool_choice=choice))
        form_of = REASONING_FORMS["think"]
        grammar = answer_grammar(request, EncodedPrompt([], ""), read_tools(request, form, []), [], form_of)
        for text in [*texts, *(wrong if choice == "required" else ())]:
            matcher = LLMatcher(tokens, grammar.source, log_level=0)
            fits = matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False)) and matcher.is_accepting()
            assert fits == (text in texts or text == good), (choice, text)
