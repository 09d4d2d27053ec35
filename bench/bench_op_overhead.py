"""Microseconds per call of every op on CPU, on operands so small that the call itself is most of the time.

    python bench/bench_op_overhead.py [--only rms_norm linear] [--rounds 25] [--json overhead.json]
    python bench/bench_op_overhead.py --against FOLDER [...]

`torch.add` of one number is the yardstick; torch.add columns count in it. The operands are those of the op's own bench
at its smallest, called as there: accept_prefix's call includes one `copy_`. The last lines are whole steps of a random
pair of 6 and 2 layers, divided by the steps of a call, with and without a drafter: what the ops and all the Python
around them cost together. One thread, gradients off, rounds over all lines in turns, medians.

With --against this release takes turns with another, each in a process of its own; ratio is the other's time over this
one's. An op whose operands the other release does not take is left out there. Prints; asserts nothing.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import harness
import releases
import torch
from bench_all import OPS
from random_pair import make_pair

import dflash
from dflash import ops

YARDSTICK = "torch.add"
STEPS = {"step": True, "one-token step": False}  # has a drafter
SIZE = harness.TINY["tiny"]
CPU = torch.device("cpu")


def works(arguments: argparse.Namespace) -> dict[str, Callable[[], list[releases.Work]]]:
    """Return every line's work, one piece each."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    makers = {YARDSTICK: _yardstick}
    makers |= {op: lambda op=op: _op(op) for op in OPS}
    makers |= {name: lambda drafts=drafts: _step(drafts) for name, drafts in STEPS.items()}
    return {name: makers[name] for name in arguments.only}


def _yardstick() -> list[releases.Work]:
    return [_calls(torch.add, (torch.zeros(1), torch.zeros(1)))]


def _op(name: str) -> list[releases.Work]:
    options = harness.Options({"tiny": SIZE}, (1,), (8,), torch.float32, CPU)
    case = next(importlib.import_module(f"bench_{name}").cases(options))
    return [_calls(case.ours, case.make())]


def _calls(run: Callable, operands: tuple) -> releases.Work:
    sample = harness.Timer(CPU).sampler(run, [operands], 0.005)
    return lambda: releases.Result(sample())


def _step(drafts: bool) -> list[releases.Work]:
    pair = make_pair(SIZE, 6, torch.float32, CPU)
    draft = pair.drafter if drafts else None
    generator = dflash.Generator(pair.target, draft, max_length=128, reuse_prefix=False)
    ids = torch.arange(2, 10)[None]

    def work() -> releases.Result:
        began = time.perf_counter()
        out = generator.generate(ids, max_new_tokens=64, temperature=0.0, return_dict_in_generate=True)
        steps = len(out.statistics.acceptance_lengths[0])
        return releases.Result(time.perf_counter() - began, steps, out.sequences[0].tolist())

    return [work]


def measure(arguments: argparse.Namespace) -> list[dict]:
    """Return a row per line of this release alone."""
    made = {name: prepare()[0] for name, prepare in works(arguments).items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(arguments.rounds):
        for name, work in made.items():
            result = work()
            times[name].append(result.seconds / result.units)
    return [{"name": name, "seconds": statistics.median(samples)} for name, samples in times.items()]


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lines = [*OPS, *STEPS]
    parser.add_argument("--only", nargs="+", choices=lines, default=lines, metavar="LINE", help=", ".join(lines))
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the header and the rows to FILE")
    releases.add_option(parser)
    arguments = parser.parse_args()
    arguments.only = [YARDSTICK, *arguments.only]
    return arguments


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    facts = {
        "machine": harness.processor(),
        "isa": ops.isa(),
        "torch": torch.__version__,
        "commit": harness.commit(),
    }
    print(f"{facts['machine']}, ISA {facts['isa']}, 1 thread, torch {facts['torch']}, commit {facts['commit']}")
    rows = []
    if arguments.against:
        print(f"{'line':<23} |       this |      other |  ratio")
        for found in releases.compare("bench_op_overhead", arguments, arguments.rounds):
            rows.append(asdict(found))
            times = f"{1e6 * found.seconds:7.2f} us | {1e6 * found.other_seconds:7.2f} us"
            print(f"{found.name:<23} | {times} | {found.ratio:5.2f}x", flush=True)
    else:
        print(f"{'line':<23} |       time | torch.adds")
        rows = measure(arguments)
        for row in rows:
            adds = row["seconds"] / rows[0]["seconds"]
            print(f"{row['name']:<23} | {1e6 * row['seconds']:7.2f} us | {adds:9.1f}x")
    if arguments.json:
        arguments.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
