"""The package's pair behind the server: in this process, or on a port of this machine."""

import asyncio
import contextlib
import copy
import functools
import json
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

import dflash
from dflash_serve.app import Server, build_app
from dflash_serve.port import bind
from dflash_serve.prompts import PromptReader
from dflash_serve.receipts import ReceiptFolder
from dflash_serve.scheduler import Scheduler
from dflash_serve.service import Service

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SUM = "add 48213 and 90377"
QUESTION = [{"role": "user", "content": SUM}]
# Chat templates that show each message's role and reasoning, and one that begins the reasoning of an answer.
ROLES = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.reasoning_content }}{% endfor %}"
THINKS = "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}=>\n<think>{# </think> #}"
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TRIP = "trip: from Lorne; to Dalmere; train 362; hour 7; person Tilda"


@functools.cache
def pair(dtype: torch.dtype = torch.float32) -> tuple:
    """Load the package's target, drafter and tokenizer."""
    return dflash.demo_pair(dtype=dtype)


def serve(
    *, rows: int = 2, queue: int = 8, timeout: float = 120.0, chunk: int = 8, template: str = "",
    dtype: torch.dtype = torch.float32, receipts: Path | None = None, tolerance: dict[str, Any] | None = None,
    **options: Any,
) -> Service:  # fmt: skip
    """Return a service of the pair; ``template`` replaces the chat template, ``receipts`` is a folder.

    ``tolerance`` has further fields of the service, ``options`` are those of the generator.
    """
    target, draft, tokenizer = pair(dtype)
    if template:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = template
    generator = dflash.Generator(target, draft, max_length=512, batch_size=rows, prefill_chunk=chunk, **options)
    scheduler = Scheduler(generator, max_waiting=queue)
    folder = None if receipts is None else ReceiptFolder(receipts, target, tokenizer, scheduler)
    fields = {"scheduler": scheduler, "reader": PromptReader(tokenizer), "name": "pair", "version": "0"}
    return Service(**fields, timeout=timeout, receipts=folder, **(tolerance or {}))


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[Service]:
    """Serve in this process; at the end all rows must be free."""
    service = serve(**options)
    yield service
    service.scheduler.close(drain=False)
    assert (service.scheduler.running, service.scheduler.waiting) == (0, 0)


def ask(
    service: Service, path: str, body: Any, *, key: str | None = None, headers: dict[str, str] | None = None,
    origins: Sequence[str] = (), method: str = "GET",
) -> httpx.Response:  # fmt: skip
    """POST ``body``, a dict as JSON, or GET if it is None; ``key`` and ``origins`` are the server's.

    ``key`` may have several, with spaces between them.
    """

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(service, (key or "").split(), origins), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://pair", timeout=120) as client:
            if body is None:
                return await client.request(method, path, headers=headers)
            content = json.dumps(body).encode() if isinstance(body, dict) else body
            sent = {"Content-Type": "application/json"} | (headers or {})
            return await client.post(path, content=content, headers=sent)

    return asyncio.run(call())


def chat(content: str = SUM, **fields: Any) -> dict[str, Any]:
    """Return the body of a chat request."""
    return {"model": "pair", "messages": [{"role": "user", "content": content}], "max_tokens": 300} | fields


def content(response: httpx.Response) -> str:
    """Return the text of an answer, as its API writes it."""
    assert response.status_code == 200, response.text
    found = response.json()
    if "choices" in found:
        found = found["choices"][0]
    if "text" in found and isinstance(found["text"], str):
        return found["text"]
    if "response" in found:
        return found["response"]
    if "message" in found:
        return found["message"]["content"]
    return (found["output"][0] if "output" in found else found)["content"][0]["text"]


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """Return a stream's chunks; it must end with [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refused(response: httpx.Response, message: str, status: int = 400) -> dict[str, Any]:
    """Return the error of a refusal by OpenAI's API, whose message must have these words."""
    assert response.status_code == status, response.text
    found = response.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert message in found["message"]
    return found


