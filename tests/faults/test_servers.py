"""Whatever a server sends to `dflash regenerate`, and however slowly, gives correct rows or an error of one line."""

import gzip
import json
import time
import tracemalloc

import pytest
from examples import examples
from hostile_server import completion, hostile_server, http
from hypothesis import given
from hypothesis import strategies as st

from dflash.train.data import load_prompts
from dflash.train.regenerate import ServerWriter, Settings, regenerate

SETTINGS = Settings(max_new_tokens=4)
PROMPTS = [{"line": 3, "prompt": "w7 w8"}]


@pytest.fixture
def server():
    with hostile_server() as server:
        yield server


def ask(server, tmp_path, prompts=PROMPTS, **options) -> dict | str:
    """Return the row that one answer gives, or the error."""
    out = tmp_path / "out.jsonl"
    out.unlink(missing_ok=True)
    options = {"raw": True, "token_ids": True, "retries": 0, **options}
    try:
        regenerate(prompts, ServerWriter(server.url, "served", **options), out, SETTINGS)
    except ValueError as refused:
        message = str(refused)
        assert not out.exists(), "nothing was written, and nothing is left"
        assert message.isprintable()
        return message
    return json.loads(out.read_text())


# ---------------------------------------------------------------------------------------------- values

NO_IDS = [["9"], [-1], [10**30], [[9]], [True], [9.0], [None], [2**31], [{}], "91", 9, {"0": 9}, True, [9] * 5]


@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids"])
def test_token_ids_are_integers_of_an_id(server, tmp_path, field):
    server.reply = http(completion())
    assert ask(server, tmp_path)["response_ids"] == [9, 1]
    for value in NO_IDS:
        reply = completion()
        reply["choices"][0] |= {field: value}
        server.reply = http(reply)
        answer = ask(server, tmp_path)
        if field == "prompt_token_ids" and value == [9] * 5:
            assert answer["prompt_ids"] == value, "a prompt may be longer than its answer"
        else:
            assert isinstance(answer, str), value
            assert field in answer
            assert "to line 3" in answer
    for value in (None, []):
        reply = completion(prompt_token_ids=None)
        reply["choices"][0] |= {field: value}
        server.reply = http(reply)
        assert "token_ids was asked for, and is not there" in ask(server, tmp_path)


@pytest.mark.parametrize("count", ["3", -1, 5, 10**30, [3], 2.5, True, {"a": 1}, "x" * 10**5])
@pytest.mark.parametrize("token_ids", [False, True])
def test_the_number_of_tokens_is_at_most_what_was_asked_for(server, tmp_path, count, token_ids):
    server.reply = http(completion(usage={"completion_tokens": count}))
    answer = ask(server, tmp_path, token_ids=token_ids)
    assert isinstance(answer, str)
    assert "usage.completion_tokens must be an integer in 0 .. 4" in answer
    assert len(answer) < 300


def test_a_server_may_leave_the_number_of_tokens_out(server, tmp_path):
    for usage in (None, {}, {"completion_tokens": None}, {"completion_tokens": 0}):
        server.reply = http(completion(usage=usage))
        assert ask(server, tmp_path)["response_ids"] == [9, 1]
    for usage in ([], "2", 2.0):
        server.reply = http(completion(usage=usage))
        assert "usage.completion_tokens must be" in ask(server, tmp_path)


@pytest.mark.parametrize("raw", [True, False])
def test_an_answer_of_another_shape_is_refused(server, tmp_path, raw):
    text = {"text": "w9"} if raw else {"message": {"content": "w9"}}
    server.reply = http({"choices": [{"finish_reason": "stop", **text}]})
    assert ask(server, tmp_path, raw=raw, token_ids=False)["response"] == "w9"
    messages = ["w9", ["w9"], None, 7, {"content": ["w9"]}, {"content": {"text": "w9"}}, {"content": None}]
    texts = [{"text": message} for message in messages[1:]] if raw else [{"message": message} for message in messages]
    for choice in [
        *({"finish_reason": "stop", **text} for text in texts),
        {**text, "finish_reason": ["stop"]},
        7,
        [],
        None,
    ]:
        server.reply = http({"choices": [choice]})
        assert isinstance(ask(server, tmp_path, raw=raw, token_ids=False), str), choice
    for reply in ({"choices": {}}, {"choices": []}, {"choices": "w9"}, {"choices": {"0": 1}}, {}, [], "w9", 7, None):
        server.reply = http(reply)
        assert "not an answer of OpenAI's protocol" in ask(server, tmp_path, raw=raw, token_ids=False)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b'{"choices": ',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"choices":' * 100_000,
        b'{"choices": [{"text": "w9", "finish_reason": "stop", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]}",
        b'{"choices": [{"text": "w9", "finish_reason": "stop"}], "usage": {"completion_tokens": 1'
        + b"0" * 5000
        + b"}}",
        b'{"choices": [{"text": "\\ud83d", "finish_reason": "stop"}]}',
    ],
    ids=lambda body: body[:12].decode(errors="replace"),
)
@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request", "503 Busy"])
def test_a_body_that_is_not_json_ends_the_run(server, tmp_path, body, status):
    server.reply = http(body, status)
    message = ask(server, tmp_path, token_ids=False)
    assert isinstance(message, str)
    assert len(message) < 600
    assert ("not JSON that can be read" if status == "200 OK" else f"status {status[:3]}") in message


