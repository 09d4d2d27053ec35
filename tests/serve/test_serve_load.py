"""Many clients at once, a fifth of whom leave: no answer is lost or another than alone, and memory stays flat."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from examples import is_long
from served import chat, command, direct, prompt_ids, wait_until

CLIENTS = (1, 4, 16, 64)
COUNT = 2000 if is_long() else 200  # requests per number of clients
DIFFERENT = 40
GROWTH = 32 * 2**20  # bytes


def text_of(number: int) -> str:
    return f"add {7919 * number % 100_000} and {104_729 * number % 100_000}"


def settings_of(number: int) -> dict:
    return {"seed": number, "temperature": float(number % 3)}


def ask(http: httpx.Client, number: int) -> str | None:
    """Ask whole or as a stream; return the answer, or None if the client has left after its beginning."""
    leaves, asked = number % 5 == 4, number % DIFFERENT
    limit = {"max_tokens": 400, "ignore_eos": True} if leaves else {"max_tokens": 60}
    streams = leaves or number % 2 == 1
    body = chat(text_of(asked), model="dflash-pair", stream=streams, **limit, **settings_of(asked))
    if not streams:
        return http.post("/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    text = ""
    with http.stream("POST", "/chat/completions", json=body) as response:
        for line in filter(None, response.iter_lines()):
            if line == "data: [DONE]":
                return text
            text += json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
            if leaves and text:
                return None
    raise AssertionError(f"the stream of request {number} has no end")


@pytest.mark.linux
@pytest.mark.long
def test_no_number_of_clients_loses_or_changes_an_answer_and_memory_stays_flat():
    alone = [direct(prompt_ids(text_of(n)), max_new_tokens=60, **settings_of(n))[0] for n in range(DIFFERENT)]
    whole = [None if number % 5 == 4 else alone[number % DIFFERENT] for number in range(COUNT)]
    memory = []
    with command("--dtype", "float32") as server:
        threading.Thread(target=server.process.stderr.read, daemon=True).start()  # its log, which would fill the pipe
        pages = Path(f"/proc/{server.process.pid}/statm")
        for level, clients in enumerate(CLIENTS, start=1):
            limits = httpx.Limits(max_connections=None)
            with (
                httpx.Client(base_url=server.url, timeout=300, limits=limits) as http,
                ThreadPoolExecutor(clients) as pool,
            ):
                assert list(pool.map(partial(ask, http), range(COUNT))) == whole
            left = level * whole.count(None)
            wait_until(lambda left=left: server.metric('dflash_requests_total{outcome="cancelled"}') == left)
            assert server.metric('dflash_requests_total{outcome="completed"}') == level * COUNT - left
            memory.append(int(pages.read_text().split()[1]) * 4096)
    assert max(memory) - memory[0] < GROWTH, [f"{size / 2**20:.0f} MiB" for size in memory]
