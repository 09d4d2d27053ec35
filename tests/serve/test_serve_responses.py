"""OpenAI's Responses API, through the package of that name."""

import json

import openai
import pytest
import served
from served import ROLES, SCHEMA, SUM, THINKS, ask, chat, count, serve, without

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "weather", "description": "Tell it.", "parameters": SCHEMA, "strict": False}


def both(client, **fields):
    """Return the client's response, asked for whole and as a stream, which must be the same but for its ids."""
    sent = {"model": "pair", "input": SUM, "temperature": 0.0, "max_output_tokens": 300} | fields
    whole = client.responses.create(**sent)
    with client.responses.stream(**sent) as stream:
        events = list(stream)
    streamed = events[-1].response
    written = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert written == whole.output_text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    changing = ("id", "call_id", "created_at", "usage")  # the second answer's prompt is cached
    plain = [without(found.to_dict(), *changing, "parsed", "parsed_arguments") for found in (whole, streamed)]
    assert plain[0] == plain[1]
    return whole


def test_a_response_is_the_chats_answer(client, service):
    answer = ask(service, "/v1/chat/completions", chat(temperature=0.0)).json()
    found = both(client)
    assert found.output_text == answer["choices"][0]["message"]["content"]
    assert (found.status, found.incomplete_details, found.object) == ("completed", None, "response")
    assert found.usage.output_tokens == answer["usage"]["completion_tokens"]
    assert found.usage.input_tokens == answer["usage"]["prompt_tokens"]
    short = both(client, max_output_tokens=3)
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_functions_are_called(client):
    found = both(client, tools=[TOOL], tool_choice="required")
    call = found.output[0]
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    cut = (both(client, tools=[TOOL], tool_choice="required", max_output_tokens=limit) for limit in range(8, 60, 4))
    short = next(response for response in cut if response.output)
    assert (short.status, short.output[-1].status) == ("incomplete", "incomplete")
    named = {"type": "function", "name": "weather"}
    assert both(client, tools=[TOOL], tool_choice=named).output[0].name == "weather"


def test_functions_of_a_namespace_are_called_in_it(client):
    """Codex has one for each MCP server."""
    space = {"type": "namespace", "name": "mcp__w", "tools": [TOOL, {"type": "custom", "name": "patch"}]}
    found = both(client, tools=[space], tool_choice="required")
    assert (found.output[0].name, found.output[0].namespace) == ("weather", "mcp__w")
    assert "tools[]: custom is not served here, left out" in found.warnings
    # The model is told of a call by its whole name
    call = {"type": "function_call", "call_id": "c", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    names = {"name": "weather", "namespace": "mcp__w"}, {"name": "mcp__w__weather"}, {"name": "weather"}
    with served.client(template=ROLES) as asking:
        given = [[{"role": "user", "content": SUM}, {**call, **name}, result] for name in names]
        told = [asking.responses.create(model="pair", input=each, max_output_tokens=1) for each in given]
    counts = [response.usage.input_tokens for response in told]
    assert counts[0] == counts[1] > counts[2]


def test_thoughts_are_an_item_of_their_own():
    with served.client(template=THINKS) as client:
        (item,) = both(client, max_output_tokens=12).output
    assert item.type == "reasoning"
    assert item.content[0].text.strip()


def test_items_become_the_messages_of_a_chat_and_a_response_goes_on():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi."}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "x", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}", "id": "fc"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]  # fmt: skip
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    same = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    service = serve(template=ROLES)
    with served.client(service=service) as asking:
        create = asking.responses.create
        first = create(model="pair", input=items, instructions="Hello.", max_output_tokens=5, temperature=0.0)
        told = [{"role": "system", "content": "Hello."}, *same]
        assert first.usage.input_tokens == count(service, told)
        # The next response has the conversation, and not its instructions
        later = create(model="pair", input="And?", previous_response_id=first.id, max_output_tokens=5)
        answered = {"role": "assistant", "content": first.output_text}
        told = [*same, answered, {"role": "user", "content": "And?"}]
        assert later.usage.input_tokens == count(service, told)
        # Two that continue the same response do not see each other
        called = {"type": "function_call", "call_id": "d", "name": "weather", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "d", "output": "rain"}
        for _ in range(2):
            branch = create(model="pair", input=[called, result], previous_response_id=first.id, max_output_tokens=2)
            calls = [{**call, "id": "d"}]
            heard = {"role": "tool", "tool_call_id": "d", "content": "rain"}
            told = [*same, {**answered, "tool_calls": calls}, heard]
            assert branch.usage.input_tokens == count(service, told)
        # One that was continued is one message
        begun = [{"role": "user", "content": SUM}, {"role": "assistant", "content": "The sum "}]
        whole = create(model="pair", input=begun, max_output_tokens=5, temperature=0.0)
        later = create(model="pair", input="And?", previous_response_id=whole.id, max_output_tokens=2)
        told = [{**begun[1], "content": "The sum " + whole.output_text}, {"role": "user", "content": "And?"}]
        assert later.usage.input_tokens == count(service, [begun[0], *told])
        hidden = create(model="pair", input="Hi.", store=False, max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="there is no response"):
            create(model="pair", input="And?", previous_response_id=hidden.id)
