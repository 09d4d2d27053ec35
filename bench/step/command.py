"""The command line."""

import argparse
from pathlib import Path

import torch
from random_pair import BLOCK

from .bench import Bench
from .pair import TARGET_LAYERS
from .runners import RUNNERS, tree_runners


def main(description: str) -> None:
    """Measure what the command line asks for."""
    parser = _parser(description)
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch {torch.__version__} sees no GPU")
    for name, low in (("contexts", 2 * BLOCK + 1), ("batches", 1), ("accepted", 1)):
        if wrong := [value for value in getattr(arguments, name) if value < low]:
            parser.error(f"--{name} must be at least {low}, got {wrong[0]}")
    if max(arguments.accepted) > BLOCK:
        parser.error(f"--accepted must be at most {BLOCK}, got {max(arguments.accepted)}")
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    if wrong := [rows for rows in arguments.tree if not BLOCK <= rows <= 128]:
        parser.error(f"--tree must be {BLOCK} to 128 rows, got {wrong[0]}")
    arguments.runners = [name for name in arguments.runners if name not in arguments.without]
    arguments.runners += tree_runners(arguments.tree)
    Bench(arguments).run()


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=TARGET_LAYERS, default="qwen3-8b")
    add("--device", default="cuda", help="cuda, cuda:N, or cpu: does it run? Nothing is compiled there")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bfloat16, on CPU float32")
    add("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    add("--batches", type=int, nargs="+", default=[1])
    add("--accepted", type=int, nargs="+", default=[1, 6, 16], help="tokens emitted per step, 1 to 16")
    add("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS))
    add("--without", nargs="+", choices=RUNNERS, default=[], metavar="RUNNER")
    add("--tree", type=int, nargs="+", default=[], metavar="ROWS", help="also verify trees of so many rows")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=12, help="measured per round")
    add("--stop-after", type=float, metavar="SECONDS", help="start nothing new after that")
    add("--table", action="store_true", help="show where the time goes, at the first context and batch")
    add("--json", type=Path, metavar="FILE", help="write the header, the rows and the tables")
    add("--commit", help="the commit to put into the rows, where git cannot tell")
    add("--debug", action="store_true", help="raise if a runner fails")
    return parser
