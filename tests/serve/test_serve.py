"""The server in this process: its answers are those of ``dflash.generate``, and what it cannot do it refuses."""

import copy
import json
import re
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urljoin

import pytest
import torch
from served import (
    CHAT,
    SUM,
    TEXT,
    TRIP,
    Gate,
    ask,
    chat,
    chunks,
    direct,
    pair,
    prompt_ids,
    refused,
    serving,
    wait_until,
)

from dflash import Generator
from dflash_serve.log import JsonFormatter
from dflash_serve.memory import memory_of_vm_stat
from dflash_serve.prompts import PromptReader
from dflash_serve.scheduler import Scheduler
from dflash_serve.service import Service


def answer(response) -> list[str]:
    assert response.status_code == 200, response.text
    return [choice["message"]["content"] for choice in response.json()["choices"]]


# ---------------------------------------------------------------------------------------------- answers

PENALTIES = {"presence_penalty": 0.5, "repetition_penalty": 1.1, "no_repeat_ngram_size": 4, "frequency_penalty": 0.25}
SETTINGS = {  # fields, and the arguments of generate if they have other names
    "filters": ({"temperature": 1.5, "seed": -3, "top_k": 20, "top_p": 0.9, "min_p": 0.01}, None),
    "penalties": (
        {"temperature": 1, "seed": 1, **PENALTIES, "logit_bias": {"5": -100, "17": 3.5}},
        {"temperature": 1, "seed": 1, **PENALTIES, "logit_bias": {5: -100, 17: 3.5}},
    ),
    "lengths": (
        {"max_tokens": None, "max_completion_tokens": 120, "ignore_eos": True},
        {"max_new_tokens": 120, "stop_token_ids": []},
    ),
    "ends": ({"min_tokens": 9, "stop_token_ids": [17, 300]}, {"min_new_tokens": 9, "stop_token_ids": [17, 300]}),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "arguments"), SETTINGS.values(), ids=SETTINGS)
def test_an_answer_is_that_of_generate(service, fields, arguments):
    body = {name: value for name, value in chat(TRIP, **fields).items() if value is not None}
    expected = direct(prompt_ids(TRIP), **{"max_new_tokens": 300} | (arguments or fields))
    assert answer(ask(service, CHAT, body)) == expected


