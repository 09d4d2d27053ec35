"""Servers by the number of clients: ``dflash serve``, the same without a drafter, and transformers' own server.

    python bench/bench_serve.py [--clients 1 2 4 8] [--requests 24] [--json FILE] [--plot FILE]

Each server is a process of its own, alone on the machine next to this one, which plays the clients. A client asks the
next prompt of the pair as soon as its answer has ended, greedily and streamed. Prints, per server and number of
clients: tokens per second of all clients, and median and 95th percentile of the time to the first token and between
events that have text. transformers counts no tokens in a stream, so the tokenizer counts those of every answer.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import openai
import package_pair
from servers import running
from transformers import AutoTokenizer

FIRST = "dflash"
NAMES = (FIRST, "without a drafter", "transformers")


@dataclass(frozen=True)
class Row:
    """A server's figures; times in milliseconds."""

    server: str
    clients: int
    tokens_per_second: float
    first_median: float
    first_p95: float
    between_median: float
    between_p95: float


def command(name: str, pair: Path, clients: int, port: int) -> list[str]:
    """Return what starts a server."""
    target, draft = str(pair / "target"), str(pair / "draft")
    if name == "transformers":
        start = "from transformers.cli.transformers import main; main()"
        options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
        return [sys.executable, "-c", start, "serve", target, *options]
    options = ["--model", target, "--draft", draft, "--name", "pair", "--rows", str(clients), "--port", str(port)]
    options += ["--dtype", "float32"] + (["--block-size", "1"] if name != FIRST else [])
    return [sys.executable, "-c", "from dflash.cli import main; main()", "serve", *options]


@contextlib.contextmanager
def started(arguments: list[str], port: int) -> Iterator[openai.AsyncOpenAI]:
    """Run a server; yields a client once the server answers."""
    with running(arguments, port) as url:
        yield openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def answer(client: openai.AsyncOpenAI, model: str, prompt: str) -> tuple[str, list[float]]:
    """Ask a prompt; return the answer, and the times of the request and of each event with text."""
    times, text = [time.perf_counter()], ""
    message = {"role": "user", "content": prompt}
    call = {"model": model, "messages": [message], "temperature": 0, "max_tokens": 200, "stream": True}
    async for chunk in await client.chat.completions.create(**call):
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            text += piece
            times.append(time.perf_counter())
    return text, times


async def load(client: openai.AsyncOpenAI, model: str, prompts: list[str], clients: int) -> tuple[list, float]:
    """Return every answer with its times, and the seconds of all."""
    waiting, found = iter(prompts), []

    async def ask() -> None:
        for prompt in waiting:
            found.append(await answer(client, model, prompt))

    async with client:
        await answer(client, model, prompts[0])  # what a first request costs is not measured
        began = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(clients)))
        return found, time.perf_counter() - began


def measure(name: str, clients: int, arguments: argparse.Namespace, prompts: list[str], tokenizer: object) -> Row:
    """Start a server and put it under load."""
    model = str(arguments.pair / "target") if name == "transformers" else "pair"
    with started(command(name, arguments.pair, clients, arguments.port), arguments.port) as client:
        found, seconds = asyncio.run(load(client, model, prompts, clients))
    tokens = sum(len(tokenizer(text).input_ids) for text, _ in found)
    first = [1000 * (times[1] - times[0]) for _, times in found if len(times) > 1]
    between = [1000 * (b - a) for _, times in found for a, b in itertools.pairwise(times[1:])]
    times = [f(values) for values in (first, between) for f in (statistics.median, _p95)]
    return Row(name, clients, tokens / seconds, *times)


def _p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def plot(rows: list[Row], file: Path) -> None:
    """Draw tokens per second by the number of clients."""
    import matplotlib.pyplot as plt

    for name in dict.fromkeys(row.server for row in rows):
        own = [row for row in rows if row.server == name]
        plt.plot([row.clients for row in own], [row.tokens_per_second for row in own], marker="o", label=name)
    plt.xticks(sorted({row.clients for row in rows}))
    plt.xlabel("clients")
    plt.ylabel("tokens per second")
    plt.ylim(bottom=0)
    plt.legend()
    plt.savefig(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package_pair.add_option(parser)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=24, help="per server and number of clients")
    parser.add_argument("--only", choices=NAMES, nargs="+", default=NAMES)
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.pair / "target")
    lines = (arguments.pair / "prompts.jsonl").read_text().splitlines()[: arguments.requests]
    prompts = [json.loads(line)["prompt"] for line in lines]
    print(f"{harness.processor()}, {harness.commit()}, {len(prompts)} requests\n")
    print(f"{'server':<20}{'clients':>8}{'tokens/s':>10}  first token: median, p95 (ms)   between: median, p95 (ms)")
    rows = []
    for name in arguments.only:
        for clients in arguments.clients:
            rows.append(row := measure(name, clients, arguments, prompts, tokenizer))
            first = f"{row.first_median:.0f}, {row.first_p95:.0f}"
            between = f"{row.between_median:.1f}, {row.between_p95:.1f}"
            print(f"{name:<20}{clients:>8}{row.tokens_per_second:>10.0f}  {first:>30}  {between:>26}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)
