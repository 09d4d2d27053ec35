"""Whatever a chat template reads, a prompt has every text of its conversation, or the conversation is refused."""

import itertools
import json
import re
from collections.abc import Iterator

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import spoken

from dflash.loading import render_chat

LOOP = "{% for p in m.content %}{{ p.text }}{% endfor %}"
CONTENTS = {
    "string": "{{ m.content }}",
    "trimmed": "{{ m.content | trim }}",
    "parts": LOOP,
    "typed parts": LOOP.replace("content %", "content if p.type == 'text' %"),
    "either": "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}",
    "first part": "{{ m.content[0].text }}",
    "added": "{{ m.content + '' }}",
    "nothing": "",
    "refused": "{{ raise_exception('no ' + m.role) }}",
}
EACH = "{%% for t in tools %%}{{ t.function.name %s }}{%% endfor %%}"
TOOLS = {
    "nothing": "",
    "loop": EACH % "",
    "whole": EACH % "+ t.function.description",
    "guarded": "{% if tools is not none %}" + EACH % "" + "{% endif %}",
    "counted": "{{ tools | length }}",
}
CALLS = {
    "nothing": "",
    "object": "{{ c.function | tojson }}",
    "items": "{{ c.function.name }}{% for key, value in c.function.arguments.items() %}{{ key ~ value }}{% endfor %}",
    "text": "{{ c.function.name + c.function.arguments }}",
    "printed": "{{ c.function.name }}{{ c.function.arguments }}",
    "either": "{{ c.function.name }}{{ c.function.arguments if c.function.arguments is string else '%' }}",
}
ROLES = ("system", "user", "assistant", "tool")
DUMPED = re.compile(r"""'text': |\{'|\\\"""")  # a list or an object as Python prints it, JSON in JSON


@st.composite
def templates(draw) -> str:
    branches = [
        f"{{% if m.role == '{role}' %}}{CONTENTS[draw(st.sampled_from([*CONTENTS]))]}{{% endif %}}" for role in ROLES
    ]
    calls = "{% for c in m.tool_calls or [] %}" + CALLS[draw(st.sampled_from([*CALLS]))] + "{% endfor %}"
    tools = TOOLS[draw(st.sampled_from([*TOOLS]))]
    return f"{tools}{{% for m in messages %}}<{{{{ m.role }}}}>{''.join(branches)}{calls}{{% endfor %}}"


@st.composite
def conversations(draw) -> tuple[list[dict], list[str]]:
    """Draw messages, and the words that a prompt must have."""
    words = (f"w{number}w" for number in itertools.count())
    messages, used = [], []
    for role in draw(st.sampled_from(["u", "su", "uau", "uct", "suctau"])):
        said = list(itertools.islice(words, draw(st.integers(1, 3)))) * (role != "c")
        used += said
        parts = [{"type": "text", "text": word} for word in said]
        message = {"role": {"c": "assistant"}.get(role) or next(name for name in ROLES if name[0] == role)}
        message["content"] = parts if draw(st.booleans()) else " ".join(said)
        if role == "t":
            message["tool_call_id"] = "call00000"
        if role == "c":
            name, key, value = itertools.islice(words, 3)
            used += [name, key, value]
            arguments = {key: value} if draw(st.booleans()) else json.dumps({key: value})
            call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
            message["tool_calls"] = [call]
        messages.append(message)
    return messages, used


def in_form(message: dict, form: str, as_text: bool) -> dict:
    content = message["content"]
    said = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    if isinstance(content, str) or "list" not in form:
        content = said if "string" in form else [{"type": "text", "text": said}]
    calls = []
    for call in message.get("tool_calls", ()):
        given = call["function"]["arguments"]
        given = given if isinstance(given, str) == as_text else json.dumps(given) if as_text else json.loads(given)
        calls.append({**call, "function": {**call["function"], "arguments": given}})
    return message | {"content": content} | ({"tool_calls": calls} if calls else {})


