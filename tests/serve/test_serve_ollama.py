"""Ollama's API, through the package of that name where it can say what was meant."""

import json
from datetime import datetime

import ollama
from served import QUESTION, SCHEMA, SUM, TRIP, ask, chat, count, live, without

CHAT, GENERATE = "/api/chat", "/api/generate"
ROLES = "{% for m in messages %}[{{ m.role }}{% if m.name %}{{ m.tool_call_id }}{% endif %}]{{ m.content }}{% endfor %}"
THINKS = "{{ messages[-1].content }}{{ '\n=>\n' if enable_thinking is false else '\n=>\n<think>' }}{# </think> #}"


def client(server):
    return ollama.Client(host=server.url.removesuffix("/v1"))


def both(server, **fields):
    """Return the client's answer, asked for whole and as a stream, which must be the same but for its times."""
    fields["options"] = {"temperature": 0} | fields.get("options", {})
    with client(server) as asking:
        call = asking.generate if "prompt" in fields else asking.chat
        whole = call(model="pair", **fields)
        *parts, end = call(model="pair", **fields, stream=True)
    assert not any(part.done for part in parts)
    changing = ("created_at", "load_duration", "total_duration", "prompt_eval_duration", "eval_duration")
    expected, found = (without(record.model_dump(exclude_none=True), *changing) for record in (whole, end))
    message = found.get("message", found)
    for part in parts:
        said = part.model_dump(exclude_none=True)
        for name, value in said.get("message", said).items():
            if name in ("content", "response", "thinking", "tool_calls"):
                message[name] = message[name] + value if name in message else value
    assert found == expected
    for record in (whole, end):
        assert record.total_duration >= record.prompt_eval_duration + record.eval_duration > 0
        assert datetime.fromisoformat(record.created_at).tzinfo is not None
    return whole


def test_an_answer_is_the_chats_answer(server, service):
    answer = ask(service, "/v1/chat/completions", chat(temperature=0.0)).json()
    found = both(server, messages=QUESTION)
    assert found.message.content == answer["choices"][0]["message"]["content"]
    assert (found.message.role, found.model, found.done, found.done_reason) == ("assistant", "pair", True, "stop")
    assert found.prompt_eval_count == answer["usage"]["prompt_tokens"]
    assert found.eval_count == answer["usage"]["completion_tokens"]
    assert both(server, prompt=SUM).response == found.message.content
    short = both(server, messages=QUESTION, options={"num_predict": 3})
    assert (short.done_reason, short.eval_count) == ("length", 3)
    # A stream unless asked otherwise, as curl sends it in Ollama's own examples
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    body = {"model": "pair:latest", "messages": QUESTION, "options": {"temperature": 0}}
    response = ask(service, CHAT, body, headers=form)
    assert response.headers["content-type"] == "application/x-ndjson"
    records = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(record["message"]["content"] for record in records) == found.message.content
    assert {record["model"] for record in records} == {"pair:latest"}
    assert ask(service, CHAT, body, headers=form | {"Origin": "http://a"}).status_code == 400


def test_a_raw_prompt_is_continued(server, service):
    answer = ask(service, "/v1/completions", {"prompt": SUM, "temperature": 0, "max_tokens": -1}).json()
    assert both(server, prompt=SUM, raw=True).response == answer["choices"][0]["text"]
    assert isinstance(json.loads(both(server, prompt=SUM, raw=True, format="json").response), dict)


def test_requests_for_nothing_find_the_model_loaded(server):
    with client(server) as asking:
        for found in (asking.generate("pair"), asking.generate("pair", keep_alive=0), asking.chat("pair")):
            assert (found.done, found.done_reason) == (True, "load")


