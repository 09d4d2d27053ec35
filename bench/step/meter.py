"""The clocks: marks at the start of every step, and the time that the host spends waiting."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch.profiler import profile

SKIPPED = 2  # steps at the start of a round: the first takes in the whole context, and no step is queued before it


class Meter:
    """Records, at the start of every step, device time, host time, and how long the host has waited so far.

    Args:
        device: where the steps run.
        profiler: started at mark ``SKIPPED``, stopped ``profiled`` steps later.
    """

    profiled = 3

    def __init__(self, device: torch.device, profiler: profile | None = None) -> None:
        self.on_gpu, self.profiler = device.type == "cuda", profiler
        self.device_marks: list = []
        self.host_marks: list[float] = []
        self.waited: list[float] = []

    def mark(self, waited: float) -> None:
        """Record the start of a step; the host has waited ``waited`` seconds so far."""
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
        """Return the time of every step except the first ``SKIPPED``; on a GPU, waits for the device."""
        if not self.on_gpu:
            return [1000 * (b - a) for a, b in pairwise(self.host_marks[SKIPPED:])]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(self.device_marks[SKIPPED:])]

    def host_microseconds(self) -> list[float]:
        """Return the host's time without its waits, for the same steps."""
        busy = [host - waited for host, waited in zip(self.host_marks, self.waited, strict=True)][SKIPPED:]
        return [1e6 * (b - a) for a, b in pairwise(busy)]


class Waits:
    """Adds up the seconds spent in Python calls that wait for the device, while `open` is active."""

    CALLS = (
        (torch.cuda.Event, ("synchronize",)),
        (torch.Tensor, ("item", "tolist", "cpu", "__bool__", "__int__", "__index__")),
    )

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Time these calls inside the context; leave the classes as they were."""
        originals = [(owner, name, owner.__dict__.get(name)) for owner, names in self.CALLS for name in names]
        for owner, name, _ in originals:
            setattr(owner, name, self._timed(getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, original in originals:
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
