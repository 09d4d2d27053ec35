"""Interleaved timing, on CPU by a clock and on a GPU by events."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from .cases import Case


@functools.cache
def cache_bytes(device: torch.device) -> int:
    """The device's last-level cache."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) << {"K": 10, "M": 20, "G": 30}[text[-1]])
    return max(sizes) or 32 << 20


def _bytes(operands: Iterable) -> int:
    tensors = (x if isinstance(x, list | tuple) else [x] for x in operands)
    return sum(t.nbytes for group in tensors for t in group if isinstance(t, Tensor))


def operand_sets(case: Case, cold: bool, device: torch.device) -> list[tuple]:
    """One set of operands, or with ``cold`` so many that a round over them leaves nothing in the cache."""
    sets = [case.make()]
    if cold:
        count = 2 * cache_bytes(device) // max(_bytes(sets[0]), 1) + 1
        sets += [case.make() for _ in range(min(count, 256) - 1)]
    return sets


def _cpu_sampler(run: Callable, sets: list[tuple], at_least: float, clock: Callable) -> Callable[[], float]:
    """A function that returns the seconds of one call, averaged over enough calls to last ``at_least`` seconds."""
    at = 0

    def calls(count: int) -> float:
        nonlocal at
        began = clock()
        for _ in range(count):
            run(*sets[at])
            at = at + 1 if at + 1 < len(sets) else 0
        return max(clock() - began, 1e-9) / count

    once, count = calls(1), 1
    if once < at_least:  # else the first call was all the warm-up it needs
        once = calls(1)
    while once * count < at_least:
        count = max(2 * count, min(int(at_least / once), 8 * count))
        once = calls(count)
    return functools.partial(calls, count)


def _cuda_sampler(run: Callable, sets: list[tuple], at_least: float, clock: Callable) -> Callable[[], float]:
    """The same by events around replays of a CUDA graph that holds calls over every set of operands."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what a first call does must not be captured
        for _ in range(2):
            run(*sets[0])
    torch.cuda.current_stream().wait_stream(side)
    rounds = -(-16 // len(sets))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for operands in sets:
                run(*operands)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replays(count: int) -> float:
        began.record()
        for _ in range(count):
            graph.replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1000 / (count * rounds * len(sets))

    replays(1)
    return functools.partial(replays, max(1, int(at_least / max(replays(1) * rounds * len(sets), 1e-7))))


def interleaved(
    runners: dict[str, Callable], sets: list[tuple], device: torch.device, seconds: float, clock: Callable
) -> dict[str, list[float]]:
    """Seconds a call of every runner, sampled in turns for about ``seconds``.

    At least three samples each, but one will do where that would take more than ten times as long.
    """
    sampler = _cuda_sampler if device.type == "cuda" else _cpu_sampler
    samplers = {name: sampler(run, sets, seconds / 60, clock) for name, run in runners.items()}
    times: dict[str, list[float]] = {name: [] for name in runners}
    began, order = time.perf_counter(), list(runners)
    rounds, spent = 0, 0.0
    while rounds == 0 or (rounds < 50 and spent < (seconds if rounds >= 3 else max(10 * seconds, 0.1))):
        for name in order:
            times[name].append(samplers[name]())
        order.reverse()
        rounds, spent = rounds + 1, time.perf_counter() - began
    return times


def copy_bandwidth(device: torch.device, quick: bool, clock: Callable) -> float:
    """Bytes a second that a large copy reads and writes, the median of several."""
    count = 1 << (18 if quick else 28 if device.type == "cuda" else 26)
    source, target = torch.zeros(count, device=device), torch.zeros(count, device=device)
    sampler = _cuda_sampler if device.type == "cuda" else _cpu_sampler
    sample = sampler(lambda a, b: a.copy_(b), [(target, source)], 0.01, clock)
    return 2 * source.nbytes / statistics.median(sample() for _ in range(3 if quick else 9))
