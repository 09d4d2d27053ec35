"""Milliseconds per step at larger widths on CPU: ours and the reference package's loop, random weights, interleaved.

    python bench/bench_step_cpu.py [--hidden 512 768 1024] [--layers 8] [--repeats 5] [--pattern full]
    python bench/bench_step_cpu.py --against FOLDER [...]

The target is a random Qwen3 with a random 3-layer drafter of 16 rows. With --pattern qwen3_5 it is a random Qwen3.5,
three layers with a Gated DeltaNet to one with attention, and two targets of its width and layers run next to it: a
Qwen3.5 with attention in every layer ("full"), and a Qwen3, whose attention has no output gate.
Acceptance with random weights means nothing: a run emits a fixed number of tokens from a short prompt. What is compared
is a step without the prompt's pass: the time that a run takes longer than one that stops after the first token, over
the steps that it has more. A ratio is the median of those of runs that followed each other. The reference is left out
where `.peers/dflash/model.py` is missing (see bench_generate.py). With --against this release takes turns with another
instead, each in a process of its own; there the prompt's pass counts, and identical counts equal answers. Prints;
asserts nothing.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import harness
import releases
import torch
from peers import reference_loop
from random_pair import Pair, make_pair
from torch import Tensor

import dflash
from dflash import ops

# By pattern of the target: other targets that it is compared with, and their patterns.
OTHERS = {"full": {}, "qwen3_5": {"full": "qwen3_5_full", "Qwen3": "full"}}
Runner = Callable[[Tensor], tuple[Tensor, list[int]]]  # ids to sequences and tokens emitted per step


def works(arguments: argparse.Namespace) -> dict[str, Callable[[], list[releases.Work]]]:
    """Return this package's run at every width and dtype."""

    def pieces(hidden: int, dtype: str) -> list[releases.Work]:
        run = ours(pair(hidden, arguments.layers, dtype, arguments.pattern), arguments.new)
        return [lambda: timed(run, prompt())]

    settings = itertools.product(arguments.hidden, arguments.dtypes)
    return {f"{h:6} {arguments.layers:6} {dtype}": lambda h=h, dtype=dtype: pieces(h, dtype) for h, dtype in settings}


def pair(hidden: int, layers: int, dtype: str, pattern: str) -> Pair:
    """Make a pair of random weights."""
    size = harness.Model(hidden, hidden // 64, max(hidden // 128, 1), 64, 3 * hidden, 4096, 3, 3)
    return make_pair(size, layers, getattr(torch, dtype), torch.device("cpu"), pattern=pattern)


def prompt() -> Tensor:
    """Return 16 random tokens, always the same."""
    return torch.randint(2, 4000, (1, 16), generator=torch.Generator().manual_seed(0))


def ours(pair: Pair, new: int) -> Runner:
    """Return a runner of this package."""
    # Every run has the whole prompt's pass. Recurrent targets could not start from the last run's cache as others can.
    generator = dflash.Generator(pair.target, pair.drafter, max_length=256, reuse_prefix=False)

    def run(ids: Tensor) -> tuple[Tensor, list[int]]:
        out = generator.generate(ids, max_new_tokens=new, temperature=0.0, return_dict_in_generate=True)
        return out.sequences, out.statistics.acceptance_lengths[0]

    return run


def timed(run: Runner, ids: Tensor) -> releases.Result:
    """Run once; the units are steps."""
    began = time.perf_counter()
    sequences, lengths = run(ids)
    return releases.Result(time.perf_counter() - began, max(len(lengths), 1), sequences[0].tolist())


def measure(hidden: int, dtype: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return the milliseconds per step of every runner, by name, one for each repeat."""
    made, lengths = pair(hidden, arguments.layers, dtype, arguments.pattern), (1, arguments.new)
    runners = {"ours": [ours(made, new) for new in lengths]}
    for name, pattern in OTHERS[arguments.pattern].items():
        other = pair(hidden, arguments.layers, dtype, pattern)
        runners[name] = [ours(other, new) for new in lengths]
    try:
        weights = made.drafter.state_dict()
        runners["reference"] = [reference_loop(made.draft_config, weights, made.target, 0.0, new) for new in lengths]
    except ValueError as error:
        print(f"reference is left out: {error}", file=sys.stderr)
    for runs in runners.values():
        step_ms(*runs)
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(arguments.repeats):
        for name, runs in runners.items():
            times[name].append(step_ms(*runs))
    return times


def step_ms(first: Runner, whole: Runner) -> float:
    """Return the milliseconds of a step of ``whole``, without the pass over the prompt, which ``first`` has too."""
    seconds, steps = [], []
    for run in (first, whole):
        began = time.perf_counter()
        steps.append(len(run(prompt())[1]))
        seconds.append(time.perf_counter() - began)
    return 1000 * (seconds[1] - seconds[0]) / max(steps[1] - steps[0], 1)


def ratio(times: dict[str, list[float]], name: str, other: str) -> float:
    """Return how many times longer ``name`` took than ``other``."""
    return statistics.median(a / b for a, b in zip(times[name], times[other], strict=True))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 768, 1024])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--new", type=int, default=8, help="new tokens per run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--pattern", choices=[*OTHERS], default="full", help="the target's layers")
    releases.add_option(parser)
    arguments = parser.parse_args()
    if arguments.new < 2:
        parser.error(f"--new must be at least 2, one token without a step and one with, got {arguments.new}")
    return arguments


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    print(
        f"{harness.processor()}, {torch.get_num_threads()} threads, ISA {ops.isa()}, torch {torch.__version__}; "
        "ms per step after a prompt of 16 tokens; random weights"
    )
    if arguments.against:
        print("hidden layers dtype         ours      other  ratio  identical")
        for found in releases.compare("bench_step_cpu", arguments, arguments.repeats):
            times = f"{1000 * found.seconds:7.2f} {1000 * found.other_seconds:10.2f} {found.ratio:5.2f}x"
            print(f"{found.name:<24} {times} {found.identical:>8}/{found.pieces}", flush=True)
        return
    others = OTHERS[arguments.pattern]
    columns = "".join(f" {name:>8} {'ours / ' + name:>13}" for name in others)
    print("hidden layers dtype         ours  reference  ratio" + columns)
    for hidden, dtype in itertools.product(arguments.hidden, arguments.dtypes):
        times = measure(hidden, dtype, arguments)
        medians = {name: statistics.median(values) for name, values in times.items()}
        row = f"{hidden:6} {arguments.layers:6} {dtype:<10} {medians['ours']:7.2f}"
        if "reference" in times:
            row += f" {medians['reference']:10.2f} {ratio(times, 'reference', 'ours'):5.2f}x"
        else:
            row += f" {'-':>10} {'-':>6}"
        row += "".join(f" {medians[name]:8.2f} {ratio(times, 'ours', name):12.2f}x" for name in others)
        print(row, flush=True)


if __name__ == "__main__":
    main()