@pytest.mark.long
@examples(40)
@given(data=st.data())
def test_any_answer_is_a_row_of_the_right_types_or_an_error(tmp_path_factory, data):
    """Replace one value of a correct answer, at any depth, by any JSON."""
    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**30),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=4,
    )
    reply = completion()
    place = reply
    while isinstance(place, dict | list):
        holder = place
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        place = holder[key]
        if data.draw(st.booleans()):
            break
    holder[key] = data.draw(json_values)
    with hostile_server() as server:
        server.reply = http(reply)
        row = ask(server, tmp_path_factory.mktemp("any"))
    if isinstance(row, dict):
        assert isinstance(row["response"], str)
        assert row["finish_reason"] in ("stop", "length")
        for ids in (row["prompt_ids"], row["response_ids"]):
            assert ids
            assert all(type(token) is int and 0 <= token < 2**31 for token in ids)


# ---------------------------------------------------------------------------------------------- bytes and time

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "chunked": (CHUNKED, b"10000\r\n" + b" " * 65536 + b"\r\n"),
    "an exabyte": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000000000\r\n\r\n", b" " * 65536),
    "until closed": (b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65536),
    "an error": (CHUNKED.replace(b"200 OK", b"400 Bad"), b"10000\r\n" + b"x" * 65536 + b"\r\n"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-A: " + b"a" * 65530 + b"\r\n"),
    "one header": (b"HTTP/1.1 200 OK\r\nX-A: ", b"a" * 65536),
    "a status line": (b"HTTP/1.1 200 ", b"O" * 65536),
    "chunk extensions": (CHUNKED, b"1;" + b"a" * 65536),
    "continues": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_answer_costs_neither_memory_nor_time(server, tmp_path, kind):
    start, more = ENDLESS[kind]

    def endless(connection) -> None:
        server.send(connection, start)
        while True:
            server.send(connection, more)

    server.reply = endless
    tracemalloc.start()
    began = time.monotonic()
    message = ask(server, tmp_path, timeout=3)
    seconds, peak = time.monotonic() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "did not answer the prompt on line 3" in message
    assert seconds < 60
    assert peak < 80 * 2**20, "the limit is 16 MiB per answer"
    assert kind == "continues" or server.sent < 64 * 2**20


def test_a_compressed_answer_is_refused_before_it_is_expanded(server, tmp_path):
    bomb = gzip.compress(b" " * 2**28)
    for coding in ("gzip", "GZIP", "gzip, gzip", "br", "zstd", "deflate"):
        server.reply = http(bomb, "200 OK", f"Content-Encoding: {coding}")
        tracemalloc.start()
        message = ask(server, tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "the answer is compressed" in message
        assert peak < 2**24
    assert all(b"accept-encoding: identity" in request.lower() for request in server.requests)


@pytest.mark.parametrize("what", ["body", "headers", "nothing", "error"])
def test_an_answer_that_drips_runs_out_of_time(server, tmp_path, what):
    heads = {"body": CHUNKED, "error": CHUNKED.replace(b"200 OK", b"400 Bad"), "headers": b"HTTP/1.1 200 OK\r\n"}
    drops = {"body": b"1\r\n \r\n", "error": b"1\r\n \r\n", "headers": b"a"}

    def drip(connection) -> None:
        server.send(connection, heads.get(what, b""))
        while not server.closing.wait(0.05):
            server.send(connection, drops.get(what, b""))

    server.reply = drip
    began = time.monotonic()
    message = ask(server, tmp_path, timeout=0.4, retries=1)
    assert time.monotonic() - began < 60
    assert "did not answer the prompt on line 3 in 2 tries: no complete answer within 0.4 seconds" in message
    assert len(server.requests) == 2, "an answer that does not come is asked for again"


def test_an_answer_that_is_too_large_is_not_asked_for_again(server, tmp_path):
    server.reply = http(b" " * (17 * 2**20))
    message = ask(server, tmp_path, retries=3)
    assert "did not answer the prompt on line 3: the answer is larger than 16 MiB" in message
    assert len(server.requests) == 1


OK = b"HTTP/1.1 200 OK\r\n"
NO_HTTP = [
    b"",
    b"\x00" * 100,
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"HTTP/9.9 200 OK\r\n\r\n",
    b"HTTP/1.1 99999 OK\r\n\r\n",
    b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\n",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 304 No\r\n\r\n",
    OK + b"Content-Length: -5\r\n\r\n",
    OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    OK + b"Content-Length: 900\r\n\r\n{",
    OK + b": \r\n\r\n",
    CHUNKED + b"-5\r\nabc",
    CHUNKED + b"ZZ\r\nabc",
]


@pytest.mark.parametrize("answer", NO_HTTP)
def test_bytes_that_are_not_http_end_the_run(server, tmp_path, answer):
    server.reply = lambda connection: server.send(connection, answer)
    message = ask(server, tmp_path, timeout=2)
    assert isinstance(message, str)
    assert "line 3" in message


def test_headers_choose_neither_a_codec_nor_an_endless_wait(server, tmp_path):
    body = {"error": {"message": "no such model"}}
    for charset in ("zlib_codec", "bz2", "idna", "utf-16", "rot13", "unicode_escape", "\x1b"):
        server.reply = http(body, "400 Bad", f"Content-Type: text/plain; charset={charset}")
        assert "no such model" in ask(server, tmp_path)
    for wait in ("1e308", "nan", "inf", "-5", "Fri, 31 Dec 9999 23:59:59 GMT"):
        server.reply = http(body, "429 Later", f"Retry-After: {wait}")
        began = time.monotonic()
        assert "status 429: no such model" in ask(server, tmp_path, retries=1)
        assert time.monotonic() - began < 60


# ---------------------------------------------------------------------------------------------- elsewhere


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See", "307 Temporary", "308 Permanent"])
def test_prompts_and_keys_are_not_sent_where_a_server_redirects(server, tmp_path, status):
    with hostile_server() as other:
        places = (f"{other.url}/completions", server.url, "//evil", "file:///etc/passwd", "http://\x1b[2J", "")
        for place in places:
            server.reply = http(b"", status, f"Location: {place}")
            message = ask(server, tmp_path, api_key="secret", retries=2)
            assert "redirects to" in message
            assert "secret" not in message
        assert len(server.requests) == len(places)
        assert not other.requests


def test_control_characters_of_a_server_do_not_reach_the_terminal(server, tmp_path, shell):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "w7"}\n')
    evil = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m\r\n"
    options = ("regenerate", rows, "--model", "served", "--out", tmp_path / "out.jsonl", "--server", server.url)
    replies = [
        http({"error": {"message": f"no {evil}"}}, "400 Bad"),
        http(evil.encode(), "404 Not \x1b[2J"),
        http(completion(finish_reason=evil)),
        http(completion(usage={"completion_tokens": evil})),
        http({"choices": evil}),
        http(json.dumps({"x": "\x7f\x9b31m\u202e"}, ensure_ascii=False).encode()),
        http(evil.encode()),
        http(b"", "307 Temporary", "Location: http://x/\x1b[2J"),
        http(b"", "200 OK", "Content-Encoding: \x1b[2J"),
    ]
    for reply in replies:
        server.reply = reply
        done = shell(*options, "--raw")
        assert (done.code, done.out) == (2, "")
        assert done.err.endswith("\n")
        assert done.err[:-1].isprintable(), done.err


# ---------------------------------------------------------------------------------------------- what is sent


def test_half_a_surrogate_pair_is_named_before_anything_is_sent(server, tmp_path):
    path = tmp_path / "prompts.jsonl"
    for row in ({"prompt": "w7 \ud83d"}, {"messages": [{"role": "user", "content": "\ude00"}]}, {"turns": ["\udfff"]}):
        path.write_text(json.dumps({"prompt": "w7"}) + "\n" + json.dumps(row) + "\n")
        with pytest.raises(ValueError, match=r"prompts\.jsonl, line 2: .*half of a surrogate pair"):
            load_prompts(path)
    prompts = [*PROMPTS, {"line": 5, "prompt": "w7 \ud83d"}]
    assert "the prompt on line 5, line 1: not UTF-8 text: half of a character, \\ud83d" in ask(
        server, tmp_path, prompts
    )
    assert not server.requests


def test_a_url_that_is_none_is_refused_at_once():
    for url in (
        "http://",
        "http://[",
        "http://h:x/v1",
        "http://h:99999999",
        "http://\x00/",
        "ftp://h",
        "",
        "http://h:0",
    ):
        with pytest.raises(ValueError, match="the server must be an http:// or https:// URL"):
            ServerWriter(url, "served")


def test_answers_before_a_bad_one_stay_and_the_run_continues(server, tmp_path):
    out, prompts = tmp_path / "out.jsonl", [{"line": line, "prompt": f"w{line}"} for line in range(7, 13)]
    # The server closes a connection after an answer of its function: a client that was not told may still use it.
    good, bad = (http(reply, "200 OK", "Connection: close") for reply in (completion(), completion(usage=[])))

    def turns_bad(connection) -> None:
        server.send(connection, good if len(server.requests) < 4 else bad)

    server.reply = turns_bad
    writer = ServerWriter(server.url, "served", raw=True, concurrency=1, retries=0)
    with pytest.raises(ValueError, match=r"to line 10: usage"):
        regenerate(prompts, writer, out, SETTINGS)
    assert [json.loads(line)["line"] for line in out.read_text().splitlines()] == [7, 8, 9]
    server.reply = good
    assert regenerate(prompts, writer, out, SETTINGS).written == 3
