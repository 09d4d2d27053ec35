"""Bench."""

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import harness
import torch
import transformers

import dflash

from .forced import Forced
from .meter import SKIPPED, Meter, Waits
from .ours import another
from .pair import BLOCK, PUBLISHED, floor_bytes, pair
from .profiles import counted, kernel_table, op_table, profiled, show_tables
from .runners import MAKERS, ONE_ROW
from .setting import Run, Setting

ROW = (
    "{runner:<10} {context:>7} {batch:>5} {accepted:>8} | {step_ms:8.3f} ms | {share:>4} of floor  {share_4300:>4} at "
    "4.3 TB/s | host {host:>8} us | {launches:>6} launches {kernels:>6} kernels | {tokens:8.0f} tokens/s"
)


@dataclass
class Row:
    """One line as ``--json`` writes it; ``host_us``, ``launches`` and ``kernels`` are None where there is no GPU."""

    runner: str
    device: str
    commit: str
    context: int
    batch: int
    accepted: int
    step_ms: float
    floor_ms: float
    floor_share: float
    floor_4300_ms: float
    floor_4300_share: float
    host_us: float | None
    launches: float | None
    kernels: float | None

    def __str__(self) -> str:
        def shown(value: float | None) -> str:
            return "-" if value is None else f"{value:.0f}"

        return ROW.format(
            **asdict(self) | {"launches": shown(self.launches), "kernels": shown(self.kernels)},
            share=f"{100 * self.floor_share:.0f} %",
            share_4300=f"{100 * self.floor_4300_share:.0f} %",
            host=shown(self.host_us),
            tokens=1000 * self.batch * self.accepted / self.step_ms,
        )


