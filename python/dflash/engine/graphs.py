"""How a step reaches the device, and how its results reach the host.

On a GPU a step is launched as one CUDA graph, and the host reads its report through pinned memory one step late: while
it waits for step n, step n + 1 is already queued, so that the device never waits for the host. On a CPU,
`Direct` runs each step at once.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..terminal import first_line

_CAPTURING = threading.Lock()  # captures and watches change settings of the whole process
_WARM_UPS = 2  # real steps before a capture: one makes what is made at first use, one is watched
# The least recently used goes first. Five widths (`block_size="auto"`) of six kinds of calls.
MAX_GRAPHS = 32


def _is_dead(kind: Hashable) -> bool:
    """Return True for a kind that refers weakly to what has been freed: it will never come again."""
    parts = kind if isinstance(kind, tuple) else ()
    return any(isinstance(part, weakref.ref) and part() is None for part in parts)


def _drop_dead(made: dict[Hashable, Any]) -> None:
    """Drop what was made for kinds that will never come again."""
    for kind in [kind for kind in made if _is_dead(kind)]:
        del made[kind]


def captured(step: Callable[[], object], pool: object, stream: torch.cuda.Stream) -> Callable[[], None]:
    """Capture ``step`` on ``stream`` without running it; return a function that launches it."""
    # By default `torch.cuda.graph` uses one stream for the whole process, on the device of its first capture: a step on
    # another device would run instead of being captured.
    graph = torch.cuda.CUDAGraph()
    # The first of the two puts the current stream back where a capture that fails leaves another.
    current = torch.cuda.stream(torch.cuda.current_stream())
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with _CAPTURING, _uncollected(), current, capture:
        step()
    return graph.replay


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect garbage before, not inside: a generator that is freed waits for its device, which a capture forbids."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _with_own_code(function: Callable) -> Callable:
    """Return ``function`` in a code object of its own, by which torch finds and counts compiled graphs."""

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    call.__code__ = call.__code__.replace()
    return call


def compiled_per_kind(step: Callable[[], None], kind: Callable[[], Hashable]) -> Callable[[], None]:
    """Return ``step``, compiled whole to one graph per value of ``kind()``; see `Replay.launch`."""
    # torch would guard a graph by some 400 tests of modules and tensors, a tenth of the time of a small step. None of
    # them can change while the generator holds what it was made with. Without guards torch would take another
    # generator's graph, if the two had one code object.
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "size_asserts": False}
    return _compiled(step, kind, fullgraph=True, options=options)


def compiled_per_shape(function: Callable) -> Callable:
    """Return ``function``, compiled by itself for each shape of its first argument and the arguments that are None.

    torch would compile one code object for eight shapes, and run it as it is for any other.
    """
    return _compiled(function, lambda first, *rest: (first.shape, *(x is None for x in rest)))


def _compiled(function: Callable, kind: Callable[..., Hashable], **options: Any) -> Callable:
    """Return ``function``, compiled in a code object of its own for each value of ``kind``; see `torch.compile`."""
    compiled: OrderedDict[Hashable, Callable] = OrderedDict()

    def run(*arguments: Any) -> Any:
        key = kind(*arguments)
        if key in compiled:
            compiled.move_to_end(key)
        else:
            _drop_dead(compiled)
            while len(compiled) >= MAX_GRAPHS:
                compiled.popitem(last=False)
            compiled[key] = torch.compile(_with_own_code(function), dynamic=False, **options)
        return compiled[key](*arguments)

    return run


class Device:
    """A GPU as `Replay` uses it: warm-ups and captures, and two pinned reports, used in turn, with an event each.

    Args:
        report: see `Replay`.
    """

    _stream: torch.cuda.Stream | None = None

    def __init__(self, report: Tensor) -> None:
        pinned = {"dtype": report.dtype, "device": "cpu", "pin_memory": True}
        self._report, self._slots = report, [torch.empty(report.shape, **pinned) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self._side, self._pool = torch.cuda.Stream(report.device), torch.cuda.graph_pool_handle()

    def warm_up(self, step: Callable[[], None]) -> None:
        """Run ``step`` on a side stream, as torch requires before a capture."""
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            step()
        current.wait_stream(self._side)

    def watch(self, step: Callable[[], None]) -> str:
        """Run ``step``; return where in it the host waited for the device, empty if nowhere."""
        thread, places = threading.get_ident(), []
        with _CAPTURING, warnings.catch_warnings():
            mode, show = torch.cuda.get_sync_debug_mode(), warnings.showwarning

            def note(message, category, filename, lineno, *rest) -> None:
                text = str(message)
                if "called a synchronizing CUDA operation" not in text:
                    if "debug mode is a prototype" not in text:  # what switching it on says
                        show(message, category, filename, lineno, *rest)
                elif threading.get_ident() == thread:
                    places.append(f"{Path(filename).name}:{lineno}")

            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self.warm_up(step)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        return places[0] if places else ""

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        """Capture ``step`` without running it; return a function that launches it."""
        try:
            return captured(step, self._pool, self._side)
        except BaseException:
            # A failed capture may leave the old ones half open.
            self._pool, self._side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._report.device)
            raise

    def send(self, slot: int) -> None:
        """Queue the copy of the report to one of two places."""
        self._slots[slot].copy_(self._report, non_blocking=True)
        self._events[slot].record()

    def receive(self, slot: int) -> list:
        """Wait for the report that was sent to a place, and return it."""
        self._events[slot].synchronize()
        return self._slots[slot].tolist()

    def drain(self) -> None:
        """Wait until nothing that was launched is running; the memory of the steps may then be freed."""
        for event in self._events:
            event.synchronize()

    def settle(self) -> None:
        """Wait for what was queued so far: kernels read weights before the kernel ahead, which may write them, ends."""
        torch.cuda.current_stream(self._report.device).synchronize()

    def follow(self) -> None:
        """Order the current stream after all that this call, or the one before it, queued on another stream."""
        last, self._stream = self._stream, torch.cuda.current_stream()
        if last is not None and last != self._stream:
            self._stream.wait_stream(last)


class Replay:
    """Runs a kind of step twice as it is, then captures it, and from then on replays it.

    A graph is its kernels, with the addresses and the Python values of the capture. ``kind`` must therefore differ
    wherever a step would branch differently, and `clear` must be called when a tensor has moved. All graphs share
    one private memory pool: they are launched one after another, and nothing in it outlives a step.

    A step that waits for the device, or that cannot be captured, keeps running kernel by kernel: ``reason`` says why.

    Args:
        report: ``[batch, n]`` int64 on the GPU, which every step writes for the host; always the same tensor.
        device: another device than the report's own.

    Attributes:
        device: the GPU; tests have one that records torch's calls.
        reason: why the last step ran kernel by kernel; empty if it was replayed or will soon be captured.
    """

    ahead, warm_ups, clock = 1, _WARM_UPS + 1, staticmethod(time.perf_counter)

    def __init__(self, report: Tensor, device: Device | None = None) -> None:
        self.device, self.reason = device or Device(report), ""
        self.drain, self.settle = self.device.drain, self.device.settle
        self._graphs: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._seen: dict[Hashable, int] = {}
        self._refused: dict[Hashable, str] = {}
        self._launched = self._read = 0

    @property
    def graphs(self) -> int:
        """Number of graphs in use."""
        return len(self._graphs)

    def start(self) -> None:
        """Begin a call."""
        self.device.follow()
        self._launched = self._read = 0

    def clear(self) -> None:
        """Forget every graph because a tensor moved or code changed. Waits for those that are running."""
        if self._graphs:
            self.drain()
        self._graphs.clear()
        self._seen.clear()
        self._refused.clear()

    def launch(self, step: Callable[[], None], kind_of_step: Callable[[], Hashable], obstacle: str = "") -> None:
        """Queue ``step``, and the copy of its report.

        Args:
            step: run, or captured; all of its work goes to the current stream.
            kind_of_step: returns everything that its branches and shapes depend on. A tuple may refer weakly to what
                the step uses; what is kept for a kind goes when that is freed.
            obstacle: why this step must not be captured; empty if it may.
        """
        self.device.follow()
        kind = kind_of_step()
        self.reason = obstacle or self._refused.get(kind, "")
        if self.reason:
            step()
        elif kind in self._graphs:
            self._graphs.move_to_end(kind)
            self._graphs[kind]()
        else:
            self._prepare(step, kind)
        self.device.send(self._launched % 2)
        self._launched += 1

    def read(self) -> list:
        """Return the oldest unread report; waits for its step and for no later one."""
        slot = self._read % 2
        self._read += 1
        return self.device.receive(slot)

    def _prepare(self, step: Callable[[], None], kind: Hashable) -> None:
        """Run a step of a kind that has no graph yet; capture it once it has warmed up."""
        if kind not in self._seen:
            self._forget_dead()
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        if seen < _WARM_UPS:
            self.device.warm_up(step)
            return
        if seen == _WARM_UPS:
            if where := self.device.watch(step):
                self._refused[kind] = self.reason = f"the step waits for the device ({where})"
            return
        try:
            graph = self.device.capture(step)
        except Exception as error:  # nothing of the step was run
            # The next captures use another stream, on which other kinds have not warmed up.
            self._seen = {each: times for each, times in self._seen.items() if each in self._graphs}
            self._refused[kind] = self.reason = f"the step could not be captured: {first_line(error)}"
            step()
            return
        while len(self._graphs) >= MAX_GRAPHS:
            evicted, _ = self._graphs.popitem(last=False)
            del self._seen[evicted]
        self._graphs[kind] = graph
        graph()

    def _forget_dead(self) -> None:
        """Drop what is kept for dead kinds, once their steps have ended."""
        if any(map(_is_dead, self._graphs)):
            self.drain()
        for made in (self._graphs, self._seen, self._refused):
            _drop_dead(made)
