"""A server under any mixture of requests loses none, answers each as ``dflash.generate`` does, and keeps nothing.

A fixed sample in every run, 2,000 with ``-m long``.
"""

import asyncio
import json
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from examples import is_long
from served import Command, command, pair, prompt_ids, wait_until

import dflash
from dflash.evaluate import demo
from dflash.sampling import fold

COUNT = 2000 if is_long() else 60
CLIENTS = 8
JSON = {"Content-Type": "application/json"}
OUTCOMES = ("completed", "refused", "failed", "cancelled")
HOWS = {"whole": 40, "stream": 35, "leave a stream": 10, "give up": 5, "invalid": 10}
PROMPTS = [json.loads(line)["prompt"] for line in (demo.PAIR / "prompts.jsonl").read_text().splitlines()]


@dataclass
class Request:
    """A request, and what it must get: per answer, its text and its number of tokens."""

    how: str
    path: str
    body: dict[str, Any]
    prompts: list[list[int]]
    echoed: list[str]
    answers: list[tuple[str, int]] = field(default_factory=list)


def draw(rng: random.Random) -> Request:
    """Draw a request and find its answers."""
    tokenizer, how = pair()[2], rng.choices(list(HOWS), list(HOWS.values()))[0]
    # 1. The prompts: a chat, texts, or token ids.
    texts = [text[: rng.randint(1, len(text))] for text in rng.choices(PROMPTS, k=rng.choice([1, 1, 2]))]
    if rng.random() < 0.5:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": texts[0]}]}
        prompts, echoed = [prompt_ids(texts[0])[0].tolist()], [""]
    else:
        prompts = [tokenizer(text).input_ids for text in texts]
        given: Any = texts
        if rng.random() < 0.5:  # no text has these
            given = prompts = [rng.choices(range(4, len(tokenizer)), k=rng.randint(1, 60)) for _ in texts]
            texts = [tokenizer.decode(ids) for ids in prompts]
        path, body, echoed = "completions", {"prompt": given}, [""] * len(texts)
        if rng.random() < 0.3:
            body["echo"], echoed = True, texts
    # 2. The settings.
    most, tokens = rng.randint(1, 48), range(len(tokenizer))
    settings = {
        "temperature": rng.choice([0, 0.3, 1, 2.5]),
        "top_p": rng.uniform(0.1, 1),
        "top_k": rng.randint(1, 50),
        "min_p": rng.uniform(0, 0.2),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "no_repeat_ngram_size": rng.randint(1, 4),
        "logit_bias": {str(token): rng.uniform(-100, 100) for token in rng.sample(tokens, 5)},
        "min_tokens": rng.randint(0, most),
        "n": rng.choice([1, 2]),
        **rng.choice([{"ignore_eos": True}, {"stop_token_ids": rng.sample(tokens, 20)}]),
    }
    chosen = {name: value for name, value in settings.items() if rng.random() < 0.25}
    body |= {"max_tokens": most, "seed": rng.randint(-(2**63), 2**63 - 1), **chosen}
    request = Request(how, path, body, prompts, echoed)
    if how == "invalid":
        return request
    # 3. Stop strings that the answer has, wherever in a block. Where stop tokens are left in it, text may hide some.
    if rng.random() < 0.4 and not chosen.keys() & {"ignore_eos", "stop_token_ids"}:
        starts = [(text, rng.randrange(len(text) + 1)) for text, _ in expect(request)]
        parts = [text[start : start + rng.randint(1, 8)] for text, start in starts]
        body["stop"] = [part for part in parts if part and "\ufffd" not in part][:4] or ["never"]
    request.answers = expect(request)
    return request


def expect(request: Request) -> list[tuple[str, int]]:
    """Return the texts that ``dflash.generate`` writes, up to a stop string, and their tokens."""
    target, draft, tokenizer = pair()
    names = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop_strings"}
    arguments = {names.get(name, name): value for name, value in request.body.items()}
    for name in ("messages", "prompt", "echo", "seed", "n", "ignore_eos"):
        arguments.pop(name, None)
    if request.body.get("ignore_eos"):
        arguments["stop_token_ids"] = []
    if "logit_bias" in arguments:
        arguments["logit_bias"] = {int(token): bias for token, bias in arguments["logit_bias"].items()}
    answers = []
    for ids in request.prompts:
        for number in range(request.body.get("n", 1)):
            out = dflash.generate(
                target, draft, torch.tensor([ids]), tokenizer=tokenizer, return_dict_in_generate=True,
                seed=fold(request.body["seed"], number), **arguments,
            )  # fmt: skip
            new = out.sequences[0, len(ids) :][: out.statistics.num_new_tokens[0]]
            text = tokenizer.decode(new, skip_special_tokens=True)
            ends = [at for stop in request.body.get("stop", ()) if (at := text.find(stop)) >= 0]
            answers.append((text[: min(ends, default=len(text))], len(new)))
    return answers


