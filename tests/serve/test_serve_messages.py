"""Anthropic's Messages API, through the package of that name where it can say what was meant."""

import base64
import json

import anthropic
import pytest
from served import (
    QUESTION,
    ROLES,
    SCHEMA,
    THINKS,
    TRIP,
    ask,
    chat,
    count,
    direct,
    live,
    prompt_ids,
    serving,
    without,
)

PATH = "/v1/messages"
TOOL = {"name": "weather", "description": "Tell it.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}


def body(**fields):
    return {"model": "pair", "messages": QUESTION, "max_tokens": 300, "temperature": 0.0} | fields


def both(server, **fields):
    """Return the client's message, asked for whole and as a stream, which must be the same but for its id."""
    url = server.url.removesuffix("/v1")
    sent = body(**fields)
    sampling = {name: sent.pop(name) for name in ("temperature", "top_k") if name in sent}  # newer clients lack them
    sent["extra_body"] = sampling
    with anthropic.Anthropic(api_key="none", base_url=url, max_retries=0) as client:
        whole = client.messages.create(**sent)
        with client.messages.stream(**sent) as stream:
            streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.id.startswith("msg")
        assert message.usage.output_tokens > 0
    plain = [without(message.to_dict(exclude_none=True), "id", "usage") for message in (whole, streamed)]
    assert plain[0] == plain[1]  # but the second answer's prompt is cached
    return whole


def test_a_message_is_the_chats_answer(server, service):
    answer = ask(service, "/v1/chat/completions", chat(temperature=0.0)).json()
    found = both(server)
    assert [block.text for block in found.content] == [answer["choices"][0]["message"]["content"]]
    assert (found.role, found.type, found.model) == ("assistant", "message", "pair")
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
    usage = found.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == answer["usage"]["prompt_tokens"]
    assert usage.output_tokens == answer["usage"]["completion_tokens"]
    assert both(server, max_tokens=3).stop_reason == "max_tokens"


def test_a_stop_sequence_ends_the_answer_and_is_named(server):
    whole = both(server).content[0].text
    stop = whole[len(whole) // 2 :][:4]
    found = both(server, stop_sequences=["never written", stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == whole[: whole.index(stop)]


def test_a_tool_is_called_and_its_result_goes_back(server):
    call = both(server, tools=[TOOL], tool_choice={"type": "any"})
    (block,) = call.content
    assert (call.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "weather")
    assert block.input["city"] in ("Oslo", "Rome")
    assert both(server, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"}).content[0].name == "weather"
    # One that is cut short has no arguments that could be read
    short = ask(server.service, PATH, body(tools=[TOOL], tool_choice={"type": "any"}, max_tokens=12)).json()
    assert short["stop_reason"] == "max_tokens"
    assert [block["input"] for block in short["content"] if block["type"] == "tool_use"] in ([], [{}])
    # The conversation that follows is that of a chat
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "sunny"}]}
    said = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I look."}]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": [*said, block.to_dict()]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    asked = {"model": "pair", "system": [{"type": "text", "text": "Be brief."}], "messages": messages, "tools": [TOOL]}
    function = {"name": "weather", "arguments": json.dumps(block.input)}
    same = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": block.id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": block.id, "content": "sunny"},
        {"role": "user", "content": "And now?"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": SCHEMA}}]
    with serving(template=ROLES) as service:
        found = ask(service, f"{PATH}/count_tokens", asked).json()
        assert found == {"input_tokens": count(service, same, tools=tools)}


def test_turns_of_the_user_are_one():
    """Claude Code sends several; many templates take no role twice in a row."""
    asked = {"model": "pair", "messages": [{"role": "user", "content": text} for text in ("One.", "Two.")]}
    same = [{"role": "user", "content": "One.\nTwo."}]
    with serving(template=ROLES) as service:
        assert ask(service, f"{PATH}/count_tokens", asked).json() == {"input_tokens": count(service, same)}


@pytest.mark.parametrize("source", [
    {"type": "text", "media_type": "text/plain", "data": "Größe: 7"},
    {"type": "base64", "media_type": "text/plain", "data": base64.b64encode("Größe: 7".encode()).decode()},
])  # fmt: skip
def test_documents_of_text_are_text(source):
    document = {"type": "document", "source": source, "title": "Notes", "citations": {"enabled": True}}
    asked = {"model": "pair", "messages": [{"role": "user", "content": [document, {"type": "text", "text": "Why?"}]}]}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [document]}
    with serving(template=ROLES) as service:
        same = [{"role": "user", "content": "Notes\nGröße: 7\nWhy?"}]
        assert ask(service, f"{PATH}/count_tokens", asked).json() == {"input_tokens": count(service, same)}
        asked["messages"] = [{"role": "user", "content": [result]}]
        same = [{"role": "tool", "tool_call_id": "c", "content": "Notes\nGröße: 7"}]
        assert ask(service, f"{PATH}/count_tokens", asked).json() == {"input_tokens": count(service, same)}


def test_an_answer_follows_a_schema(server):
    config = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
    (block,) = both(server, output_config=config, cache_control={"type": "ephemeral"}).content
    assert json.loads(block.text)["city"] in ("Oslo", "Rome")


def test_thoughts_are_a_block_of_their_own():
    with live(template=THINKS) as server:
        (block,) = both(server, max_tokens=12).content
    assert block.type == "thinking"
    assert block.thinking.strip()


def test_settings_reach_the_engine(server):
    trip = {"messages": [{"role": "user", "content": TRIP}]}
    greedy = both(server, **trip).content[0].text
    assert both(server, **trip, temperature=1.0, top_k=1).content[0].text == greedy
    bodies = [body(**trip, temperature=1.0) for _ in range(4)]
    texts = {ask(server.service, PATH, each).json()["content"][0]["text"] for each in bodies}
    assert texts - {greedy}
    seeded = ask(server.service, PATH, body(**trip, temperature=1.0, seed=7, min_p=0.01)).json()
    expected = direct(prompt_ids(TRIP), max_new_tokens=300, temperature=1.0, seed=7, min_p=0.01)
    assert ([block["text"] for block in seeded["content"]], seeded.get("warnings")) == (expected, None)
