"""The command line of the op benches."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from .cases import MODELS, Case, Options
from .table import run


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of every bench."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 1024])
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (graph replays timed by events)")
    parser.add_argument("--threads", type=int, help="torch's CPU threads")
    parser.add_argument("--seconds", type=float, default=0.2, help="of sampling per line, about")
    parser.add_argument(
        "--cold",
        action=argparse.BooleanOptionalAction,
        help="take turns over copies of the operands larger than the last-level cache (default on a GPU)",
    )
    parser.add_argument(
        "--own-time",
        action="store_true",
        help="one thread: its processor time alone, where other work shares the machine",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes and three samples: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the header and the rows there as well")
    return parser


def finish(
    benches: dict[str, Callable[[Options], Iterator[Case]]],
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
) -> None:
    """Run, and write the JSON file."""
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch {torch.__version__} sees no GPU")
    if arguments.own_time and (arguments.device != "cpu" or (arguments.threads or torch.get_num_threads()) > 1):
        parser.error("--own-time counts one CPU thread: use it with --device cpu --threads 1")
    if arguments.cold is None:
        arguments.cold = arguments.device.startswith("cuda")
    facts, rows = run(benches, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def main(cases: Callable[[Options], Iterator[Case]]) -> None:
    """The command line of one bench file."""
    module = sys.modules[cases.__module__]
    options = parser(module.__doc__)
    finish({Path(module.__file__).stem.removeprefix("bench_"): cases}, options, options.parse_args())