def whole_prompts(tokenizer, messages: list[dict], words: list[str], tools: list[dict] | None) -> Iterator[str]:
    """Yield what transformers writes with every text, in any form of the messages of each role."""
    roles = list(dict.fromkeys(message["role"] for message in messages))
    has_calls = any("tool_calls" in message for message in messages)
    named = [{}]
    if isinstance(tokenizer.chat_template, dict) and tools is None:  # calls may be written by the template for tools
        named = [{"chat_template": "default"}, *named * has_calls]
    whole = [{**tool, "function": {"description": ""} | tool["function"]} for tool in tools or ()]
    forms = [
        ("string", "part", "list or string", "list or part")
        if any(m["role"] == role and not isinstance(m["content"], str) for m in messages)
        else ("string", "part")
        for role in roles
    ]
    for chosen in itertools.product(*forms):
        for as_text, shown, choice in itertools.product((False, True)[: 1 + has_calls], (tools, whole), named):
            chat = [in_form(message, chosen[roles.index(message["role"])], as_text) for message in messages]
            try:
                text = tokenizer.apply_chat_template(chat, tools=shown, tokenize=False, **choice)
            except Exception:
                continue
            if all(word in text for word in words) and not DUMPED.search(text):
                yield text


@pytest.mark.long
@examples(20)
@given(st.data())
def test_a_prompt_has_every_text_or_is_refused(data):
    template = data.draw(templates())
    if data.draw(st.booleans()):
        template = {"default": template, "tool_use": data.draw(templates())}
    tool = {"type": "function", "function": {"name": "find"} | data.draw(st.sampled_from([{}, {"description": "it"}]))}
    tools = data.draw(st.sampled_from([None, [tool]]))
    messages, words = data.draw(conversations())
    tokenizer = spoken(template)
    whole = whole_prompts(tokenizer, messages, words, tools)
    try:
        text = render_chat(tokenizer, messages, True, {"tools": tools})
    except ValueError:
        assert next(whole, None) is None
    else:
        assert text in whole


USER = {"role": "user", "content": "w1"}
CALL = {"type": "function", "function": {"arguments": {}}}


@pytest.mark.parametrize(("message", "tools", "wrong"), [
    (USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, None, "message 1 must be text, or"),
    (USER | {"content": [{"type": "image", "text": "w1"}]}, None, "message 1 must be text, or have only parts"),
    (USER | {"content": ["w1"]}, None, "message 1 must be text, or have only parts of text, got 'w1'"),
    (USER | {"content": 3}, None, "message 1 must be a list, got 3"),
    ({"content": "w1"}, None, "message 1 must be an object with a role"),
    ({"role": "assistant", "content": "", "tool_calls": [CALL]}, None, "tool_calls of message 1 must be objects"),
    (USER, [{"name": "find"}], "tools must be objects with a function that has a name"),
    (USER, ["find"], "tools must be objects with a function that has a name"),
    (USER, {"function": {"name": "find"}}, "tools must be a list"),
])  # fmt: skip
def test_what_is_no_text_is_an_error(message, tools, wrong):
    with pytest.raises(ValueError, match=wrong):
        render_chat(spoken("{% for m in messages %}{{ m.content }}{% endfor %}"), [message], True, {"tools": tools})


TALK = [("system", "S"), ("user", "U1"), ("assistant", "A1"), ("system", "LATE"), ("user", "U2")]
PARTS = [{"role": "user", "content": [{"type": "text", "text": text} for text in "PQR"]}]
CALLS_OF_TWO = [{"function": {"name": name}} for name in "fg"]
TWO_CALLS = [{"role": "user", "content": "U1"}, {"role": "assistant", "content": "", "tool_calls": CALLS_OF_TWO}]
LOSING = {  # what is lost, by which body of a loop over messages, and where
    "a later system message": (
        "{% if m.role != 'system' or loop.first %}{{ m.content }};{% endif %}",
        [{"role": role, "content": text} for role, text in TALK], "loses text of message 4",
    ),
    "a part": ("{{ m.content[0].text + m.content[1].text }}", PARTS, "text of"),
    "the last message": (
        "{{ m.content if loop.index < 3 }}",
        [{"role": role, "content": text} for role, text in TALK[1:3] + TALK[4:]], "loses text of message 3",
    ),
    "the end of a text": ("{{ m.content[:5] }}", TWO_CALLS[:1], "shows no text of user messages"),
    "a second call": (
        "{{ m.content }}{{ m.tool_calls[0].function | tojson if m.tool_calls }}", TWO_CALLS, "loses a call of message 2"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "message"), LOSING.values(), ids=LOSING)
def test_a_template_that_loses_a_text_of_this_conversation_is_refused(template, messages, message):
    with pytest.raises(ValueError, match=message):
        render_chat(spoken("{% for m in messages %}" + template + "{% endfor %}"), messages, True)
