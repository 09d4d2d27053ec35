"""The clock."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch.profiler import profile

SKIPPED = 2  # steps at the begin of a round: the whole context is injected there, or nothing is under way yet


class Meter:
    """Marks at the begin of every step: when the device and the host came there, and how long the host had waited.

    Args:
        device: where the steps run.
        profiler: started at the mark ``SKIPPED``, stopped ``profiled`` steps later.
    """

    profiled = 3

    def __init__(self, device: torch.device, profiler: profile | None = None) -> None:
        self.on_gpu, self.profiler = device.type == "cuda", profiler
        self.device_marks: list = []
        self.host_marks: list[float] = []
        self.waited: list[float] = []

    def mark(self, waited: float) -> None:
        count = len(self.host_marks)
        if self.profiler is not None and count in (SKIPPED, SKIPPED + self.profiled):
            if self.on_gpu:
                torch.cuda.synchronize()
            self.profiler.start() if count == SKIPPED else self.profiler.stop()
        if self.on_gpu:
            self.device_marks.append(torch.cuda.Event(enable_timing=True))
            self.device_marks[-1].record()
        self.host_marks.append(time.perf_counter())
        self.waited.append(waited)

    def milliseconds(self) -> list[float]:
        """Of every step but the first two."""
        if not self.on_gpu:
            marks = self.host_marks[SKIPPED:]
            return [1000 * (b - a) for a, b in pairwise(marks)]
        torch.cuda.synchronize()
        marks = self.device_marks[SKIPPED:]
        return [a.elapsed_time(b) for a, b in pairwise(marks)]

    def host_microseconds(self) -> list[float]:
        busy = [host - waited for host, waited in zip(self.host_marks, self.waited, strict=True)][SKIPPED:]
        return [1e6 * (b - a) for a, b in pairwise(busy)]


class Waits:
    """Seconds spent in the calls of Python that make the host wait for the device, while the context is open."""

    CALLS = (
        (torch.cuda.Event, ("synchronize",)),
        (torch.Tensor, ("item", "tolist", "cpu", "__bool__", "__int__", "__index__")),
    )

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def open(self) -> Iterator[None]:
        kept = [(owner, name, owner.__dict__.get(name)) for owner, names in self.CALLS for name in names]
        for owner, name, _ in kept:
            setattr(owner, name, self._timed(getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, original in kept:
                delattr(owner, name) if original is None else setattr(owner, name, original)

    def _timed(self, call: Callable) -> Callable:
        @functools.wraps(call)
        def timed(*arguments, **options):
            began = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return timed
