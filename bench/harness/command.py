"""The command line of the op benches."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from .cases import MODELS
from .table import Cases, Table


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every op bench."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add("--rows", type=int, nargs="+", default=[16, 1024])
    add("--contexts", type=int, nargs="+", default=[128, 1024, 8192])
    add("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    add("--device", default="cpu", help="cpu, cuda or cuda:N (graph replays timed by events)")
    add("--threads", type=int, help="torch's CPU threads")
    add("--seconds", type=float, default=0.2, help="of sampling per line, about")
    add(
        "--cold",
        action=argparse.BooleanOptionalAction,
        help="take turns over copies of the operands larger than the last-level cache (default on a GPU)",
    )
    add("--own-time", action="store_true", help="count one thread's CPU time, where other work shares the machine")
    add("--quick", action="store_true", help="tiny sizes and three samples: does it run?")
    add("--json", type=Path, metavar="FILE", help="also write the header and the rows to FILE")
    return parser


def finish(benches: dict[str, Cases], parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Run ``benches`` and write the JSON file."""
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch {torch.__version__} sees no GPU")
    if arguments.own_time and (arguments.device != "cpu" or (arguments.threads or torch.get_num_threads()) > 1):
        parser.error("--own-time counts one CPU thread: use it with --device cpu --threads 1")
    if arguments.cold is None:
        arguments.cold = arguments.device.startswith("cuda")
    table = Table(arguments)
    table.show_header()
    for op, cases in benches.items():
        table.run(op, cases)
        if arguments.json:  # a run that is stopped leaves the ops before
            partial = arguments.json.with_suffix(".partial")
            partial.write_text(json.dumps({**table.facts, "rows": [asdict(r) for r in table.rows]}, indent=1) + "\n")
            partial.replace(arguments.json)


def main(cases: Cases) -> None:
    """Run the command line of one bench file, whose cases these are."""
    module = sys.modules[cases.__module__]
    options = parser(module.__doc__)
    finish({Path(module.__file__).stem.removeprefix("bench_"): cases}, options, options.parse_args())
