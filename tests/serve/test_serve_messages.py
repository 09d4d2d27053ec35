"""Anthropic's Messages API, through the package of that name where it can say what was meant."""

import base64

import anthropic
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


NOTES = {"type": "text", "media_type": "text/plain", "data": "Größe: 7"}
ENCODED = NOTES | {"type": "base64", "data": base64.b64encode("Größe: 7".encode()).decode()}
DOCUMENTS = [{"type": "document", "source": source, "title": "Notes", "citations": {}} for source in (NOTES, ENCODED)]
CALL = {"type": "tool_use", "id": "c", "name": "weather", "input": {"city": "Oslo"}}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}
CALLED = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def user(content) -> dict:
    return {"role": "user", "content": content}


def result(*content) -> dict:
    return {"type": "tool_result", "tool_use_id": "c", "content": [*content]}


SAID = {  # messages, and those of the chat that they are
    "turns of the user are one": ([user("One."), user("Two.")], [user("One.\nTwo.")]),  # as Claude Code sends them
    **{
        f"a document as {document['source']['type']}": (
            [user([document, text("Why?")]), {"role": "assistant", "content": [CALL]}, user([result(document)])],
            [user("Notes\nGröße: 7\nWhy?"), {"role": "assistant", "tool_calls": [CALLED]},
             {"role": "tool", "tool_call_id": "c", "content": "Notes\nGröße: 7"}],
        )
        for document in DOCUMENTS
    },
    "thoughts, calls and results": (
        [user("Hi."), {"role": "assistant", "content": [THOUGHT, text("I look."), CALL]},
         user([result(text("sunny")), text("And now?")])],
        [user("Hi."), {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALLED]},
         {"role": "tool", "tool_call_id": "c", "content": "sunny"}, user("And now?")],
    ),
}  # fmt: skip


def test_messages_are_those_of_a_chat():
    system = {"role": "system", "content": "Be brief."}
    tools = [{"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": SCHEMA}}]
    with serving(template=ROLES) as service:
        for name, (messages, same) in SAID.items():
            asked = {"model": "pair", "system": [text("Be brief.")], "messages": messages, "tools": [TOOL]}
            found = ask(service, f"{PATH}/count_tokens", asked).json()
            assert found == {"input_tokens": count(service, [system, *same], tools=tools)}, name


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
