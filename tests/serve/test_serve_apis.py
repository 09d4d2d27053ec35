"""Each API in its own form: what it refuses and leaves out, and an answer that fails in a stream."""

import json
import re
import threading

import pytest
from served import CHAT as OPENAI
from served import QUESTION, ROLES, SCHEMA, SUM, TEXT, Gate, ask, content, pair, refused, serving

from dflash import Receipt

MESSAGES, RESPONSES, CHAT, GENERATE = "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"
BODIES = {
    MESSAGES: {"model": "pair", "messages": QUESTION, "max_tokens": 4},
    RESPONSES: {"model": "pair", "input": SUM, "max_output_tokens": 4},
    CHAT: {"model": "pair", "messages": QUESTION, "options": {"num_predict": 4}, "stream": False},
    GENERATE: {"model": "pair", "prompt": SUM, "options": {"num_predict": 4}, "stream": False},
}

ANSWER = {"role": "assistant", "content": "The sum "}
URL = {"type": "url", "data": "aGk="}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
WRONG = {"type": "document", "source": {"type": "base64", "media_type": "text/plain", "data": "/w=="}}
USED = {"type": "tool_use", "id": "c", "name": "weather", "input": {}}
USABLE = {"name": "weather", "input_schema": SCHEMA}


@pytest.mark.parametrize(("path", "fields", "status", "message"), [
    (MESSAGES, {"model": "claude"}, 404, "this server has the model 'pair'"),
    (MESSAGES, {"max_tokens": None}, 400, "max_tokens"),
    (MESSAGES, {"temperature": 1.5}, 400, "temperature"),
    (MESSAGES, {"messages": []}, 400, "messages"),
    (MESSAGES, {"messages": [*QUESTION, {"role": "assistant", "content": [USED]}]}, 400, "without tool calls can be"),
    (MESSAGES, {"messages": [*QUESTION, ANSWER], "tools": [USABLE], "tool_choice": {"type": "any"}}, 400, "tool_ch"),
    (CHAT, {"messages": [*QUESTION, ANSWER], "format": "json"}, 400, "format cannot be combined with a last message"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": URL}]}]}, 400, "needs its url"),
    (MESSAGES, {"messages": [{"role": "user", "content": [PDF]}]}, 400, "a document must be text/plain, as data"),
    (MESSAGES, {"messages": [{"role": "user", "content": [WRONG]}]}, 400, "data must be base64 of text in UTF-8"),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "tools"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, 400, "tool"),
    (MESSAGES, {"mcp_servers": [{"url": "x"}]}, 400, "mcp_servers"),
    (RESPONSES, {"model": "gpt"}, 404, "this server has the model 'pair'"),
    (RESPONSES, {"input": []}, 400, "input"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, 400, "input"),
    (RESPONSES, {"temperature": -1.0}, 400, "temperature"),
    (RESPONSES, {"background": True}, 400, "background"),
    (RESPONSES, {"previous_response_id": "resp-x"}, 400, "there is no response 'resp-x'"),
    (CHAT, {"model": "llama3"}, 404, "or start the server with --any-name"),
    (CHAT, {"messages": [{"role": "system", "content": SUM, "images": ["aGk="]}]}, 400, "pictures belong to messages"),
    (CHAT, {"messages": [{"role": "narrator", "content": SUM}]}, 400, "messages.0.role: Input should be 'system'"),
    (CHAT, {"options": {"temperature": "warm"}}, 400, "options.temperature: Input should be a valid number"),
    (CHAT, {"options": {"repeat_penalty": 0}}, 400, "options.repeat_penalty: Input should be greater than"),
    (CHAT, {"format": "xml"}, 400, "format"),
    (GENERATE, {"suffix": "end"}, 400, "suffix: this model's tokenizer has no tokens to fill in the middle"),
    ("/api/embed", {"model": "pair", "input": "a"}, 404, "this server has no embeddings"),
    ("/v1/embeddings", {"model": "pair", "input": "a"}, 404, "this server has no embeddings"),
    (GENERATE, {"raw": True, "system": "Be brief."}, 400, "raw=true takes the prompt as it is"),
    ("/api/pull", {}, 404, "Not Found"),
])  # fmt: skip
def test_what_cannot_be_answered_is_refused_in_the_apis_own_form(service, path, fields, status, message):
    response = ask(service, path, BODIES.get(path, {}) | fields)
    found, kind = response.json(), {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert response.status_code == status
    if path.startswith("/api/"):
        assert found.keys() == {"error"}
        assert message in found["error"]
    else:
        assert (found.get("type"), found["error"]["type"]) == ("error" if path == MESSAGES else None, kind)
        assert message in found["error"]["message"]


ALL = BODIES | {OPENAI: {"messages": QUESTION, "max_tokens": 4}, TEXT: {"prompt": SUM, "max_tokens": 4}}


@pytest.mark.parametrize("path", ALL)
def test_what_no_answer_could_repeat_is_refused_by_its_field(service, path):
    for field, value in (
        ("metadata", {"a": ["\ud800"]}), ("model", "\udcff"), ("tools", [{"type": "\ud83d"}]), ("user", {"\ud800": 1}),
        ("seed", float("nan")), ("x", [float("inf")]),
    ):  # fmt: skip
        response = ask(service, path, ALL[path] | {field: value})
        assert response.status_code == 400, field
        assert f"{field}: " in json.dumps(response.json())
    assert ask(service, path, json.dumps(ALL[path] | {"y": 1}).replace("1", "1e999").encode()).status_code == 400
    assert ask(service, path, json.dumps(ALL[path] | {"y": "\ud83d\ude00"}).encode()).status_code == 200


MANY = {"type": "object", "properties": {f"p{place}": {"type": "integer"} for place in range(700)}}
ASKED = {
    OPENAI: ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": MANY, "strict": True}}),
    TEXT: ("guided_json", MANY),
    RESPONSES: ("text", {"format": {"type": "json_schema", "name": "a", "schema": MANY, "strict": True}}),
    MESSAGES: ("output_config", {"format": {"type": "json_schema", "schema": MANY}}),
    CHAT: ("format", MANY),
    GENERATE: ("format", MANY),
}


@pytest.mark.parametrize("path", ALL)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_beyond_a_limit_is_refused_before_anything_is_written(service, path, stream):
    name, value = ASKED[path]
    response = ask(service, path, ALL[path] | {name: value, "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{name}: this JSON schema cannot be used: the alternatives and four times")
    assert isinstance(error, str) or error.get("param", name) == name


def test_a_request_of_every_api_may_ask_that_nothing_is_kept():
    handed = []
    with serving(on_answer=handed.append) as service:
        for path, body in ALL.items():
            for fields, count in (({}, 1), ({"store": False}, 0), ({"store": True}, 1)):
                handed.clear()
                assert ask(service, path, body | fields).status_code == 200, path
                assert len(handed) == count, (path, fields)


def test_a_seed_of_minus_one_draws_one_in_every_api(tmp_path):
    with serving(receipts=tmp_path) as service:
        for path, body in ALL.items():
            field = {"options": {"num_predict": 4, "seed": -1}} if path.startswith("/api") else {"seed": -1}
            for _ in range(2):
                assert ask(service, path, body | field).status_code == 200
    seeds = {Receipt.read(file).answers[0].seed for file in tmp_path.glob("*.json")}
    assert len(seeds) == 2 * len(ALL)
    assert min(seeds) >= 0


# Chat templates: one takes system messages anywhere, one only at the beginning, one shows only that, one refuses all.
REFUSED, LATE = "{{ raise_exception('refused') }}", "m.role == 'system' and not loop.first"
PLACES = {
    "anywhere": ROLES,
    "first": ROLES.replace("[{{", f"{{% if {LATE} %}}{REFUSED}{{% endif %}}[{{{{"),
    "lost": ROLES.replace("[{{", f"{{% if {LATE} %}}{{% continue %}}{{% endif %}}[{{{{"),
    "nowhere": ROLES.replace("[{{", f"{{% if m.role == 'system' %}}{REFUSED}{{% endif %}}[{{{{"),
}
TWICE = "loop.previtem is defined and loop.previtem.role == m.role"  # as Mistral's and Gemma's
PLACES["alternating"] = PLACES["first"].replace("[{{", f"{{% if {TWICE} %}}{REFUSED}{{% endif %}}[{{{{")
ORDERS = {  # roles of a conversation, and how a template shows them that takes system messages at the beginning only
    "system user assistant system user": "[system]say0[user]say1[assistant]say2[user]say3\n\nsay4",
    "system system user": "[system]say0\n\nsay1[user]say2",
    "system user assistant developer user": "[system]say0[user]say1[assistant]say2[user]say3\n\nsay4",
    "user system": "[user]say0\n\nsay1",
    "user user assistant user": "[user]say0\n\nsay1[assistant]say2[user]say3",
    "user assistant assistant user": "[user]say0[assistant]say1\n\nsay2[user]say3",
}


PINGS = {OPENAI: ": ping\n\n", TEXT: ": ping\n\n", RESPONSES: ": ping\n\n", CHAT: ""}
PINGS[MESSAGES] = 'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize("path", PINGS)
def test_a_stream_says_that_it_waits_until_its_first_token(path, monkeypatch):
    monkeypatch.setattr("dflash_serve.api._PING_SECONDS", 0.05)
    with serving() as service:
        gate = Gate(service.scheduler)
        threading.Timer(0.5, gate.open).start()
        text = ask(service, path, ALL[path] | {"stream": True}).text
        plain = ask(service, path, ALL[path] | {"stream": True}).text
    if ping := PINGS[path]:
        assert 2 <= text.count(ping) <= 10
        text, plain = (each.replace(ping, "") for each in (text, plain))  # a busy machine has some in both
    assert text.count("\n") == plain.count("\n")


def prompt_tokens(response) -> int:
    """Return the length of a prompt, as an API tells it."""
    assert response.status_code == 200, response.text
    usage = response.json().get("usage") or response.json()
    cached = usage.get("cache_read_input_tokens", 0)
    names = ("prompt_tokens", "input_tokens", "prompt_eval_count")
    return cached + next(usage[name] for name in names if name in usage)


@pytest.mark.parametrize("place", PLACES)
def test_messages_are_shown_as_the_template_takes_them(place):
    with serving(template=PLACES[place]) as service:
        for roles, first in ORDERS.items():
            said = [{"role": role, "content": f"say{number}"} for number, role in enumerate(roles.split())]
            ids = ask(service, "/tokenize", {"messages": said}).json()["tokens"]
            text = ask(service, "/detokenize", {"tokens": ids}).json()["prompt"].removeprefix(pair()[2].bos_token)
            as_given = "".join(f"[{each['role']}]{each['content']}" for each in said).replace("developer", "system")
            as_users = re.sub(r"(\[user\][^\[]*)\[user\]", r"\1\n\n", first.replace("system", "user"))
            expected = {"anywhere": as_given, "nowhere": as_users}
            is_taken = "system" not in as_given and place != "alternating"  # neighbors are not
            assert text == (as_given if is_taken else expected.get(place, first))
            for path, field in ((OPENAI, "messages"), (RESPONSES, "input"), (CHAT, "messages")):
                assert prompt_tokens(ask(service, path, ALL[path] | {field: said})) == len(ids)
            if "user user" in roles:  # this API joins them itself
                continue
            assert prompt_tokens(ask(service, MESSAGES, ALL[MESSAGES] | {"messages": said})) == len(ids)


def test_neighbors_of_the_assistant_keep_their_thoughts_and_calls():
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [{"role": "assistant", "content": "say1"}, {"role": "assistant", "content": "say2", "tool_calls": [call]}]
    said = [*QUESTION, *said, {"role": "tool", "tool_call_id": "call_1", "content": "say3"}]
    with serving(template=PLACES["alternating"]) as service:
        ids = ask(service, "/tokenize", {"messages": said}).json()["tokens"]
        text = ask(service, "/detokenize", {"tokens": ids}).json()["prompt"]
    assert '[assistant]say1\n\nsay2\n{"name": "f", "arguments": {}}[' in text


@pytest.mark.parametrize("place", ["anywhere", "first"])
def test_a_last_message_of_the_assistant_is_continued(place):
    messages = [{"role": "system", "content": "a"}, *QUESTION, {"role": "system", "content": "b"}, ANSWER]
    continues = {"add_generation_prompt": False, "continue_final_message": True}
    with serving(template=PLACES[place] + "{% if add_generation_prompt %}[assistant]{% endif %}") as service:
        ids = ask(service, "/tokenize", {"messages": messages, **continues}).json()["tokens"]
        text = ask(service, "/detokenize", {"tokens": ids}).json()["prompt"]
        assert text.endswith("b[assistant]The sum ")
        expected = content(ask(service, TEXT, {"prompt": ids, "max_tokens": 9, "temperature": 0}))
        body = {"messages": messages, "stream": False, "temperature": 0, "max_tokens": 9}
        options = {"options": {"temperature": 0, "num_predict": 9}}
        for path, fields in ((OPENAI, continues), (MESSAGES, {}), (CHAT, options)):
            assert content(ask(service, path, body | fields)) == expected
        asked = {"input": messages, "temperature": 0, "max_output_tokens": 9}
        assert content(ask(service, RESPONSES, asked)) == expected
        completed = [*messages[:-1], {**ANSWER, "type": "message", "status": "completed"}]
        assert content(ask(service, RESPONSES, asked | {"input": completed})) != expected
        refused(ask(service, OPENAI, body | continues | {"messages": QUESTION}), "only a last message of the assistant")
        refused(ask(service, OPENAI, body | {"continue_final_message": True, "add_generation_prompt": True}), "false")


@pytest.mark.parametrize(("path", "ends"), [(TEXT, {"max_tokens": 9}), (GENERATE, {"options": {"num_predict": 9}})])
def test_a_suffix_is_written_by_the_tokens_that_the_tokenizer_has(path, ends, monkeypatch):
    monkeypatch.setattr("dflash_serve.prompts.FILL_FORMS", ("<fim> PREFIX", "acorn PREFIX birch SUFFIX brook"))
    asked = {"prompt": "add 1", "suffix": "= 3", "stream": False, "temperature": 0} | ends
    asked["options"] = {"temperature": 0} | asked.get("options", {})
    with serving() as service:
        same = {"prompt": "acornadd 1birch= 3brook", "max_tokens": 9, "temperature": 0}
        assert content(ask(service, path, asked)) == content(ask(service, TEXT, same))
        refused(ask(service, TEXT, asked | {"prompt": [5, 6]}), "suffix needs a prompt that is a text")
        assert "insert" in ask(service, "/api/show", {}).json()["capabilities"]


def test_thoughts_are_continued():
    template = ROLES + "{% if add_generation_prompt %}[assistant]{% endif %}{# <think></think> #}"
    with serving(template=template) as service:
        for said, is_begun in (("<think>Let me", True), ("<think>Hm.</think>The sum", False)):
            messages = [*QUESTION, {"role": "assistant", "content": said}]
            body = {"messages": messages, "max_tokens": 9, "temperature": 0, "continue_final_message": True}
            (choice,) = ask(service, OPENAI, body).json()["choices"]
            assert ("reasoning_content" in choice["message"]) == is_begun


TOOL = {"type": "function", "name": "weather", "description": "Tell it.", "parameters": SCHEMA}
UNKNOWN = {  # fields that are taken but not known, and the warnings
    MESSAGES: ({"metadata": {"user_id": "me"}, "context_management": {"edits": []}}, ["context_management: unknown"]),
    RESPONSES: (
        {"client_metadata": {"a": "b"}, "tools": [TOOL, {"type": "web_search", "filters": {}}]},
        ["client_metadata: unknown", "tools[]: web_search is not served here"],
    ),
    CHAT: ({"options": {"num_ctx": 4096, "num_predict": 4}, "keep_alive": "5m"}, ["options.num_ctx: unknown"]),
}


@pytest.mark.parametrize("path", UNKNOWN)
def test_what_is_left_out_is_named_or_refused_by_a_strict_server(service, path):
    fields, warnings = UNKNOWN[path]
    found = ask(service, path, BODIES[path] | fields).json()["warnings"]
    found = [words for words in found if "does not show them" not in words]  # of tools, by the pair's template
    assert found == [f"{words}, left out" for words in warnings]
    with serving(tolerance={"is_strict": True}) as strict:
        assert ask(strict, path, BODIES[path] | fields).status_code == 400


FAILED = {  # how a stream begins, and its last event
    MESSAGES: ("event: message_start\n", {"type": "error", "error": {"type": "overloaded_error"}}),
    RESPONSES: ("event: response.created\n", {"type": "response.failed", "response": {"status": "failed"}}),
    GENERATE: ("", {"error": "the answer was not ready after 0 s"}),
}


@pytest.mark.parametrize("path", FAILED)
def test_an_answer_that_fails_in_the_stream_ends_in_an_error(service, path, monkeypatch):
    monkeypatch.setattr(service, "timeout", 0.0)
    begin, expected = FAILED[path]
    threading.Timer(0.2, Gate(service.scheduler).open).start()
    text = ask(service, path, BODIES[path] | {"stream": True}).text
    assert text.startswith(begin)
    *_, before, last = ["", *text.strip().split("\n")]
    found = json.loads(last.removeprefix("data: "))
    assert not begin or before == f"event: {expected['type']}"
    for name, value in expected.items():
        assert found[name] == (value if isinstance(value, str) else found[name] | value)
