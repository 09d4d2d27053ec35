"""The lines of a run."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .cases import MODELS, TINY, Case, Options
from .machine import header
from .timing import copy_bandwidth, interleaved, operand_sets


@dataclass
class Row:
    """One line as ``--json`` writes it. ``ratio``: time of the fastest peer over ours, median of the rounds."""

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


def measure(op: str, case: Case, options: Options, copy: float, clock: Callable, arguments: argparse.Namespace) -> Row:
    """Run one case."""
    seconds = 0.0 if arguments.quick else arguments.seconds
    with torch.inference_mode():
        sets = operand_sets(case, arguments.cold, options.device)
        times = interleaved({"ours": case.ours, **case.peers}, sets, options.device, seconds, clock)
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    peer = min(case.peers, key=medians.__getitem__)
    return Row(
        op=op,
        shape=case.shape,
        dtype=case.dtype or str(options.dtype).removeprefix("torch."),
        us=1e6 * medians["ours"],
        gb_s=case.moved / medians["ours"] / 1e9,
        share_of_copy=case.moved / medians["ours"] / copy,
        ratio=statistics.median(b / a for a, b in zip(times["ours"], times[peer], strict=True)),
        peer=peer,
        peers_us={name: 1e6 * medians[name] for name in case.peers},
    )


def run(
    benches: dict[str, Callable[[Options], Iterator[Case]]], arguments: argparse.Namespace
) -> tuple[dict[str, str | int | float], list[Row]]:
    """Measure every case of every bench and print its line as it comes."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    models = TINY if arguments.quick else {name: MODELS[name] for name in arguments.models}
    clock = time.thread_time if arguments.own_time else time.perf_counter
    copy = copy_bandwidth(device, arguments.quick, clock)
    facts = header(device, copy)
    print(
        f"{facts['machine']}, ISA {facts['isa']}, {facts['threads']} threads, torch {facts['torch']}, "
        f"commit {facts['commit']}, copy {facts['copy_gb_s']:.1f} GB/s, "
        f"operands {'from memory' if arguments.cold else 'as the last call left them'}"
    )
    rows, measured = [], set()
    for op, cases in benches.items():
        for dtype in arguments.dtypes:
            options = Options(
                models=models,
                rows=(3,) if arguments.quick else tuple(arguments.rows),
                contexts=(20,) if arguments.quick else tuple(arguments.contexts),
                dtype=getattr(torch, dtype),
                device=device,
            )
            for case in cases(options):
                if (op, case.shape, case.dtype or dtype) in measured:
                    continue
                measured.add((op, case.shape, case.dtype or dtype))
                rows.append(measure(op, case, options, copy, clock, arguments))
                print(rows[-1], flush=True)
    return facts, rows