def cut(text: str, places: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a text that end at ``places``, and True with the last."""
    ends = sorted({min(place, len(text)) for place in places} | {len(text)})
    for start, end in zip([0, *ends], ends, strict=False):
        yield text[start:end], end == len(text)


def without(value: Any, *names: str) -> Any:
    """Return what a client made of JSON without the fields of these names, wherever they are."""
    if isinstance(value, dict):
        return {name: without(part, *names) for name, part in value.items() if name not in names}
    return [without(part, *names) for part in value] if isinstance(value, list) else value


def count(service: Service, messages: list[dict[str, Any]], **fields: Any) -> int:
    """Count the tokens of a conversation."""
    return ask(service, "/tokenize", {"messages": messages, **fields}).json()["count"]


def prompt_ids(content: str = SUM) -> torch.Tensor:
    """Return the ids ``[1, length]`` of a question."""
    return pair()[2].apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_tensors="pt"
    ).input_ids  # fmt: skip


def direct(ids: torch.Tensor, **arguments: Any) -> list[str]:
    """Return what ``dflash.generate`` writes."""
    target, draft, tokenizer = pair()
    out = dflash.generate(target, draft, ids, tokenizer=tokenizer, **arguments)
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


class Reader:
    """A request's events, one after another; raises its error where it is read."""

    def __init__(self, scheduler: Scheduler, ids: torch.Tensor, **arguments: Any) -> None:
        self._items = queue.SimpleQueue()
        self.cancel = scheduler.submit(scheduler.session.resolve(ids[None], **arguments), self._items.put).cancel

    def __iter__(self) -> Iterator[dflash.StreamEvent]:
        while (item := self._items.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


class Gate:
    """Holds a scheduler's thread before a step until ``open()`` is called, for a minute at most."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.reached, self.opened, self.steps = threading.Event(), threading.Event(), 0
        step = scheduler.session.step

        def gated() -> Any:
            self.reached.set()
            self.opened.wait(60)
            self.steps += 1
            return step()

        scheduler.session.step, self.open = gated, self.opened.set


def slow_down(service: Service, seconds: float = 0.02) -> None:
    """Sleep before each step, so that an answer is still being written when a test looks."""
    step = service.scheduler.session.step

    def slowly() -> Any:
        time.sleep(seconds)
        return step()

    service.scheduler.session.step = slowly


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until ``condition()`` is true, for a minute at most."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within a minute")


@dataclass
class Live:
    """A server on a port of this machine."""

    service: Service
    server: Server
    url: str
    thread: threading.Thread

    def end(self) -> None:
        """Ask for the end, as a signal does."""
        self.server.should_exit = True


@contextlib.contextmanager
def live(
    *, key: str | None = None, grace: float = 30.0, service: Service | None = None, **options: Any
) -> Iterator[Live]:
    """Serve ``service``, by default one of the pair, on a free port.

    At the end the server and its scheduler must have ended.
    """
    service = service or serve(**options)
    server, bound = Server(service, keys=[key] if key else [], grace=grace), bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    wait_until(lambda: server.started)
    running = Live(service, server, f"http://127.0.0.1:{bound.getsockname()[1]}/v1", thread)
    try:
        yield running
    finally:
        running.end()
        thread.join()
    assert (service.scheduler.running, service.scheduler.waiting) == (0, 0)


@contextlib.contextmanager
def client(**options: Any) -> Iterator[Any]:
    """Serve on a free port; yield OpenAI's client for it. ``options`` are those of `live`."""
    import openai  # not every environment that serves has it

    with live(**options) as server, openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as asking:
        yield asking


@dataclass
class Command:
    """A process of ``dflash serve``."""

    process: subprocess.Popen[str]
    url: str

    def metric(self, name: str) -> float:
        """Return a value of /metrics by its name and labels; 0 if nothing was counted yet."""
        page = httpx.get(self.url.replace("/v1", "/metrics"), timeout=60).text
        found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
        return float(found[1]) if found else 0.0


@contextlib.contextmanager
def command(*options: str) -> Iterator[Command]:
    """Run ``dflash serve`` with the package's pair on a free port, until SIGTERM."""
    arguments = [sys.executable, "-c", "from dflash.cli import main; main()", "serve", "--port", "0", *options]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = ""
            while not url:
                line = process.stderr.readline()
                assert line, "it ended"
                url = (re.findall(r"dflash-pair on (http://127\.0\.0\.1:\d+/v1),", line) or [""])[0]
            wait_until(lambda: _is_up(url))
            yield Command(process, url)
        finally:
            process.terminate()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(url.replace("/v1", "/health"), timeout=60).status_code == 200
    except httpx.ConnectError:
        return False