def test_the_response_says_what_it_is(service):
    found = ask(service, CHAT, chat(max_tokens=5)).json()
    assert found["object"] == "chat.completion"
    assert found["model"] == "pair"
    assert found["id"].startswith("chatcmpl-")
    assert found["system_fingerprint"] == service.fingerprint
    (choice,) = found["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    length = prompt_ids().shape[1]
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (length, 5, length + 5)


def test_texts_and_token_ids_are_continued(service):
    ids = prompt_ids(SUM)
    text = pair()[2].decode(ids[0, 1:])
    tokens = pair()[2](text).input_ids
    expected = direct(torch.tensor([tokens]), max_new_tokens=16)[0]
    one = ask(service, TEXT, {"prompt": text}).json()
    assert one["object"] == "text_completion"
    assert one["choices"] == [{"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}]
    both = ask(service, TEXT, {"prompt": [tokens, ids[0].tolist()], "echo": True, "n": 1}).json()
    assert [choice["text"] for choice in both["choices"]] == [
        pair()[2].decode(tokens) + expected,
        pair()[2].decode(ids[0]) + direct(ids, max_new_tokens=16)[0],
    ]
    assert both["usage"]["prompt_tokens"] == len(tokens) + ids.shape[1]


def test_prompts_and_answers_are_counted_in_order(service):
    body = {"prompt": [TRIP, SUM], "n": 2, "temperature": 1, "seed": 4, "max_tokens": 9}
    found = ask(service, TEXT, body).json()
    choices, expected = found["choices"], []
    for text in (TRIP, SUM):
        ids = torch.tensor([pair()[2](text).input_ids])
        expected += direct(ids, max_new_tokens=9, num_return_sequences=2, temperature=1.0, seed=4)
    assert [choice["text"] for choice in choices] == expected
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == sum(len(pair()[2](text).input_ids) for text in (TRIP, SUM))


def test_a_prompt_that_was_run_before_is_not_run_again():
    with serving(rows=1) as service:
        usages = [ask(service, CHAT, chat(max_tokens=2)).json()["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] == 0
    assert 0 < cached[1] < usages[1]["prompt_tokens"]


@pytest.mark.parametrize(
    ("stop", "stream"), [(" makes ", False), (["zzz", "teen", "tens"], True), ([", write 0\ntens: ", "never"], True)]
)
def test_an_answer_ends_before_a_stop_string(service, stop, stream):
    whole = direct(prompt_ids(), max_new_tokens=300)[0]
    strings = [stop] if isinstance(stop, str) else stop
    assert (places := [whole.index(string) for string in strings if string in whole])
    response = ask(service, CHAT, chat(stop=stop, stream=stream))
    if stream:
        found = chunks(response)
        got = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in found)
        reason = found[-1]["choices"][0]["finish_reason"]
    else:
        (got,), reason = answer(response), response.json()["choices"][0]["finish_reason"]
    assert got == whole[: min(places)]
    assert reason == "stop"


def test_as_many_stop_strings_as_are_promised_are_looked_for(service):
    whole = direct(prompt_ids(), max_new_tokens=300)[0]
    stop = [*(f"this is not in answer {number:03}" for number in range(127)), " makes "]
    assert answer(ask(service, CHAT, chat(stop=stop))) == [whole[: whole.index(" makes ")]]
    assert refused(ask(service, CHAT, chat(stop=[*stop, "one more"])), "at most 128 items")["param"] == "stop"


# ---------------------------------------------------------------------------------------------- streams


def test_a_stream_has_a_role_deltas_a_reason_and_usage(service):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = chat(TRIP, stream=True, n=2, temperature=1, seed=5, stream_options=options)
    *found, last = chunks(ask(service, CHAT, body))
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, last["usage"]["completion_tokens"])
    assert len({chunk["id"] for chunk in found}) == 1
    for index, expected in enumerate(
        direct(prompt_ids(TRIP), max_new_tokens=300, num_return_sequences=2, temperature=1.0, seed=5)
    ):
        own = [chunk["choices"][0] for chunk in found if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert "".join(choice["delta"].get("content", "") for choice in own) == expected
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]
        assert own[-1]["delta"] == {}
        assert len(own) < 3 + len(pair()[2](expected).input_ids), "several tokens per chunk"
    assert last["choices"] == []
    whole = ask(service, CHAT, {**body, "stream": False, "stream_options": None}).json()
    del whole["usage"]["prompt_tokens_details"], last["usage"]["prompt_tokens_details"]
    assert last["usage"] == whole["usage"]


def test_a_stream_tells_which_tokens_were_drafted(service):
    found = chunks(ask(service, CHAT, chat(stream=True, stream_options={"include_drafts": True})))
    drafts = [chunk["choices"][0]["drafts"] for chunk in found if "drafts" in chunk["choices"][0]]
    assert drafts[0] == {"tokens": 1, "accepted": 0, "characters": 0}
    assert all(step["tokens"] - step["accepted"] in (0, 1) for step in drafts)
    assert sum(step["accepted"] for step in drafts) > len(drafts)
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in found if "drafts" in chunk["choices"][0]]
    for step, text in zip(drafts[:-1], deltas[:-1], strict=True):
        assert (step["characters"] > 0) == (step["accepted"] > 0)
        assert (step["characters"] < len(text)) == (step["accepted"] < step["tokens"])


# ---------------------------------------------------------------------------------------------- reasoning

THINKING = "{{ messages[-1].content }}{{ '\n=>\n<think>' if enable_thinking else '<think></think>\n=>\n' }}"


def test_reasoning_has_a_field_of_its_own():
    with serving(template=THINKING) as service:
        body = chat(chat_template_kwargs={"enable_thinking": True}, max_tokens=20)
        message = ask(service, CHAT, body).json()["choices"][0]["message"]
        streamed = chunks(ask(service, CHAT, {**body, "stream": True}))
        plain = ask(service, CHAT, {**body, "chat_template_kwargs": None}).json()["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]
    assert plain["content"]
    assert "reasoning_content" not in plain


# ---------------------------------------------------------------------------------------------- refusals


def said(content, role="user") -> dict:
    return {"messages": [{"role": role, "content": content}]}


BAD = {
    "functions": ({"functions": [{"name": "f"}]}, "functions", "does not apply it"),
    "effort": ({"reasoning_effort": "most"}, "reasoning_effort", "'low', 'medium'"),
    "others' settings": ({"guided_choice": ["a"]}, "guided_choice", "does not apply it"),
    "messages": ({"messages": []}, "messages", "at least 1 item"),
    "audio": (said([{"type": "input_audio"}]), "messages", "'text', 'image_url'"),
    "image": (said([{"type": "image_url"}]), "messages", "image_url"),
    "role": (said("", "function"), "messages", "'system'"),
    "template": (said("", "assistant"), "messages", "there is no message of the user to answer"),
    "unicode": (said("\ud800"), "messages", "half of a character"),
    "template argument": ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs", "no argument 'thinking'"),
    "type": ({"temperature": "warm"}, "temperature", "valid number"),
    "boolean": ({"n": True}, "n", "valid integer"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens", "at least 1, or -1"),
    "no limit": ({"max_tokens": -2}, "max_tokens", "greater than or equal to -1"),
    "least": ({"min_tokens": 301}, "min_tokens", "at most max_tokens, 300, got 301"),
    "two limits": ({"max_completion_tokens": 5}, None, "max_tokens and max_completion_tokens differ"),
    "context": (said("a b " * 300), "messages", "context is 512 tokens: the prompt"),
    "characters of stops": ({"stop": ["a" * 4097]}, "stop", "at most 128 strings with 4096 characters together"),
    "not whole": ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
    "seed": ({"seed": 2**63}, "seed", "less than"),
    "bias": ({"logit_bias": {"x": 1}}, "logit_bias", "pattern"),
    "bias of no token": ({"logit_bias": {"99999": 1}}, "logit_bias", "0 .. 1535"),
    "penalty": ({"presence_penalty": -1e308}, "presence_penalty", "greater than or equal to -2"),
    "answers": ({"n": 11}, "n", "may ask for 10 answers, this one asks for 11"),
    "stream options": ({"stream_options": {}}, None, "needs stream=true"),
    "stop tokens": ({"stop_token_ids": [5], "ignore_eos": True}, None, "cannot be combined"),
    "log probabilities": ({"top_logprobs": 2}, "top_logprobs", "needs logprobs=true"),
}


@pytest.mark.parametrize(("fields", "param", "message"), BAD.values(), ids=BAD)
def test_a_chat_request_that_cannot_be_served_is_refused(service, fields, param, message):
    found = refused(ask(service, CHAT, chat(**fields)), message)
    assert (found["type"], found["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(("fields", "param", "message"), [
    ({"prompt": [[]]}, "prompt", "at least one token"),
    ({"prompt": [1536]}, "prompt", "1535"),
    ({"prompt": [1536], "echo": True}, "prompt", "0 .. 1535, got 1536"),
    ({"prompt": [-1]}, "prompt", ""),
    ({"prompt": {"text": "a"}}, "prompt", ""),
    ({"prompt": "a", "best_of": 2}, "best_of", "does not apply it"),
    ({}, "prompt", "required"),
    ({"prompt": SUM, "logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"prompt": SUM, "logprobs": True}, "logprobs", "valid integer"),
    ({"prompt": SUM, "max_tokens": 0}, "max_tokens", "at least 1, or echo true"),
])  # fmt: skip
def test_a_text_request_that_cannot_be_served_is_refused(service, fields, param, message):
    assert refused(ask(service, TEXT, fields), message)["param"] == param


def test_fields_that_ask_for_nothing_are_taken(service):
    neutral = {
        **{"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False, "store": False},
        **{"messages": [{"role": "user", "content": SUM, "annotations": None, "audio": None, "refusal": None}]},
        **{"user": "u", "metadata": {"a": "b"}, "top_logprobs": None, "modalities": ["text"], "seed": None, "n": None},
        **{"stop": "", "thinking": {"type": "adaptive"}, "repeat_penalty": 1, "xtc_probability": 0, "typical_p": 1.0},
    }
    found = ask(service, CHAT, chat(**neutral))
    assert answer(found) == direct(prompt_ids(), max_new_tokens=300)
    assert "warnings" not in found.json()


def test_off_is_off_in_every_spelling(service):
    named = {"chat_template_kwargs": {"enable_thinking": False}}
    for fields in ({"enable_thinking": False}, {"reasoning_effort": "none"}, named):
        found = ask(service, CHAT, chat(**fields))
        assert answer(found) == direct(prompt_ids(), max_new_tokens=300)
        assert "enable_thinking" in found.json()["warnings"][0]


# ---------------------------------------------------------------------------------------------- tolerance

STRANGE = {
    **{"messages": [{"role": "user", "content": SUM, "id": "m", "annotations": [], "tool_calls": None}]},
    **{"cache_prompt": True, "nothing": None, "store": False, "service_tier": "flex", "mirostat": 2},
}
NAMED = ["cache_prompt: unknown", "service_tier: not applied", "mirostat: not applied", "messages[].id: unknown"]


def test_unknown_fields_are_taken_and_named(service, caplog):
    caplog.set_level("INFO", "dflash_serve")
    responses = [ask(service, CHAT, chat(**STRANGE, stream=stream)) for stream in (False, True)]
    assert answer(responses[0]) == direct(prompt_ids(), max_new_tokens=300)
    for found in (responses[0].json(), chunks(responses[1])[0]):
        assert found["warnings"] == [f"{words}, left out" for words in NAMED]
    assert json.loads(responses[0].headers["X-DFlash-Warnings"]) == found["warnings"]
    for field, why in (words.split(": ") for words in NAMED):
        assert caplog.messages.count(f"requests have the field {field}, which is {why}: it is left out") == 1
    assert "X-DFlash-Warnings" not in ask(service, CHAT, chat()).headers


def test_the_template_sees_no_unknown_field_of_a_tool():
    with serving(template="{{ tools | tojson if tools }}{{ messages[-1].content }}") as service:
        tool = {"type": "function", "function": {"name": "f", "x": 1}, "cache_control": {}}
        found = ask(service, CHAT, chat(tools=[tool], tool_choice="required", max_tokens=5)).json()
        plain = {"type": "function", "function": {"name": "f"}}
        expected = ask(service, CHAT, chat(tools=[plain], tool_choice="required", max_tokens=5)).json()
    assert found["warnings"] == ["tools[].cache_control: unknown, left out", "tools[].function.x: unknown, left out"]
    assert found["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]


def test_as_many_tokens_as_fit_are_written(service):
    room, length = 512, prompt_ids(TRIP).shape[1]
    expected = direct(prompt_ids(TRIP), max_new_tokens=room - length, stop_token_ids=[])
    for asked, warnings in (
        (8000, [f"max_tokens: 8000 are asked for, {room - length} fit after the prompt"]),
        (-1, []),
    ):
        response = ask(service, CHAT, chat(TRIP, max_tokens=asked, ignore_eos=True))
        assert answer(response) == expected
        assert response.json().get("warnings", []) == warnings
    text = ask(service, TEXT, {"prompt": TRIP, "max_tokens": -1, "ignore_eos": True}).json()
    assert text["usage"]["total_tokens"] == room


def test_numbers_may_have_a_point_or_be_texts_and_stops_may_be_many(service):
    fields = {"n": 1.0, "top_k": 20.0, "max_tokens": 50.0, "stop": [f"@{place}" for place in range(9)]}
    fields |= {"seed": "9007199254740993", "temperature": "1.0", "presence_penalty": "-5e-1"}
    settings = {"seed": 9007199254740993, "temperature": 1.0, "presence_penalty": -0.5, "top_k": 20}
    assert answer(ask(service, CHAT, chat(**fields))) == direct(prompt_ids(), max_new_tokens=50, **settings)
    off, unset = (ask(service, CHAT, chat(seed=3, temperature=1, **more)) for more in ({"top_k": -1}, {"top_k": 0}))
    assert answer(off) == answer(unset)
    fields = {"repeat_penalty": 1.2, "stop": ["", " makes "]}
    named = {"repetition_penalty": 1.2, "stop": " makes "}
    found = ask(service, CHAT, chat(**fields))
    assert answer(found) == answer(ask(service, CHAT, chat(**named)))
    assert found.json()["warnings"] == [
        "repeat_penalty: counts the whole text, as repetition_penalty does, not its last tokens"
    ]
    greedy = ask(service, CHAT, chat(TRIP, temperature=1, top_p=0, max_tokens=50))
    assert answer(greedy) == direct(prompt_ids(TRIP), max_new_tokens=50)


def test_a_strict_server_refuses_what_others_take():
    with serving(tolerance={"is_strict": True}) as service:
        for fields, param, message in (
            ({"cache_prompt": True}, "cache_prompt", "cache_prompt: Extra inputs are not permitted"),
            ({"typical_p": 0.9}, "typical_p", "typical_p: this server does not apply it: leave it out"),
            ({"messages": [{"role": "user", "content": SUM, "id": 1}]}, "messages", "messages[].id: Extra inputs"),
            ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "4 at most, got 5"),
            ({"max_tokens": 512}, "messages", "context is 512 tokens: the prompt has 18 and 512 are asked for"),
        ):
            assert refused(ask(service, CHAT, chat(**fields)), message)["param"] == param
        assert ask(service, CHAT, chat(store=False, annotations=None, max_tokens=1)).status_code == 200


def test_the_model_has_the_names_that_it_is_given():
    with serving(tolerance={"aliases": ("gpt-4o", "b/c")}) as service:
        for name in ("pair", "gpt-4o", "b/c"):
            assert ask(service, CHAT, chat(model=name, max_tokens=1)).json()["model"] == name
            assert ask(service, f"/v1/models/{name}", None).json()["id"] == name
        assert [found["id"] for found in ask(service, "/v1/models", None).json()["data"]] == ["pair", "gpt-4o", "b/c"]
        for response in (ask(service, CHAT, chat(model="x")), ask(service, "/v1/models/x", None)):
            assert refused(response, "'pair' and 'gpt-4o' and 'b/c'", 404)["code"] == "model_not_found"
    with serving(tolerance={"takes_any_name": True}) as service:
        assert ask(service, CHAT, chat(model="x", max_tokens=1)).json()["model"] == "x"


def test_the_log_tells_how_answers_went_and_why_requests_are_refused(service, caplog):
    caplog.set_level("INFO", "dflash_serve")
    ask(service, CHAT, chat(n=2, max_tokens=9))
    ask(service, CHAT, chat(temperature="\x1b[31m"))
    ask(service, "/v1/models", None, key="secret")
    whole, wrong, locked = caplog.messages
    pattern = r"chatcmpl-\w+: 36 prompt tokens \(\d+ cached\), 18 new in [\d.]+ s \(first after [\d.]+ s\)"
    assert re.fullmatch(pattern + r", \d+ tokens/s, [\d.]+ tokens per step: length", whole)
    assert wrong.startswith("400 POST /v1/chat/completions: temperature: ")
    assert locked.startswith("401 GET /v1/models: this server needs its key")


# ---------------------------------------------------------------------------------------------- small paths


def test_texts_and_conversations_are_tokenized(service):
    tokenizer = pair()[2]
    found = ask(service, "/tokenize", {"prompt": SUM, "return_token_strs": True}).json()
    ids = tokenizer(SUM).input_ids
    words = tokenizer.convert_ids_to_tokens(ids)
    assert found == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": words}
    bare = ask(service, "/tokenize", {"prompt": SUM, "add_special_tokens": False}).json()["tokens"]
    assert bare == tokenizer(SUM, add_special_tokens=False).input_ids
    body = {"messages": [{"role": "user", "content": SUM * 99}]}  # longer than the context
    assert ask(service, "/tokenize", body).json()["tokens"] == prompt_ids(SUM * 99)[0].tolist()
    assert ask(service, "/detokenize", {"tokens": bare}).json() == {"prompt": SUM}
    for path, wrong in (("/tokenize", {}), ("/tokenize", {"prompt": "\ud800"}), ("/detokenize", {"tokens": [1536]})):
        assert ask(service, path, wrong).status_code == 400
    assert ask(service, "/version", None).json() == {"version": "0"}


def test_paths_may_lack_their_version_and_be_asked_for_their_head(service):
    assert answer(ask(service, "/chat/completions", chat(max_tokens=3)))
    assert ask(service, "/models/pair", None).json()["id"] == "pair"
    assert ask(service, "/embeddings", {}).status_code == 404
    for path in ("/", "/health", "/v1/models", "/models"):
        assert ask(service, path, None, method="HEAD").status_code == 200


def test_pages_of_the_origins_that_are_named_may_use_the_server(service, monkeypatch):
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, origins, allowed in (
        ("http://a", ["http://a", "http://b"], "http://a"), ("http://c", ["http://a"], None), ("http://c", ["*"], "*")
    ):  # fmt: skip
        call = {"key": "secret", "origins": origins}
        before = ask(service, CHAT, None, **call, headers={"Origin": origin, **asks}, method="OPTIONS")
        assert before.headers.get("Access-Control-Allow-Origin") == allowed
        assert (before.status_code == 200) == (allowed is not None)
        headers = {"Origin": origin, "x-api-key": "secret"}
        after = ask(service, CHAT, chat(max_tokens=1), **call, headers=headers)
        assert after.headers.get("Access-Control-Allow-Origin") == allowed
        with monkeypatch.context() as broken:
            broken.setattr(service, "read", None)
            failed = ask(service, CHAT, chat(), **call, headers=headers)
        assert failed.headers.get("Access-Control-Allow-Origin") == allowed
        assert refused(failed, "the server made a mistake", 500)["type"] == "server_error"
    assert ask(service, CHAT, None, headers={"Origin": "http://a", **asks}, method="OPTIONS").status_code == 405


def test_other_paths_are_not_found(service):
    missing = refused(ask(service, "/v1/rerank", {}), "POST /v1/rerank; /openapi.json lists", 404)
    assert missing["type"] == "not_found_error"
    assert ask(service, CHAT, None).status_code == 405


@pytest.mark.parametrize("body", [b"", b"[1]", b"\xff", b"[" * 200_000, b'{"seed":' + b"9" * 10_000 + b"}"])
def test_a_body_that_is_no_request_is_refused(service, body):
    assert refused(ask(service, CHAT, body), "")["type"] == "invalid_request_error"


def test_a_body_may_not_be_too_large(service):
    async def parts():  # sent without a length
        for _ in range(18):
            yield b" " * 2**20

    for body in (chat("a" * 2**24), parts()):
        assert refused(ask(service, CHAT, body), "this one has more", 413)["code"] == "too_large"


def test_a_key_is_asked_for(service):
    for given, status in (("Bearer secret", 200), ("bearer secret", 200), ("Bearer other", 401), ("secret", 401),
                          ("Bearer second", 200), ("x-api-key", 200), (None, 401)):  # fmt: skip
        headers = {} if given is None else {"Authorization": given}
        headers = {"X-API-Key": "secret"} if given == "x-api-key" else headers
        response = ask(service, CHAT, chat(max_tokens=1), key="secret second", headers=headers)
        assert response.status_code == status
    assert refused(response, "needs its key", 401)["code"] == "invalid_api_key"
    assert ask(service, "/v1/models", None, key="secret").status_code == 401
    assert ask(service, "/metrics", None, key="secret").status_code == 401
    assert ask(service, "/health", None, key="secret").status_code == 200


# ---------------------------------------------------------------------------------------------- load and faults


def test_requests_beyond_the_queue_are_told_to_come_again():
    with serving(rows=1, queue=1) as service:
        gate = Gate(service.scheduler)
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(ask, service, CHAT, chat(max_tokens=2)) for _ in range(2)]
            gate.reached.wait()
            wait_until(lambda: service.scheduler.waiting + service.scheduler.running == 2)
            response = ask(service, CHAT, chat(max_tokens=2))
            gate.open()
    assert refused(response, "try again later", 429)["code"] == "queue_full"
    assert int(response.headers["Retry-After"]) >= 1
    assert [answer.result().status_code for answer in answers] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long_is_ended(stream):
    with serving(rows=1, timeout=0.3) as service:
        gate = Gate(service.scheduler)
        response = ask(service, CHAT, chat(stream=stream))
        gate.open()
        found = chunks(response)[-1]["error"] if stream else refused(response, "", 503)
    assert response.status_code == (200 if stream else 503)
    assert (found["code"], found["message"]) == ("timeout", "the answer was not ready after 0.3 s")


# ---------------------------------------------------------------------------------------------- the others


def test_the_model_is_listed(service):
    (found,) = ask(service, "/v1/models", None).json()["data"]
    assert (found["id"], found["object"], found["max_model_len"]) == ("pair", "model", 512)
    assert ask(service, "/v1/models/pair", None).json() == found
    assert (found["has_drafter"], found["has_receipts"]) == (True, False)
    with serving(block_size=1) as plain:
        assert not ask(plain, "/v1/models/pair", None).json()["has_drafter"]
    assert ask(service, "/health", None).json() == {"status": "ok"}


def test_the_page_loads_its_own_files_only(service):
    pending, files = ["/"], {}
    while pending:
        path = pending.pop()
        response = files[path] = ask(service, path, None, key="secret")  # the key is typed into the page
        assert response.status_code == 200, path
        if "/vendor/" not in path:
            assert not re.search(r"""https?:(?!//www\.w3\.org/2000/svg)|["'(]//|@import|url\(""", response.text), path
            found = re.findall(r"""(?: src| href|from) ?=?"([^"#]+)""", response.text)
            pending += {urljoin(path, name) for name in found} - {*files, *pending}
    kinds = {path: response.headers["content-type"].split(";")[0] for path, response in files.items()}
    assert kinds.pop("/") == "text/html"
    assert {*kinds.values()} == {"text/css", "text/javascript", "image/svg+xml"}
    assert {"/page/vendor/marked.umd.js", "/page/vendor/purify.min.js"} < kinds.keys()
    for response in files.values():
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
    html = files["/"].text
    assert not re.search(r"<style| style=| on\w+=|<script(?! [^>]*src=)", html)
    controls = re.findall(r"<(?:input|textarea) id=\"(\w+)\"", html)
    assert controls
    assert all(f'<label for="{control}"' in html for control in controls)


@pytest.mark.parametrize("name", ["none.js", "vendor/LICENSE-marked", "vendor", "%2e%2e/app.py", "/etc/passwd", ""])
def test_no_other_file_is_served(service, name):
    assert ask(service, f"/page/{name}", None).status_code == 404


def test_metrics_count_requests_and_tokens():
    with serving() as service:
        usage = ask(service, CHAT, chat()).json()["usage"]
        ask(service, CHAT, chat(stream=True, max_tokens=20))
        ask(service, CHAT, chat(n=0))
        lines = ask(service, "/metrics", None).text.splitlines()
    found = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    assert found['dflash_requests_total{outcome="completed"}'] == 2
    assert found['dflash_requests_total{outcome="refused"}'] == 1
    assert found["dflash_new_tokens_total"] == usage["completion_tokens"] + 20
    assert found["dflash_prompt_tokens_total"] == 2 * usage["prompt_tokens"]
    assert found["dflash_step_tokens_sum"] == found["dflash_new_tokens_total"] - 2  # the prompts' tokens
    assert found["dflash_step_tokens_count"] == found["dflash_step_seconds_count"] > 2  # one answer at a time
    assert found["dflash_first_token_seconds_count"] == found["dflash_request_seconds_count"] == 2
    assert found["dflash_answers_running"] == found["dflash_answers_waiting"] == 0
    assert 0 < found["dflash_token_seconds_count"] < found["dflash_new_tokens_total"]
    assert found["dflash_queue_seconds_count"] == 2
    assert 0 < found["dflash_prompt_cache_bytes"] <= found["dflash_prompt_cache_max_bytes"]
    assert found["process_cpu_seconds_total"] > 0
    (model,) = [name for name in found if name.startswith("dflash_model_info")]
    assert 'model="pair"' in model


def test_requests_have_ids_that_the_log_has_too(service, caplog):
    caplog.set_level("INFO", "dflash_serve")
    caplog.handler.setFormatter(JsonFormatter())
    given = ask(service, CHAT, chat(max_tokens=2), headers={"X-Request-Id": "mine-1"})
    drawn = ask(service, CHAT, chat(stop=5), headers={"X-Request-Id": "not one"})
    records = {record["request"]: record for record in map(json.loads, caplog.text.splitlines())}
    assert given.headers["X-Request-Id"] == "mine-1"
    done, refusal = records["mine-1"], records[drawn.headers["X-Request-Id"]]
    assert (done["answer"], done["outcome"], done["new_tokens"]) == (given.json()["id"], "completed", 2)
    assert (refusal["level"], refusal["message"][:4]) == ("info", "400 ")


def fingerprint(generator: Generator, version: str = "0") -> str:
    scheduler = Scheduler(generator)
    scheduler.close()
    return Service(scheduler=scheduler, reader=PromptReader(pair()[2]), name="pair", version=version).fingerprint


def test_the_fingerprint_follows_weights_and_their_storage_and_not_the_drafter(service):
    target = pair()[0]
    options = {"max_length": 512, "batch_size": 2, "prefill_chunk": 8}
    alone = Generator(target, None, block_size=service.scheduler.generator.block_size, **options)
    options["block_size"] = alone.block_size
    assert fingerprint(alone) == service.fingerprint
    assert fingerprint(alone, "1") != service.fingerprint
    assert fingerprint(Generator(target, None, weights="int8", **options)) != service.fingerprint
    other = copy.deepcopy(target)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    assert fingerprint(Generator(other, None, **options)) != service.fingerprint


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10.
Pages active:                          90000.
Pages inactive:                          200.
Pages speculative:                      3000.
Pages wired down:                      50000.
Pages purgeable:                       40000.
"Translation faults":                  70000.
"""


def test_free_memory_of_macos_is_what_it_gives_away_first():
    assert memory_of_vm_stat(VM_STAT) == 16384 * 43210