class Bench:
    """The run: its settings one after another, their rows, and the file that they go to."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.began = arguments, time.perf_counter()
        self.device = torch.device(arguments.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dtype = getattr(torch, arguments.dtype or ("bfloat16" if self.device.type == "cuda" else "float32"))
        self.copy = harness.copy_bandwidth(self.device, self.device.type == "cpu", time.perf_counter)
        self.target, self.drafter, self.draft_config = pair(arguments.model, dtype, self.device)
        self.forced = Forced(self.device)
        self.rows: list[Row] = []
        self.facts = harness.header(self.device, self.copy) | {
            "driver": harness.driver(self.device),
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "dflash-engine": dflash.__version__,
            "command": "python " + shlex.join(sys.argv),
            "model": arguments.model,
            "dtype": str(dtype).removeprefix("torch."),
            "block_size": BLOCK,
            "target_parameters": sum(p.numel() for p in self.target.parameters()),
            "draft_parameters": sum(p.numel() for p in self.drafter.parameters()),
            "acceptance": "forced: behind its argmax the target's choices are overwritten by the drafts, and by "
            "another token where the last is to be; the context is random K/V",
            "left_out": [],
        }
        if arguments.commit:
            self.facts["commit"] = arguments.commit

    @property
    def over(self) -> bool:
        limit = self.arguments.stop_after
        return limit is not None and time.perf_counter() - self.began > limit

    def leave_out(self, runner: str, setting: Setting, why: str | Exception) -> None:
        """Say so and go on: a runner that cannot run must not end the others."""
        if isinstance(why, Exception):
            if self.arguments.debug:
                raise why
            why = f"{type(why).__name__}: {why}".splitlines()[0]
        at = {"context": setting.context, "batch": setting.batch}
        self.facts["left_out"].append({"runner": runner, **at, "why": why})
        print(f"{runner} is left out at context {setting.context}, batch {setting.batch}: {why}", file=sys.stderr)

    def write(self) -> None:
        if self.arguments.json:
            rows = [asdict(row) for row in self.rows]
            self.arguments.json.parent.mkdir(parents=True, exist_ok=True)
            self.arguments.json.write_text(json.dumps({**self.facts, "rows": rows}, indent=1) + "\n")

    @torch.no_grad()
    def run(self) -> None:
        f = self.facts
        print(
            f"{f['machine']}, driver {f['driver'] or 'none'}, torch {f['torch']}, transformers {f['transformers']}, "
            f"commit {f['commit']}, copy {f['copy_gb_s']:.1f} GB/s; {f['model']} {f['dtype']}, "
            f"{f['target_parameters'] / 1e6:.1f} M and {f['draft_parameters'] / 1e6:.1f} M random parameters\n"
            f"acceptance is {f['acceptance']}"
        )
        print("runner     context batch accepted |")
        for context in self.arguments.contexts:
            for batch in self.arguments.batches:
                if not self.over:
                    self.measure(
                        Setting(
                            self.target,
                            self.drafter,
                            self.draft_config,
                            self.forced,
                            Waits(),
                            context,
                            batch,
                            SKIPPED + max(self.arguments.steps, Meter.profiled + 1),
                            self.device.type == "cuda",
                        )
                    )
                if self.device.type == "cuda":
                    torch._dynamo.reset()
                    gc.collect()  # the caches of K/V hang in cycles
                    torch.cuda.empty_cache()
        self.write()

    def measure(self, setting: Setting) -> None:
        """Every runner at one context and batch."""
        found: dict[str, Run] = {}
        counts: dict[str, tuple[float | None, float | None]] = {}
        setting.generator.fill_()
        first = self.arguments.accepted[0]
        self.forced.set_(first)
        for name in self.arguments.runners:
            if setting.batch > 1 and name in ONE_ROW:
                self.leave_out(name, setting, "its loop takes one row")
                continue
            if self.over:
                self.leave_out(name, setting, "--stop-after")
                continue
            try:
                run = MAKERS[name](setting)
                run(Meter(self.device), first, setting.steps)  # compiles, captures, allocates
                run(Meter(self.device), first, setting.steps)
                counts[name] = (None, None)
                if self.device.type == "cuda":
                    counts[name] = counted(profiled(run, first, self.device))
                found[name] = run
            except Exception as error:
                self.leave_out(name, setting, error)
        for accepted in self.arguments.accepted:
            if not self.over:
                self.forced.set_(accepted)
                self.interleaved(setting, found, counts, accepted)
        if self.arguments.table and "tables" not in self.facts:
            self.tables(setting, found, first)

    def interleaved(self, setting: Setting, found: dict[str, Run], counts: dict, accepted: int) -> None:
        """Rounds of all runners in turn, then a row each."""
        found = dict(found)
        step_ms: dict[str, list[float]] = {name: [] for name in found}
        host_us: dict[str, list[float]] = {name: [] for name in found}
        for number in range(self.arguments.rounds):
            for name in list(found)[:: -1 if number % 2 else 1]:
                meter = Meter(self.device)
                try:
                    with setting.waits.open():
                        found[name](meter, accepted, setting.steps)
                except Exception as error:
                    self.leave_out(name, setting, error)
                    del found[name]
                    continue
                step_ms[name] += meter.milliseconds()
                host_us[name] += meter.host_microseconds()
        floor = floor_bytes(self.target, self.drafter, setting.context, setting.batch)
        for name in found:
            ms, on_gpu = statistics.median(step_ms[name]), self.device.type == "cuda"
            here, published = 1000 * floor / self.copy, 1000 * floor / PUBLISHED
            row = Row(
                runner=name,
                device=torch.cuda.get_device_name(self.device) if on_gpu else str(self.facts["machine"]),
                commit=str(self.facts["commit"]),
                context=setting.context,
                batch=setting.batch,
                accepted=accepted,
                step_ms=ms,
                floor_ms=here,
                floor_share=here / ms,
                floor_4300_ms=published,
                floor_4300_share=published / ms,
                host_us=statistics.median(host_us[name]) if on_gpu else None,
                launches=counts[name][0],
                kernels=counts[name][1],
            )
            self.rows.append(row)
            print(row, flush=True)
        self.write()

    def tables(self, setting: Setting, found: dict[str, Run], accepted: int) -> None:
        """Where the time of our step goes, with the target's own forward and with its layers on our ops."""
        self.forced.set_(accepted)
        size, config = self.drafter.dtype.itemsize, self.target.config
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        features = (heads * config.head_dim + 2 * config.intermediate_size) / 2  # of two calls a layer
        tables = self.facts["tables"] = {}
        for runner in ("graph", "fused"):
            try:
                kernels = kernel_table(profiled(found[runner], accepted, self.device)) if runner in found else []
                eager = another(setting, "eager", False, fused=runner == "fused")
                profiler = profiled(eager, accepted, self.device, shapes=True)
            except Exception as error:
                self.leave_out(f"{runner}'s table", setting, error)
                continue
            ops = op_table(profiler, size, setting.context, features, self.copy)
            tables[runner] = {"kernels": kernels, "ops": ops}
            show_tables(runner, kernels, ops)
        self.write()