def spoil(rng: random.Random, request: Request) -> bytes:
    """Return a body that must be refused."""
    field = "messages" if "messages" in request.body else "prompt"
    wrong = [{"temperature": "1"}, {"n": 0}, {"seed": 2**70}, {"unknown": 1}, {"\ud800": 1}, {"stop": "\ud800"}]
    wrong += [{field: None}, {field: [{}]}, {field: [[99999]]}, {"n": 10**30}, {"seed": float("nan")}]
    bodies = [json.dumps(request.body | fields).encode() for fields in wrong]
    whole = json.dumps(request.body).encode()
    bodies += [b"", b"[]", whole[:-1], whole + b"}", b"[" * 20_000, b'{"n": ' + b"1" * 9000 + b"}", b"\xff" + whole]
    return rng.choice(bodies)


# ---------------------------------------------------------------------------------------------- what is answered


async def ask(client: httpx.AsyncClient, request: Request, rng: random.Random) -> None:
    """Ask a request in its way, and compare."""
    if request.how == "invalid":
        response = await client.post(request.path, content=spoil(rng, request), headers=JSON)
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
        found = response.json()
        texts = [c["message"]["content"] if "message" in c else c["text"] for c in found["choices"]]
        assert texts == shown(request)
        assert found["usage"]["completion_tokens"] == sum(tokens for _, tokens in request.answers)
    else:
        await read_stream(client, request, rng.randrange(12) if request.how == "leave a stream" else None)


async def read_stream(client: httpx.AsyncClient, request: Request, events: int | None) -> None:
    """Read a stream, or leave it after some events, and compare what was read."""
    body = request.body | {"stream": True, "stream_options": {"include_usage": True}}
    texts, usage, is_whole = [""] * len(request.answers), None, False
    async with client.stream("POST", request.path, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if events == 0:
                break
            events = events and events - bool(line)
            if line == "data: [DONE]":
                is_whole = True
            elif line:
                chunk = json.loads(line.removeprefix("data: "))
                usage = chunk.get("usage")
                for choice in chunk["choices"]:
                    delta = choice.get("delta", {})
                    texts[choice["index"]] += delta.get("content", "") if "delta" in choice else choice["text"]
    if is_whole:
        assert texts == shown(request)
        assert usage["completion_tokens"] == sum(tokens for _, tokens in request.answers)
    else:
        assert request.how == "leave a stream"
        assert all(whole.startswith(text) for whole, text in zip(shown(request), texts, strict=True))


def shown(request: Request) -> list[str]:
    """Return the texts of a request's answers, after the prompts if these are echoed."""
    count = len(request.answers) // len(request.prompts)
    return [request.echoed[index // count] + text for index, (text, _) in enumerate(request.answers)]


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


def memory(server: Command) -> float:
    """Return the MB of a server's resident memory."""
    (line,) = [line for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines() if "VmRSS" in line]
    return int(line.split()[1]) / 1024


@pytest.mark.long
def test_a_mixture_of_requests():
    rng = random.Random(COUNT)
    requests = [draw(rng) for _ in range(COUNT)]
    with command("--max-length", "512", "--dtype", "float32") as server:
        asyncio.run(ask_all(server.url, requests[: COUNT // 2], rng))
        wait_until(lambda: server.is_idle)
        before = memory(server)
        asyncio.run(ask_all(server.url, requests[COUNT // 2 :], rng))
        wait_until(lambda: server.is_idle)
        grown = memory(server) - before
        ended = {how: server.metric(f'dflash_requests_total{{outcome="{how}"}}') for how in OUTCOMES}
        server.process.terminate()
        assert server.process.wait(60) in (0, -signal.SIGTERM)
        assert "Traceback" not in server.process.stderr.read()
    hows = [request.how for request in requests]
    print(f"\n{ended}, memory {before:.0f} MB after half of them, {grown:+.1f} MB at the end")
    assert ended["failed"] == 0
    assert ended["refused"] == hows.count("invalid")
    assert ended["completed"] >= hows.count("whole") + hows.count("stream")
    assert ended["completed"] + ended["cancelled"] <= COUNT - hows.count("invalid")
    assert grown < 16
