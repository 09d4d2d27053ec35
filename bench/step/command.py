"""Command."""

import argparse
from pathlib import Path

import torch

from .bench import Bench
from .pair import BLOCK, TARGET_LAYERS
from .runners import RUNNERS


def parse(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TARGET_LAYERS, default="qwen3-8b")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu: a smoke run, nothing is compiled")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="bfloat16, on CPU float32")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--accepted", type=int, nargs="+", default=[1, 6, 16], help="tokens a step emits, 1 to 16")
    parser.add_argument("--runners", nargs="+", choices=RUNNERS, default=list(RUNNERS))
    parser.add_argument("--without", nargs="+", choices=RUNNERS, default=[], metavar="RUNNER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="that count in a round")
    parser.add_argument("--stop-after", type=float, metavar="SECONDS", help="begin nothing new after that")
    parser.add_argument("--table", action="store_true", help="where the time goes, at the first context and batch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the header, the rows and the tables")
    parser.add_argument("--commit", help="what the rows say, where git cannot tell")
    parser.add_argument("--debug", action="store_true", help="raise where a runner fails")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch {torch.__version__} sees no GPU")
    for name, low in (("contexts", 2 * BLOCK + 1), ("batches", 1), ("accepted", 1)):
        if wrong := [value for value in getattr(arguments, name) if value < low]:
            parser.error(f"--{name} must be at least {low}, got {wrong[0]}")
    arguments.runners = [name for name in arguments.runners if name not in arguments.without]
    if max(arguments.accepted) > BLOCK:
        parser.error(f"--accepted must be at most {BLOCK}, got {max(arguments.accepted)}")
    if min(arguments.rounds, arguments.steps) < 1:
        parser.error("--rounds and --steps must be at least 1")
    return arguments


def main(description: str) -> None:
    Bench(parse(description)).run()
