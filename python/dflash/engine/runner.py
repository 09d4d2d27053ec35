"""How a step reaches the device, and how its results reach the host.

On a GPU a step is launched as one CUDA graph, and the host reads what it reports through pinned memory one step late:
while it waits for step n, step n + 1 is queued already, so that the device never waits for the host. :class:`Direct` is
the same for a device that the host itself is.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Direct", "Replay", "graph_status"]

_CAPTURING = threading.Lock()  # what a capture and a watch set is the process's
_WARM_UPS = 2  # real steps before a kind of step is captured: one makes what is made at first use, one is watched
_KEPT = 16  # graphs, the last used


def graph_status() -> str:
    """Why CUDA graphs cannot be used on the current device; empty when they can. Captures one addition to find out."""
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    try:
        x = torch.zeros(1, device="cuda")
        replay = _captured(lambda: x.add_(1), None, torch.cuda.Stream())
        replay()
        return "" if x.item() == 1 else "a graph was replayed and did nothing"
    except Exception as error:
        return _first_line(error)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _captured(step: Callable[[], object], pool: object, stream: torch.cuda.Stream) -> Callable[[], None]:
    """A function that launches what ``step`` would; ``step`` is not run.

    Args:
        step: what to capture, on the device of ``stream``.
        pool: of the memory of its temporaries; None for one of its own.
        stream: to capture on. ``torch.cuda.graph`` has one for the whole process otherwise, on the device of its
            first capture: what a step does on another device would not be captured, but run.
    """
    graph = torch.cuda.CUDAGraph()
    # The first of the two puts the current stream back where a capture that fails leaves another.
    current = torch.cuda.stream(torch.cuda.current_stream())
    capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
    with _CAPTURING, _uncollected(), current, capture:
        step()
    return graph.replay


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect garbage now and not in here: a generator that goes waits for its device, which a capture forbids."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Direct:
    """Steps that are over when they are launched.

    Args:
        report: the tensor in which every step leaves what the host wants to know.
    """

    ahead = 0
    """Steps that may be launched before the oldest is read."""

    def __init__(self, report: Tensor) -> None:
        self.report = report
        self.reason = f"the target is on {report.device}"

    def start(self) -> None:
        """A call begins."""

    def launch(self, step: Callable[[], None], kind: Hashable, obstacle: str = "") -> None:
        """Run ``step``; see :meth:`Replay.launch`."""
        step()

    def read(self) -> list:
        """The report of the last step."""
        return self.report.tolist()

    def clear(self) -> None:
        """Nothing is kept."""

    def drain(self) -> None:
        """Nothing is running."""


class Replay:
    """Steps on a GPU: a kind of step is run twice as it is, then captured, and from then on replayed.

    A graph is its kernels with the addresses and the Python values that they were captured with. ``kind`` must
    therefore differ wherever a step would branch otherwise, and :meth:`clear` be called when a tensor moved. All graphs
    share one private memory pool: they are launched one after another, and nothing outlives a step in it.

    A step that waits for the device, or that cannot be captured, stays as it is: ``reason`` says why.

    Args:
        report: ``[batch, n]`` int64 on the GPU, always the same tensor: what every step leaves for the host.

    Attributes:
        reason: why the last step ran kernel by kernel; empty when it was replayed, or is to be captured soon.
    """

    ahead = 1

    def __init__(self, report: Tensor) -> None:
        self.report, self.reason = report, ""
        self._graphs: OrderedDict[Hashable, Callable[[], None]] = OrderedDict()
        self._seen: dict[Hashable, int] = {}
        self._refused: dict[Hashable, str] = {}
        self._launched = self._read = 0
        self._stream: torch.cuda.Stream | None = None
        self._open()

    @property
    def graphs(self) -> int:
        """How many graphs are kept."""
        return len(self._graphs)

    def start(self) -> None:
        """A call begins."""
        self._follow()
        self._launched = self._read = 0

    def clear(self) -> None:
        """Forget every graph: a tensor moved, or code changed. Waits for those that are running."""
        if self._graphs:
            self.drain()
        self._graphs.clear()
        self._seen.clear()
        self._refused.clear()

    def launch(self, step: Callable[[], None], kind: Hashable, obstacle: str = "") -> None:
        """Queue ``step``, and the copy of its report.

        Args:
            step: run, or captured; all of its work goes to the current stream.
            kind: everything that its branches and shapes depend on.
            obstacle: why this step must not be captured; empty when it may.
        """
        self._follow()
        self.reason = obstacle or self._refused.get(kind, "")
        if self.reason:
            step()
        elif kind in self._graphs:
            self._graphs.move_to_end(kind)
            self._graphs[kind]()
        else:
            self._prepare(step, kind)
        self._send(self._launched % 2)
        self._launched += 1

    def read(self) -> list:
        """The oldest report that was not read; waits for its step and for no later one."""
        slot = self._read % 2
        self._read += 1
        return self._receive(slot)

    def _prepare(self, step: Callable[[], None], kind: Hashable) -> None:
        """A step of a kind that has no graph yet."""
        seen = self._seen[kind] = self._seen.get(kind, 0) + 1
        if seen < _WARM_UPS:
            self._warm_up(step)
            return
        if seen == _WARM_UPS:
            if where := self._watch(step):
                self._refused[kind] = self.reason = f"the step waits for the device ({where})"
            return
        try:
            graph = self._capture(step)
        except Exception as error:  # nothing of the step was run
            self._refused[kind] = self.reason = f"the step could not be captured: {_first_line(error)}"
            step()
            return
        while len(self._graphs) >= _KEPT:
            evicted, _ = self._graphs.popitem(last=False)
            del self._seen[evicted]
        self._graphs[kind] = graph
        graph()

    # ------------------------------------------------------------------------------------------ the device

    def _open(self) -> None:
        """Make what is used for every step: two pinned reports in turn, with an event each."""
        self._slots = [torch.empty(self.report.shape, dtype=self.report.dtype, pin_memory=True) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)]
        self._side = torch.cuda.Stream(self.report.device)
        self._pool = torch.cuda.graph_pool_handle()

    def _warm_up(self, step: Callable[[], None]) -> None:
        """Run ``step`` on a side stream, as torch asks for before a capture."""
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            step()
        current.wait_stream(self._side)

    def _watch(self, step: Callable[[], None]) -> str:
        """Run ``step``; the place in it where the host waited for the device, empty when nowhere."""
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
                self._warm_up(step)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        return places[0] if places else ""

    def _capture(self, step: Callable[[], None]) -> Callable[[], None]:
        try:
            return _captured(step, self._pool, self._side)
        except BaseException:
            # The old ones may be left half open.
            self._pool, self._side = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.report.device)
            raise

    def _send(self, slot: int) -> None:
        self._slots[slot].copy_(self.report, non_blocking=True)
        self._events[slot].record()

    def _receive(self, slot: int) -> list:
        self._events[slot].synchronize()
        return self._slots[slot].tolist()

    def drain(self) -> None:
        """Wait until nothing that was launched is running; the memory that steps use may go then."""
        for event in self._events:
            event.synchronize()

    def _follow(self) -> None:
        """What comes on the current stream comes after all that this call, or the one before, queued on another."""
        last, self._stream = self._stream, torch.cuda.current_stream()
        if last is not None and last != self._stream:
            self._stream.wait_stream(last)
