"""The server on a port: what OpenAI's own client sees, clients that leave or do not read, and the end of the server."""

import json
import re
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from served import TRIP, Gate, chat, direct, live, prompt_ids, serve, slow_down, wait_until

from dflash_serve.app import Server
from dflash_serve.port import Port

QUESTION = [{"role": "user", "content": TRIP}]


# ---------------------------------------------------------------------------------------------- OpenAI's client


def test_chats_whole_and_streamed(client):
    call = {"model": "pair", "messages": QUESTION, "seed": 3, "temperature": 1, "extra_body": {"top_k": 50}}
    done = client.chat.completions.create(**call, n=2, max_completion_tokens=99)
    settings = {"seed": 3, "temperature": 1.0, "top_k": 50}
    expected = direct(prompt_ids(TRIP), num_return_sequences=2, max_new_tokens=99, **settings)
    assert [choice.message.content for choice in done.choices] == expected
    assert client.models.list().data[0].id == client.models.retrieve("pair").id == "pair"
    call |= {"max_tokens": 300}
    found = list(client.chat.completions.create(**call, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in found if chunk.choices)
    assert text == direct(prompt_ids(TRIP), max_new_tokens=300, **settings)[0]
    assert found[-1].usage.completion_tokens == client.chat.completions.create(**call).usage.completion_tokens
    with client.chat.completions.stream(**call) as stream:
        assert stream.get_final_completion().choices[0].message.content == text


def test_pages_of_other_sites_cannot_take_the_address_of_this_machine(server):
    address = server.url.removesuffix("/v1")
    port = address.rpartition(":")[2]
    for host, status in (("evil.example", 403), ("localhost.evil.example", 403), ("LocalHost", 200), ("[::1]", 200)):
        for name in (host, f"{host}:{port}"):
            assert httpx.get(address + "/v1/models", headers={"Host": name}).status_code == status
    with live(key="secret", rows=1) as locked:
        headers = {"Host": "proxy.example", "Authorization": "Bearer secret"}
        assert httpx.get(locked.url + "/models", headers=headers).status_code == 200


# ---------------------------------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows(stream):
    with live() as server:
        gate, scheduler = Gate(server.service.scheduler), server.service.scheduler
        call = {"json": chat(TRIP, max_tokens=400, ignore_eos=True, n=2, stream=stream), "timeout": 60}
        if stream:
            with httpx.stream("POST", f"{server.url}/chat/completions", **call) as response:
                next(response.iter_lines())
                wait_until(lambda: scheduler.running + scheduler.waiting == 2)
        else:
            call["timeout"] = httpx.Timeout(60, read=0.5)
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/chat/completions", **call)
        cancelled = 'dflash_requests_total{outcome="cancelled"} 1.0'
        wait_until(lambda: cancelled in httpx.get(server.url.replace("/v1", "/metrics")).text)
        gate.open()
        wait_until(lambda: scheduler.running + scheduler.waiting == 0)
        assert gate.steps <= 2


def raw(server, text: str) -> socket.socket:
    """Return a connection to a server that has sent this much."""
    url = httpx.URL(server.url)
    connection = socket.create_connection((url.host, url.port), timeout=60)
    connection.sendall(text.encode())
    return connection


def rest(connection: socket.socket) -> str:
    """Return what a connection still receives until it is closed."""
    received = b""
    while data := connection.recv(4096):
        received += data
    connection.close()
    return received.decode()


BEGUN = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_requests_that_never_end_are_bounded_in_time_and_number(monkeypatch):
    monkeypatch.setattr("dflash_serve.connections.MOST_WAITING", 8)
    with live() as server:
        texts = ["", "GET /he", BEGUN, f"{BEGUN}Content-Length: 9\r\n\r\n{{"]
        open_ones = [raw(server, text) for text in texts * 8]
        health = server.url.replace("/v1", "/health")
        for _ in range(3):
            assert httpx.get(health, timeout=10).status_code == 200
        wait_until(lambda: len(server.server.config.http_protocol_class.waiting) <= 8)
        monkeypatch.setattr("dflash_serve.connections._REQUEST_SECONDS", 0.2)
        late = [raw(server, text) for text in ("", "GET /he", BEGUN)]
        # The second request of a connection, too.
        late.append(raw(server, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"))
        assert [rest(connection)[9:12] for connection in late] == ["", "", "", "200"]
        for connection in open_ones:
            connection.close()


def test_a_client_that_only_closes_its_writing_half_gets_its_answer(caplog):
    with live() as server:
        with raw(server, "") as connection:  # a probe, which asks nothing
            connection.shutdown(socket.SHUT_WR)
            assert rest(connection) == ""
        assert "eof_received" not in caplog.text
        slow_down(server.service)
        for stream in (False, True):
            body = json.dumps(chat(TRIP, max_tokens=9, stream=stream))
            connection = raw(server, f"{BEGUN}Content-Length: {len(body)}\r\n\r\n{body}")
            connection.shutdown(socket.SHUT_WR)
            answer = rest(connection)
            assert " 200 OK" in answer
            assert '"finish_reason":"length"' in answer.replace(" ", "")


@pytest.mark.parametrize("path", ["v1/chat/completions", "api/chat"])
def test_a_client_may_close_its_writing_half_while_it_reads_a_stream(path, monkeypatch):
    monkeypatch.setattr("dflash_serve.connections._ASK_SECONDS", 0.01)
    with live() as server:
        slow_down(server.service)
        body = {"model": "pair", "messages": QUESTION, "stream": True}
        with httpx.stream("POST", server.url.replace("v1", path), json=body, timeout=60) as response:
            lines = response.iter_lines()
            received = [next(lines)]
            response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_WR)
            received += lines
    assert any(line[:1] in (":", " ") for line in received)  # by which the server asks whether it is still there
    *parts, end = [line.removeprefix("data: ") for line in received if line and line[0] != ":"]
    if path == "api/chat":
        text = "".join(json.loads(part)["message"]["content"] for part in parts)
        assert json.loads(end)["done"]
    else:
        text = "".join(json.loads(part)["choices"][0]["delta"].get("content") or "" for part in parts)
        assert end == "[DONE]"
    assert text == direct(prompt_ids(TRIP), max_new_tokens=400)[0]


def test_the_log_tells_how_fast_all_answers_are_written(monkeypatch, caplog):
    caplog.set_level("INFO", "dflash_serve")
    monkeypatch.setattr("dflash_serve.app._LOAD_SECONDS", 0.2)
    with live() as server:
        slow_down(server.service, 0.05)
        with httpx.stream("POST", f"{server.url}/chat/completions", json=chat(TRIP, stream=True), timeout=60):
            wait_until(lambda: re.search(r"1 running, 0 waiting: [1-9]\d* tokens/s", caplog.text))


# ---------------------------------------------------------------------------------------------- the end


def test_an_answer_is_finished_before_the_end():
    with live() as server:
        gate, body = Gate(server.service.scheduler), chat(TRIP, stream=True)
        with httpx.stream("POST", f"{server.url}/chat/completions", json=body, timeout=60) as response:
            gate.reached.wait()
            server.end()
            wait_until(lambda: server.service.is_ending)
            gate.open()
            lines = [line[6:] for line in response.iter_lines() if line]
        server.thread.join()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/models")
    text = "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines[:-1])
    assert text == direct(prompt_ids(TRIP), max_new_tokens=300)[0]
    assert lines[-1] == "[DONE]"


def test_an_answer_that_takes_longer_than_the_grace_ends_with_an_error():
    with live(grace=0.2, rows=1) as server:
        slow_down(server.service, 0.1)
        body = chat(TRIP, stream=True, max_tokens=400, ignore_eos=True)
        with httpx.stream("POST", f"{server.url}/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.end()
            rest = [line[6:] for line in lines if line]
    assert json.loads(rest[-2])["error"]["code"] == "shutting_down"
    assert rest[-1] == "[DONE]"


# ---------------------------------------------------------------------------------------------- the beginning


def test_an_idle_server_uses_no_core(server, client):
    client.chat.completions.create(model="pair", messages=QUESTION, max_tokens=20)
    wait_until(lambda: server.service.scheduler.session.is_settled)
    before = time.process_time()
    time.sleep(1)
    assert time.process_time() - before < 0.2


def test_a_port_refuses_until_it_is_handed_over():
    port = Port("127.0.0.1", 0, ["http://a"])
    address = f"http://127.0.0.1:{port.socket.getsockname()[1]}"
    for call in ({"method": "GET", "url": "/health"}, {"method": "POST", "url": "/v1/completions", "json": {"a": 1}}):
        found = httpx.request(**{**call, "url": address + call["url"]})
        assert (found.status_code, found.headers["Retry-After"], found.headers["Refresh"]) == (503, "1", "1")
        assert found.json()["status"] == found.json()["error"]["code"] == "loading"
    assert httpx.head(address).status_code == 503
    for origin, allowed in (("http://a", "http://a"), ("http://b", None)):  # a page may read that too
        before, after = (httpx.request(each, address, headers={"Origin": origin}) for each in ("OPTIONS", "GET"))
        assert (before.status_code == 200) == (allowed is not None)
        assert after.headers.get("Access-Control-Allow-Origin") == allowed
    with pytest.raises(OSError, match="Address already in use"):
        Port("127.0.0.1", int(address.rpartition(":")[2]))
    server = Server(serve(), grace=0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [port.hand_over()]})
    thread.start()
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}  # it waits in the queue of the socket
    server.should_exit = True
    thread.join()


def test_a_port_in_use_is_refused_before_torch_is_imported():
    code = (
        "import sys\nfrom dflash.cli import main\ntry:\n    main()\n"
        "finally:\n    print({'torch', 'transformers', 'fastapi'} & sys.modules.keys())"
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-c", code, "serve", f"--port={taken.getsockname()[1]}"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "set()\n")
    assert "Address already in use" in done.stderr


def test_options_may_stand_in_a_file_and_in_variables(shell, tmp_path, monkeypatch):
    kept, config, keys = [], tmp_path / "serve.yaml", tmp_path / "keys"
    monkeypatch.setattr("dflash_serve.command.ServeOptions.check", lambda asked: kept.append(asked))
    monkeypatch.setattr("dflash_serve.command.start_log", lambda *_: 1 / 0)
    keys.write_text("\ufeff# of the team\none\n  #note\n\ntwo\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in ("of-the-file", "positional"):  # not to be asked for on the hub
        (tmp_path / name).mkdir()
    config.write_text(
        f"model: of-the-file\nname: mine\nmax-length: 99\nrows: 3\nstrict: true\nqueue: null\napi-key-file: {keys}\n"
    )
    monkeypatch.setenv("DFLASH_PORT", "0")
    monkeypatch.setenv("DFLASH_ROWS", "5")
    monkeypatch.setenv("DFLASH_API_KEY", "zero")
    monkeypatch.setenv("DFLASH_ALLOW_ORIGIN", "http://a http://b")
    monkeypatch.setenv("DFLASH_LOG_JSON", "1")
    with pytest.raises(ZeroDivisionError):
        shell("serve", "--config", str(config), "--max-length", "77")
    monkeypatch.setenv("DFLASH_MODEL", "of-the-variable")
    with pytest.raises(ZeroDivisionError):
        shell("serve", "positional", "--config", str(config))
    asked, _ = kept
    assert (asked.name, asked.max_length, asked.rows, asked.queue, asked.strict) == (["mine"], 77, 5, 64, True)
    assert (asked.keys, asked.allow_origin, asked.log_json) == (["zero", "one", "two"], ["http://a", "http://b"], True)


@pytest.mark.parametrize(("text", "message"), [
    ("prot: 1", "serve.yaml has prot, which is no option of dflash serve; did you mean port?"),
    ("- port", "must have a line OPTION: VALUE for each option, got list"),
    ("a: [", "cannot be read as YAML"),
    ("api-key: 0123", "api-key must be a text: put quotes around it"),
    ("rows: many", "'--rows'"),
    ("api-key: secret: more", "cannot be read as YAML in line 1: mapping values are not allowed here"),
])  # fmt: skip
def test_a_wrong_file_of_options_is_refused(shell, tmp_path, text, message):
    (tmp_path / "serve.yaml").write_text(text)
    done = shell("serve", "--config", str(tmp_path / "serve.yaml"))
    assert done.code == 2
    assert message in " ".join(done.err.split())
    assert "secret" not in done.err


def test_the_port_is_taken_as_the_file_and_the_variables_say(shell, tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr("dflash_serve.port.Port", lambda *asked: taken.append(asked) or 1 / 0)
    (tmp_path / "serve.yaml").write_text("port: 0\nhost: localhost\nallow-origin: [http://a]\n")
    monkeypatch.setenv("DFLASH_CONFIG", str(tmp_path / "serve.yaml"))
    with pytest.raises(ZeroDivisionError):
        shell("serve")
    monkeypatch.setenv("DFLASH_HOST", "127.0.0.2")
    with pytest.raises(ZeroDivisionError):
        shell("serve", "--allow-origin", "*")
    assert taken == [("localhost", 0, ["http://a"]), ("127.0.0.2", 0, ["*"])]


@pytest.mark.parametrize(("options", "message"), [
    (["--port", "99999"], "--port"),
    (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 0: "),
    (["--draft", "somewhere"], "--draft needs --model too"),
    (["here", "--model", "there"], "name one model: MODEL is 'here', --model 'there'"),
    (["here", "--draft-weights", "int8"], "--draft-weights needs a drafter"),
    (["--allow-origin", "localhost"], "--allow-origin must be * or as http://HOST:PORT"),
    (["--block-size", "0"], "block_size must be an integer of at least 1"),
    (["--grace", "inf"], "--grace"),
    (["--api-key", "a key"], "--api-key, --api-key-file) must be visible ASCII"),
    (["--api-key-file", "missing"], "--api-key-file missing cannot be read"),
    (["--config", "missing.yaml"], "--config missing.yaml cannot be read as YAML"),
])  # fmt: skip
def test_wrong_options_are_refused_before_anything_is_loaded(shell, monkeypatch, options, message):
    monkeypatch.setenv("DFLASH_PORT", "0")
    done = shell("serve", *options)
    assert done.code == 2
    assert message in " ".join(done.err.split())
