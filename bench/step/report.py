"""Results of a run: the header, a row per runner, what was left out, and the JSON file with all of it."""

import argparse
import json
import shlex
import sys
from dataclasses import asdict, dataclass

import harness
import torch
import transformers
from random_pair import BLOCK, Pair

import dflash
from dflash import ops

from .setting import Setting

_LINE = (
    "{runner:<14} {context:>7} {batch:>5} {accepted:>8} | {step_ms:8.3f} ms | {share:>4} of floor  {share_4300:>4} at "
    "4.3 TB/s | host {host:>8} us | {launches:>6} launches {kernels:>6} kernels | {tokens:8.0f} tokens/s"
)


@dataclass
class Row:
    """One line, as ``--json`` writes it; ``host_us``, ``launches`` and ``kernels`` are None without a GPU."""

    runner: str
    device: str
    commit: str
    context: int
    batch: int
    accepted: int
    rounds: int
    step_ms: float
    floor_ms: float
    floor_share: float
    floor_4300_ms: float
    floor_4300_share: float
    host_us: float | None
    launches: float | None
    kernels: float | None

    @property
    def place(self) -> tuple:
        """What was measured."""
        return self.runner, self.context, self.batch, self.accepted

    def __str__(self) -> str:
        def shown(value: float | None) -> str:
            return "-" if value is None else f"{value:.0f}"

        return _LINE.format(
            **asdict(self) | {"launches": shown(self.launches), "kernels": shown(self.kernels)},
            share=f"{100 * self.floor_share:.0f} %",
            share_4300=f"{100 * self.floor_4300_share:.0f} %",
            host=shown(self.host_us),
            tokens=1000 * self.batch * self.accepted / self.step_ms,
        )


class Report:
    """Prints a run and keeps its JSON file up to date.

    Attributes:
        facts: what the run was made on and with, what was left out, and the tables.
        rows: in the order they were measured.
    """

    def __init__(
        self, arguments: argparse.Namespace, pair: Pair, device: torch.device, copy: float, read: float
    ) -> None:
        self._arguments = arguments
        self.rows: list[Row] = []
        self.facts = harness.header(device, copy) | {
            "read_gb_s": read / 1e9,
            "overlap": device.type == "cuda" and ops.overlaps(device.index or 0),
            "prefetch": ops.PREFETCH,
            "driver": harness.driver(device),
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "dflash-engine": dflash.__version__,
            "command": "python " + shlex.join(sys.argv),
            "model": arguments.model,
            "dtype": str(pair.drafter.dtype).removeprefix("torch."),
            "block_size": BLOCK,
            "target_parameters": sum(p.numel() for p in pair.target.parameters()),
            "draft_parameters": sum(p.numel() for p in pair.drafter.parameters()),
            "acceptance": "forced: after the argmax, the target's choices are overwritten by the drafts, and the last "
            "one to be emitted by another token; the context is random K/V",
            "left_out": [],
        }
        if arguments.commit:
            self.facts["commit"] = arguments.commit

    def show_header(self) -> None:
        """Print what the run is made on and with, and the heads of the columns."""
        f = self.facts
        print(
            f"{f['machine']}, driver {f['driver'] or 'none'}, torch {f['torch']}, transformers {f['transformers']}, "
            f"commit {f['commit']}, copy {f['copy_gb_s']:.1f} GB/s, read {f['read_gb_s']:.1f} GB/s, "
            f"overlap {'on' if f['overlap'] else 'off'}, prefetch {'on' if f['prefetch'] else 'off'}\n"
            f"{f['model']} {f['dtype']}, {f['target_parameters'] / 1e6:.1f} M and {f['draft_parameters'] / 1e6:.1f} M "
            f"random parameters\n"
            f"acceptance is {f['acceptance']}"
        )
        print("runner         context batch accepted |")

    def keep(self, row: Row) -> None:
        """Keep a row, in place of one of the same runner and setting after fewer rounds."""
        for i, other in enumerate(self.rows):
            if row.place == other.place:
                self.rows[i] = row
                return
        self.rows.append(row)

    def leave_out(self, runner: str, setting: Setting, why: str | Exception) -> None:
        """Note why a runner has no row. With ``--debug`` an error is raised instead."""
        if isinstance(why, Exception):
            if self._arguments.debug:
                raise why
            why = f"{type(why).__name__}: {why}".splitlines()[0]
        at = {"context": setting.context, "batch": setting.batch}
        self.facts["left_out"].append({"runner": runner, **at, "why": why})
        print(f"{runner} is left out at context {setting.context}, batch {setting.batch}: {why}", file=sys.stderr)

    def write(self) -> None:
        """Write the JSON file, if one was asked for."""
        if self._arguments.json:
            rows = [asdict(row) for row in self.rows]
            self._arguments.json.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**self.facts, "rows": rows}, indent=1) + "\n"
            partial = self._arguments.json.with_suffix(".partial")  # a run that is killed leaves the last whole file
            partial.write_text(text)
            partial.replace(self._arguments.json)
