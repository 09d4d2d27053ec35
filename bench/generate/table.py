"""Runs every runner over every prompt, in turns, and makes a row per runner of it."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .runners import BASE, ONE_TOKEN, Answer, Runner

HEADS = "runner               ms/token  tokens/s  acceptance  ms/step  speedup  identical"


def measure(found: dict[str, Runner], prompts: list[Tensor], temperature: float) -> list[dict]:
    """Return a row of results per runner; the first is what speedups refer to."""
    # 1. Warm up: allocation, compilation
    for run in found.values():
        run(prompts[0])
    # 2. Take turns over the prompts
    answers: dict[str, list[tuple[Answer, float]]] = {name: [] for name in found}
    for ids in prompts:
        for name, run in found.items():
            began = time.perf_counter()
            answer = run(ids)
            answers[name].append((answer, 1000 * (time.perf_counter() - began)))
    # 3. Medians, and how many answers equal the base's. At T > 0 a seed decides within this package only.
    base = [answer.ids for answer, _ in answers[BASE if temperature == 0 else ONE_TOKEN]]
    rows = [_row(name, results, prompts, base) for name, results in answers.items()]
    for row in rows:
        row["speedup"] = rows[0]["ms_per_token"] / row["ms_per_token"]
    return rows


def _row(name: str, results: list[tuple[Answer, float]], prompts: list[Tensor], base: list[Tensor]) -> dict:
    counts = [answer.ids.shape[1] - ids.shape[1] for (answer, _), ids in zip(results, prompts, strict=True)]
    per_token = statistics.median(ms / count for (_, ms), count in zip(results, counts, strict=True))
    steps = sum(answer.steps for answer, _ in results)
    return {
        "runner": name,
        "ms_per_token": per_token,
        "tokens_per_second": 1000 / per_token,
        "acceptance_length": sum(answer.tokens for answer, _ in results) / max(steps, 1),
        "ms_per_step": statistics.median(ms / max(answer.steps, 1) for answer, ms in results),
        "identical": sum(torch.equal(answer.ids, ids) for (answer, _), ids in zip(results, base, strict=True)),
        "prompts": len(prompts),
    }


def line(row: dict) -> str:
    """Return the line of a row."""
    return (
        f"{row['runner']:<19} {row['ms_per_token']:9.2f} {row['tokens_per_second']:9.0f} "
        f"{row['acceptance_length']:11.2f} {row['ms_per_step']:8.2f} {row['speedup']:7.2f}x "
        f"{row['identical']:>7}/{row['prompts']}"
    )


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` other processes busy inside the context."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()
