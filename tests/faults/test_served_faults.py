"""A client that never reads, a target that goes wrong and a signal in mid-stream end what they concern, no more."""

import json
import signal
import socket

import httpx
import served
from served import SUM, TRIP, Gate, chat, command, direct, live, prompt_ids, wait_until

from dflash_serve import port as serving


def lines(response: httpx.Response) -> list[str]:
    """Return the data of a stream's events."""
    return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def content(events: list[str]) -> str:
    """Return the text of a chat's chunks."""
    return "".join(json.loads(event)["choices"][0]["delta"].get("content", "") for event in events)


def test_nan_logits_end_one_request_and_leave_the_others():
    bad, whole = prompt_ids(SUM)[0], direct(prompt_ids(TRIP), max_new_tokens=300)[0]
    with live() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        gate, engine = Gate(server.service.scheduler), server.service.scheduler.generator.engine
        verify, tokens = engine.target.verify, engine.state.tokens

        def poisoned(block, of):
            is_bad = (tokens[:, : len(bad)] == bad).all(1)
            return verify(block, of).masked_fill(is_bad[:, None, None], float("nan"))

        engine.target.verify = poisoned
        with client.stream("POST", "/chat/completions", json=chat(TRIP, stream=True)) as other:
            gate.reached.wait()
            gate.open()
            failed = client.post("/chat/completions", json=chat(SUM, stream=True))
            *events, done = lines(other)
        after = client.post("/chat/completions", json=chat(TRIP)).json()
    assert (content(events), done) == (whole, "[DONE]")
    error = json.loads(lines(failed)[-2])["error"]
    assert error["code"] == "engine_error"
    assert "the target's logits are NaN" in error["message"]
    assert after["choices"][0]["message"]["content"] == whole


def test_a_signal_in_mid_stream_ends_every_stream():
    body = chat(TRIP, model="dflash-pair", stream=True, max_tokens=400, ignore_eos=True)
    with command("--grace", "0") as server, httpx.Client(base_url=server.url, timeout=60) as client:
        with client.stream("POST", "/chat/completions", json=body) as one:
            first = one.iter_lines()
            next(first)
            with client.stream("POST", "/chat/completions", json=body) as two:
                server.process.send_signal(signal.SIGTERM)
                streams = [[line[6:] for line in first if line], lines(two)]
        code = server.process.wait(60)
        log = server.process.stderr.read()
    for *_, last, done in streams:
        assert done == "[DONE]"
        assert json.loads(last)["error"]["code"] == "shutting_down"
    assert code in (0, -signal.SIGTERM)
    assert "Traceback" not in log


def test_a_client_that_never_reads_loses_its_connection_and_holds_up_nobody(monkeypatch):
    def bind(host: str, port: int) -> socket.socket:
        bound = serving.bind(host, port)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the kernel would take a whole answer
        return bound

    monkeypatch.setattr(serving, "_UNREAD_SECONDS", 1.0)
    monkeypatch.setattr(served, "bind", bind)
    body = json.dumps(chat(TRIP, stream=True, n=4, max_tokens=400, ignore_eos=True))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    with served.live(rows=2) as server, socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect(("127.0.0.1", httpx.URL(server.url).port))
        unread.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n{body}".encode())
        wait_until(lambda: server.service.scheduler.running)
        found = httpx.post(f"{server.url}/chat/completions", json=chat(SUM), timeout=60).json()
        wait_until(lambda: not server.server.server_state.connections)
        metrics = server.url.replace("/v1", "/metrics")  # counts a request after its connection has gone
        wait_until(lambda: 'dflash_requests_total{outcome="cancelled"} 1.0' in httpx.get(metrics).text)
    assert found["choices"][0]["message"]["content"] == direct(prompt_ids(SUM), max_new_tokens=300)[0]
