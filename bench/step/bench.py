"""The run: one setting after another, and at each the runners in turn."""

import argparse
import gc
import statistics
import time
from dataclasses import dataclass, field

import harness
import torch

from .forced import Forced
from .meter import SKIPPED, Meter, Waits
from .pair import PUBLISHED, floor_bytes, named_pair
from .profiles import counted, profiled
from .report import Report, Row
from .runners import ONE_ROW, RUNNERS, tree_runners
from .setting import Run, Setting
from .tables import tables


@dataclass
class Measured:
    """A runner that works at a setting, and its times."""

    run: Run
    launches: float | None = None
    kernels: float | None = None
    step_ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)


class Bench:
    """All settings, runners and rounds that the command line asks for."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.began = arguments, time.perf_counter()
        self.device = torch.device(arguments.device)
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(self.device.index or 0)
        dtype = getattr(torch, arguments.dtype or ("bfloat16" if self.on_gpu else "float32"))
        timer, quick = harness.Timer(self.device), not self.on_gpu
        self.copy, read = harness.copy_bandwidth(timer, quick), harness.read_bandwidth(timer, quick)
        self.ceiling = max(self.copy, read)  # a step only reads; torch's reductions may be slower than its copy
        self.pair = named_pair(arguments.model, dtype, self.device)
        self.forced = Forced(self.device)
        self.runners = RUNNERS | tree_runners(arguments.tree)
        self.report = Report(arguments, self.pair, self.device, self.copy, read)

    @property
    def is_over(self) -> bool:
        """True after ``--stop-after`` seconds."""
        limit = self.arguments.stop_after
        return limit is not None and time.perf_counter() - self.began > limit

    @torch.no_grad()
    def run(self) -> None:
        """Measure every context and batch."""
        self.report.show_header()
        steps = SKIPPED + max(self.arguments.steps, Meter.profiled + 1)
        for context in self.arguments.contexts:
            for batch in self.arguments.batches:
                if not self.is_over:
                    rows = max(self.arguments.tree, default=0)
                    self._measure(Setting(self.pair, self.forced, Waits(), context, batch, steps, self.on_gpu, rows))
                if self.on_gpu:
                    torch._dynamo.reset()
                    gc.collect()  # the K/V caches are part of reference cycles
                    torch.cuda.empty_cache()
        self.report.write()

    def _measure(self, setting: Setting) -> None:
        """Measure every runner at one context and batch."""
        setting.ours.fill_()
        first = self.arguments.accepted[0]
        self.forced.set_(first)
        found = {}
        for name in self.arguments.runners:
            if measured := self._prepare(name, setting, first):
                found[name] = measured
                self._keep_first_round(name, measured, setting, first)
        for accepted in self.arguments.accepted:
            if not self.is_over:
                self.forced.set_(accepted)
                self._take_turns(setting, found, accepted)
        if self.arguments.table and "tables" not in self.report.facts:
            self.forced.set_(first)
            runs = {name: measured.run for name, measured in found.items()}
            tables(setting, runs, first, self.report, self.copy)

    def _prepare(self, name: str, setting: Setting, accepted: int) -> Measured | None:
        """Warm a runner up and count its kernels; None if it is left out."""
        if setting.batch > 1 and name in ONE_ROW:
            return self.report.leave_out(name, setting, "its loop takes one row")
        if self.is_over:
            return self.report.leave_out(name, setting, "--stop-after")
        try:
            run = self.runners[name](setting)
            run(Meter(self.device), accepted, setting.steps)  # compiles, captures, allocates
            run(Meter(self.device), accepted, setting.steps)
            counts = counted(profiled(run, accepted, self.device)) if self.on_gpu else (None, None)
            return Measured(run, *counts)
        except Exception as error:
            return self.report.leave_out(name, setting, error)

    def _keep_first_round(self, name: str, prepared: Measured, setting: Setting, accepted: int) -> None:
        """Write a runner's row as soon as it has one: the next runner may compile for longer than the run may take."""
        measured = Measured(prepared.run, prepared.launches, prepared.kernels)
        if self._round(name, measured, setting, accepted):
            self.report.keep(self._row(name, setting, accepted, measured, 1))
            self.report.write()

    def _take_turns(self, setting: Setting, prepared: dict[str, Measured], accepted: int) -> None:
        """Run all runners in turn, round after round, then show a row for each."""
        found = {name: Measured(m.run, m.launches, m.kernels) for name, m in prepared.items()}
        for number in range(self.arguments.rounds):
            for name in list(found)[:: -1 if number % 2 else 1]:
                if not self._round(name, found[name], setting, accepted):
                    del found[name]
        for name, measured in found.items():
            row = self._row(name, setting, accepted, measured, self.arguments.rounds)
            self.report.keep(row)
            print(row, flush=True)
        self.report.write()

    def _round(self, name: str, measured: Measured, setting: Setting, accepted: int) -> bool:
        """Run one round and add its times; False if the runner failed, which is then left out."""
        meter = Meter(self.device)
        try:
            with setting.waits.open():
                measured.run(meter, accepted, setting.steps)
        except Exception as error:
            self.report.leave_out(name, setting, error)
            return False
        measured.step_ms += meter.milliseconds()
        measured.host_us += meter.host_microseconds()
        return True

    def _row(self, name: str, setting: Setting, accepted: int, measured: Measured, rounds: int) -> Row:
        floor = floor_bytes(self.pair.target, self.pair.drafter, setting.context, setting.batch)
        ms = statistics.median(measured.step_ms)
        here, published = 1000 * floor / self.ceiling, 1000 * floor / PUBLISHED
        facts = self.report.facts
        return Row(
            runner=name,
            device=torch.cuda.get_device_name(self.device) if self.on_gpu else str(facts["machine"]),
            commit=str(facts["commit"]),
            context=setting.context,
            batch=setting.batch,
            accepted=accepted,
            rounds=rounds,
            step_ms=ms,
            floor_ms=here,
            floor_share=here / ms,
            floor_4300_ms=published,
            floor_4300_share=published / ms,
            host_us=statistics.median(measured.host_us) if self.on_gpu else None,
            launches=measured.launches,
            kernels=measured.kernels,
        )