def test_tools_are_called_with_objects_and_a_call_that_is_cut_short_is_left_out(service):
    tool = {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": SCHEMA}}
    body = {"messages": QUESTION, "tools": [tool], "tool_choice": "required", "options": {"temperature": 0}}
    found = ollama.ChatResponse(**ask(service, CHAT, body | {"stream": False}).json())
    (call,) = found.message.tool_calls
    assert (call.function.name, found.done_reason, found.message.content) == ("weather", "stop", "")
    assert call.function.arguments["city"] in ("Oslo", "Rome")
    *parts, end = [ollama.ChatResponse(**json.loads(line)) for line in ask(service, CHAT, body).text.splitlines()]
    assert [part.message.tool_calls for part in parts] == [[call]]
    assert end.message.tool_calls is None
    body["options"] |= {"num_predict": 12}
    cut = ask(service, CHAT, body | {"stream": False}).json()
    assert (cut["message"], cut["done_reason"]) == ({"role": "assistant", "content": ""}, "length")


def test_results_of_tools_go_back_to_their_calls():
    calls = [{"id": name, "function": {"name": name, "arguments": {"city": "Oslo"}}} for name in ("weather", "time")]
    results = [{"role": "tool", "tool_name": "time", "content": "noon"}, {"role": "tool", "content": "sunny"}]
    messages = [*QUESTION, {"role": "assistant", "thinking": "hm", "tool_calls": calls}, *results]
    same = [
        *QUESTION,
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "time", "name": "time", "content": "noon"},
        {"role": "tool", "tool_call_id": "weather", "content": "sunny"},
    ]
    with live(template=ROLES) as server:
        with client(server) as asking:
            assert asking.chat("pair", messages, options={"num_predict": 1}).done  # it sends no ids
        body = {"messages": messages, "stream": False, "options": {"num_predict": 1}}
        found = ask(server.service, CHAT, body).json()
        assert found["prompt_eval_count"] == count(server.service, same)


def test_thoughts_have_a_field_of_their_own():
    with live(template=THINKS) as server:
        found = both(server, messages=QUESTION, options={"num_predict": 12}).message
        assert found.thinking.strip()
        assert found.content == ""
        assert both(server, prompt=SUM, options={"num_predict": 12}).thinking == found.thinking
        assert both(server, messages=QUESTION, think=False).message.thinking is None
        with client(server) as asking:
            assert asking.show("pair").capabilities == ["completion", "tools", "thinking"]


def test_options_reach_the_engine(server):
    trip = {"messages": [{"role": "user", "content": TRIP}]}
    greedy = both(server, **trip).message.content
    assert both(server, **trip, options={"temperature": 1, "top_k": 1}).message.content == greedy
    assert both(server, **trip, options={"temperature": 1, "seed": 1}).message.content != greedy
    with client(server) as asking:  # each draws a seed
        answers = [asking.chat("pair", **trip, options={"temperature": 1, "seed": -1}) for _ in range(4)]
    assert len({answer.message.content for answer in answers}) > 1
    stop = greedy[len(greedy) // 2 :][:4]
    assert both(server, **trip, options={"stop": [stop]}).message.content == greedy[: greedy.index(stop)]


def test_log_probabilities_are_those_of_the_chat(service):
    fields = {"logprobs": True, "top_logprobs": 2}
    found = ask(service, CHAT, {"messages": QUESTION, "stream": False, "options": {"temperature": 0}} | fields).json()
    answer = ask(service, "/v1/chat/completions", chat(temperature=0) | fields).json()
    assert found["logprobs"] == answer["choices"][0]["logprobs"]["content"]


def test_the_model_is_listed_and_described(server, service):
    with client(server) as asking:
        (listed,), (running,), shown = asking.list().models, asking.ps().models, asking.show("pair:latest")
    assert (listed.model, running.name) == ("pair:latest", "pair:latest")
    assert listed.size == running.size > 0
    assert len(listed.digest) == 64
    assert shown.capabilities == ["completion", "tools"]
    assert shown.details == listed.details
    assert shown.modelinfo[f"{shown.details.family}.context_length"] == running.context_length == 512
    assert ask(service, "/api/show", {"name": "pair"}).status_code == 200
    assert [*map(int, ask(service, "/api/version", None).json()["version"].split("."))] >= [0, 6, 4]
    assert ask(service, "/", None, method="HEAD").status_code == 200
