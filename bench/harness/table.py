"""The table: a line per case, printed as it is measured."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .cases import MODELS, TINY, Case, Options
from .machine import header
from .timing import Timer, copy_bandwidth, operand_sets

Cases = Callable[[Options], Iterator[Case]]


@dataclass
class Row:
    """One line, as ``--json`` writes it. ``ratio``: the fastest peer's time over ours, median of the rounds."""

    op: str
    shape: str
    dtype: str
    us: float
    gb_s: float
    share_of_copy: float
    ratio: float
    peer: str
    peers_us: dict[str, float]

    def __str__(self) -> str:
        slower = "  <" if self.ratio < 1 else ""
        return (
            f"{self.op:<21} {self.shape:<46} {self.dtype:<8} | {self.us:10.1f} us | {self.gb_s:7.2f} GB/s | "
            f"{100 * self.share_of_copy:4.0f} % of copy | {self.ratio:6.2f}x {self.peer}{slower}"
        )


class Table:
    """Measures cases as the command line asks for.

    Attributes:
        facts: what the run was made on and with.
        rows: in the order they were measured.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        device = torch.device(arguments.device)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        if arguments.threads:
            torch.set_num_threads(arguments.threads)
        self._timer = Timer(device, time.thread_time if arguments.own_time else time.perf_counter)
        self._copy = copy_bandwidth(self._timer, arguments.quick)
        self.facts = header(device, self._copy)
        self.rows: list[Row] = []

    def show_header(self) -> None:
        """Print what the run is made on and with."""
        f = self.facts
        print(
            f"{f['machine']}, ISA {f['isa']}, {f['threads']} threads, torch {f['torch']}, commit {f['commit']}, "
            f"copy {f['copy_gb_s']:.1f} GB/s, "
            f"operands {'from memory' if self._arguments.cold else 'as the last call left them'}"
        )

    def run(self, op: str, cases: Cases) -> None:
        """Measure every case of a bench once, and print its line."""
        measured = set()
        for dtype in self._arguments.dtypes:
            for case in cases(self._options(dtype)):
                name = op, case.shape, case.dtype or dtype
                if name not in measured:
                    measured.add(name)
                    self.rows.append(self._measure(*name, case))
                    print(self.rows[-1], flush=True)

    def _options(self, dtype: str) -> Options:
        arguments, device = self._arguments, self._timer.device
        if arguments.quick:
            return Options(TINY, (3,), (20,), getattr(torch, dtype), device)
        models = {name: MODELS[name] for name in arguments.models}
        return Options(models, tuple(arguments.rows), tuple(arguments.contexts), getattr(torch, dtype), device)

    def _measure(self, op: str, shape: str, dtype: str, case: Case) -> Row:
        seconds = 0.0 if self._arguments.quick else self._arguments.seconds
        with torch.inference_mode():
            sets = operand_sets(case.make, self._arguments.cold, self._timer.device)
            times = self._timer.interleaved({"ours": case.ours, **case.peers}, sets, seconds)
        medians = {name: statistics.median(samples) for name, samples in times.items()}
        peer = min(case.peers, key=medians.__getitem__)
        return Row(
            op=op,
            shape=shape,
            dtype=dtype,
            us=1e6 * medians["ours"],
            gb_s=case.moved / medians["ours"] / 1e9,
            share_of_copy=case.moved / medians["ours"] / self._copy,
            ratio=statistics.median(b / a for a, b in zip(times["ours"], times[peer], strict=True)),
            peer=peer,
            peers_us={name: 1e6 * medians[name] for name in case.peers},
        )
