"""A server under any mixture of requests loses none, answers each as ``dflash.generate`` does, and keeps nothing.

A fixed sample in every run, 2,000 with ``-m long``.
"""

import asyncio
import json
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from examples import is_long
from served import command, direct, pair, prompt_ids, wait_until

from dflash.evaluate import demo

COUNT = 2000 if is_long() else 60
CLIENTS = 8
OUTCOMES = ("completed", "refused", "failed", "cancelled")
HOWS = {"whole": 40, "stream": 35, "leave a stream": 10, "give up": 5, "invalid": 10}
PROMPTS = [json.loads(line)["prompt"] for line in (demo.PAIR / "prompts.jsonl").read_text().splitlines()]


@dataclass
class Request:
    """A request, and the texts that it must get."""

    how: str
    path: str
    body: dict[str, Any]
    texts: list[str]


def draw(rng: random.Random) -> Request:
    """Draw a request and find its answers."""
    text = rng.choice(PROMPTS)
    text = text[: rng.randint(1, len(text))]
    call = {"temperature": rng.choice([0.3, 1.0, 2.5]), "seed": rng.randint(-(2**63), 2**63 - 1)}
    call |= {name: value for name, value in {"top_p": 0.9, "presence_penalty": 1.5}.items() if rng.random() < 0.3}
    most, count = rng.randint(1, 48), rng.choice([1, 2])
    body = {"max_tokens": most, "n": count, **call}
    if rng.random() < 0.5:
        path, ids, fields = "chat/completions", prompt_ids(text), {"messages": [{"role": "user", "content": text}]}
    else:
        path, ids, fields = "completions", torch.tensor([pair()[2](text).input_ids]), {"prompt": text}
    call |= {"max_new_tokens": most, "num_return_sequences": count}
    texts = direct(ids, **call)
    # A stop string that the first answer has, wherever in a block.
    if rng.random() < 0.4 and (stop := texts[0][rng.randrange(len(texts[0]) + 1) :][:4]) and "\ufffd" not in stop:
        body["stop"], texts = [stop], [text.partition(stop)[0] for text in direct(ids, stop_strings=[stop], **call)]
    return Request(rng.choices(list(HOWS), list(HOWS.values()))[0], path, fields | body, texts)


def spoil(rng: random.Random, request: Request) -> bytes:
    """Return a body that must be refused; tests of the server and of its document have more kinds."""
    field, whole = "messages" if "messages" in request.body else "prompt", json.dumps(request.body).encode()
    wrong = [{"n": 0}, {"seed": 2**70}, {"\ud800": 1}, {"stop": "\ud800"}, {field: None}, {field: [[99999]]}]
    bodies = [json.dumps(request.body | fields).encode() for fields in wrong]
    return rng.choice([*bodies, b"[]", whole[:-1], b"[" * 20_000, b"\xff" + whole])


async def ask(client: httpx.AsyncClient, request: Request, rng: random.Random) -> None:
    """Ask a request in its way, and compare."""
    if request.how == "invalid":
        headers = {"Content-Type": "application/json"}
        response = await client.post(request.path, content=spoil(rng, request), headers=headers)
        assert 400 <= response.status_code < 500, response.text
        assert response.json()["error"]["message"]
    elif request.how == "give up":
        try:
            await client.post(request.path, json=request.body, timeout=httpx.Timeout(60, read=rng.uniform(0.001, 0.2)))
        except httpx.ReadTimeout:
            return
    elif request.how == "whole":
        response = await client.post(request.path, json=request.body)
        assert response.status_code == 200, response.text
        choices = response.json()["choices"]
        assert [c["message"]["content"] if "message" in c else c["text"] for c in choices] == request.texts
    else:
        await read_stream(client, request, rng.randrange(12) if request.how == "leave a stream" else None)


async def read_stream(client: httpx.AsyncClient, request: Request, events: int | None) -> None:
    """Read a stream, or leave it after some events, and compare what was read."""
    texts, is_whole = [""] * len(request.texts), False
    async with client.stream("POST", request.path, json=request.body | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if events == 0:
                break
            events = events and events - bool(line)
            if line == "data: [DONE]":
                is_whole = True
            elif line:
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += (
                        choice["delta"].get("content", "") if "delta" in choice else choice["text"]
                    )
    assert is_whole or request.how == "leave a stream"
    for whole, text in zip(request.texts, texts, strict=True):
        assert whole == text if is_whole else whole.startswith(text)


async def ask_all(url: str, requests: list[Request], rng: random.Random) -> None:
    """Ask requests with several clients; each asks the next one as soon as it is done."""
    waiting, failures = iter(requests), []

    async def work(client: httpx.AsyncClient) -> None:
        for request in waiting:
            try:
                await ask(client, request, rng)
            except Exception as error:
                failures.append(f"{error!r} from {request.how}: POST {request.path} {request.body}")

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(*(work(client) for _ in range(CLIENTS)))
    assert not failures


@pytest.mark.long
def test_a_mixture_of_requests():
    rng = random.Random(COUNT)
    requests, memory = [draw(rng) for _ in range(COUNT)], []
    with command("--max-length", "512", "--dtype", "float32") as server:
        for half in (requests[: COUNT // 2], requests[COUNT // 2 :]):
            asyncio.run(ask_all(server.url, half, rng))
            wait_until(lambda: server.is_idle)
            status = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
            memory += [int(line.split()[1]) / 1024 for line in status if "VmRSS" in line]
        ended = {how: server.metric(f'dflash_requests_total{{outcome="{how}"}}') for how in OUTCOMES}
        server.process.terminate()
        assert server.process.wait(60) in (0, -signal.SIGTERM)
        assert "Traceback" not in server.process.stderr.read()
    hows = [request.how for request in requests]
    assert ended["failed"] == 0
    assert ended["refused"] == hows.count("invalid")
    assert ended["completed"] >= hows.count("whole") + hows.count("stream")
    assert ended["completed"] + ended["cancelled"] <= COUNT - hows.count("invalid")
    assert memory[1] - memory[0] < 16  # MB
