"""Milliseconds per step at larger widths on CPU: ours and the reference package's loop, random weights, interleaved.

    python bench/bench_step_cpu.py [--hidden 512 768 1024] [--layers 8] [--repeats 5] [--pattern full]
    python bench/bench_step_cpu.py --against FOLDER [...]

The target is a random Qwen3 with a random 3-layer drafter of 16 rows. With --pattern qwen3_5 it is a random Qwen3.5,
three layers with a Gated DeltaNet to one with attention, and a Qwen3 of its width and layers runs next to it ("full").
Acceptance with random weights means nothing: a run emits a fixed number of tokens from a short prompt, and what is
compared is its time over the number of its steps. The reference is left out where `.peers/dflash/model.py` is missing
(see bench_generate.py). With --against this release takes turns with another instead, each in a process of its own;
identical counts equal answers. Prints; asserts nothing.
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


def measure(hidden: int, dtype: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Return the median milliseconds per step of every runner, by name."""
    made = pair(hidden, arguments.layers, dtype, arguments.pattern)
    runners = {"ours": ours(made, arguments.new)}
    if arguments.pattern != "full":
        runners["full"] = ours(pair(hidden, arguments.layers, dtype, "full"), arguments.new)
    try:
        weights = made.drafter.state_dict()
        runners["reference"] = reference_loop(made.draft_config, weights, made.target, 0.0, arguments.new)
    except ValueError as error:
        print(f"reference is left out: {error}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in runners}
    for run in runners.values():
        run(prompt())
    for _ in range(arguments.repeats):
        for name, run in runners.items():
            result = timed(run, prompt())
            times[name].append(1000 * result.seconds / result.units)
    return {name: statistics.median(values) for name, values in times.items()}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 768, 1024])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--new", type=int, default=8, help="new tokens per run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--pattern", choices=["full", "qwen3_5"], default="full", help="the target's layers")
    releases.add_option(parser)
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    print(
        f"{harness.processor()}, {torch.get_num_threads()} threads, ISA {ops.isa()}, torch {torch.__version__}; "
        f"ms per step, a prompt of 16 tokens and its pass included; random weights"
    )
    if arguments.against:
        print("hidden layers dtype         ours      other  ratio  identical")
        for found in releases.compare("bench_step_cpu", arguments, arguments.repeats):
            times = f"{1000 * found.seconds:7.2f} {1000 * found.other_seconds:10.2f} {found.ratio:5.2f}x"
            print(f"{found.name:<24} {times} {found.identical:>8}/{found.pieces}", flush=True)
        return
    has_full = arguments.pattern != "full"
    print("hidden layers dtype         ours  reference  ratio" + has_full * "     full  ours / full")
    for hidden, dtype in itertools.product(arguments.hidden, arguments.dtypes):
        medians = measure(hidden, dtype, arguments)
        ours_ms, other = medians["ours"], medians.get("reference", float("nan"))
        shape = f"{hidden:6} {arguments.layers:6} {dtype:<10}"
        row = f"{shape} {ours_ms:7.2f} {other:10.2f} {other / ours_ms:5.2f}x"
        full = f" {medians['full']:8.2f} {ours_ms / medians['full']:11.2f}x" if has_full else ""
        print(row + full, flush=True)


if __name__ == "__main__":
    main()
