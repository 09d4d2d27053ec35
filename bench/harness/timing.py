"""Interleaved timing: on CPU by a clock, on a GPU by events around graph replays."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

Sampler = Callable[[], float]


@dataclass(frozen=True)
class Timer:
    """Times calls on a device.

    Attributes:
        device: where the calls run.
        clock: seconds on CPU; a GPU's time is taken from events.
    """

    device: torch.device
    clock: Callable[[], float] = time.perf_counter

    def sampler(self, run: Callable, sets: list[tuple], at_least: float) -> Sampler:
        """Return a function that times calls lasting ``at_least`` seconds together, and returns seconds per call.

        Args:
            run: what is called.
            sets: its operands; calls take turns over them.
            at_least: seconds per sample.
        """
        if self.device.type == "cuda":
            return _cuda_sampler(run, sets, at_least)
        return _cpu_sampler(run, sets, at_least, self.clock)

    def interleaved(self, runners: dict[str, Callable], sets: list[tuple], seconds: float) -> dict[str, list[float]]:
        """Sample all runners in turns for about ``seconds``; returns seconds per call.

        Takes at least three samples of each, or one where three would take more than ten times as long.
        """
        samplers = {name: self.sampler(run, sets, seconds / 60) for name, run in runners.items()}
        times: dict[str, list[float]] = {name: [] for name in runners}
        began, order = time.perf_counter(), list(runners)
        rounds, spent = 0, 0.0
        while rounds == 0 or (rounds < 50 and spent < (seconds if rounds >= 3 else max(10 * seconds, 0.1))):
            for name in order:
                times[name].append(samplers[name]())
            order.reverse()
            rounds, spent = rounds + 1, time.perf_counter() - began
        return times


def copy_bandwidth(timer: Timer, quick: bool = False) -> float:
    """Measure the bytes per second that a large copy of random numbers reads and writes, the median of several."""
    source = _large(timer.device, quick)
    return 2 * source.nbytes / _median(timer, lambda a, b: a.copy_(b), (torch.zeros_like(source), source), quick)


def read_bandwidth(timer: Timer, quick: bool = False) -> float:
    """Measure the bytes per second of random numbers that torch's fastest reduction reads, the median of several."""
    source = _large(timer.device, quick)
    reductions = (torch.sum, torch.amax, lambda x: x.view(torch.int32).amax(), lambda x: x.view(1024, -1).sum(1))
    return source.nbytes / min(_median(timer, run, (source,), quick) for run in reductions)


def _large(device: torch.device, quick: bool) -> Tensor:
    """Return random numbers that no cache holds, fewer with ``quick``. Zeros may be compressed on the way."""
    return torch.rand(1 << (18 if quick else 28 if device.type == "cuda" else 26), device=device)


def _median(timer: Timer, run: Callable, operands: tuple, quick: bool) -> float:
    sample = timer.sampler(run, [operands], 0.01)
    return statistics.median(sample() for _ in range(3 if quick else 9))


def operand_sets(make: Callable[[], tuple], cold: bool, device: torch.device) -> list[tuple]:
    """Make one set of operands, or with ``cold`` enough sets that a round over them leaves nothing in the cache."""
    sets = [make()]
    if cold:
        count = 2 * _cache_bytes(device) // max(_bytes(sets[0]), 1) + 1
        sets += [make() for _ in range(min(count, 256) - 1)]
    return sets


@functools.cache
def _cache_bytes(device: torch.device) -> int:
    """Return the size of the device's last-level cache."""
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


def _cpu_sampler(run: Callable, sets: list[tuple], at_least: float, clock: Callable) -> Sampler:
    at = 0

    def calls(count: int) -> float:
        nonlocal at
        began = clock()
        for _ in range(count):
            run(*sets[at])
            at = at + 1 if at + 1 < len(sets) else 0
        return max(clock() - began, 1e-9) / count

    once, count = calls(1), 1
    if once < at_least:  # otherwise the first call was enough of a warm-up
        once = calls(1)
    while once * count < at_least:
        count = max(2 * count, min(int(at_least / once), 8 * count))
        once = calls(count)
    return functools.partial(calls, count)


def _cuda_sampler(run: Callable, sets: list[tuple], at_least: float) -> Sampler:
    # 1. What a first call does must not be captured
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(*sets[0])
    torch.cuda.current_stream().wait_stream(side)
    # 2. Capture at least 16 calls, over every set of operands
    rounds = -(-16 // len(sets))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for operands in sets:
                run(*operands)
    # 3. Replay as often as a sample needs
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
