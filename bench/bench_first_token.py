"""How long a prompt takes to its first token on CPU: ours and transformers' ``generate``, random weights, interleaved.

    python bench/bench_first_token.py [--hidden 1024] [--layers 8] [--prompts 128 512 2048] [--repeats 5]

The pairs are those of `bench_step_cpu.py`. Ours also runs the drafter's part of the prompt (its K/V). Medians in
milliseconds; the ratio is transformers' time over ours, the median of those of runs that followed each other. Prints;
asserts nothing.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import harness
import torch
from bench_step_cpu import pair
from torch import Tensor

import dflash
from dflash import ops


def runners(hidden: int, layers: int, dtype: str, longest: int) -> dict[str, Callable[[Tensor], object]]:
    """Return what answers a prompt with one token, by name."""
    target, drafter, _ = pair(hidden, layers, dtype, "full")
    generator = dflash.Generator(target, drafter, max_length=longest + 32, reuse_prefix=False)
    return {
        "ours": lambda ids: generator.generate(ids, max_new_tokens=1, temperature=0.0),
        "transformers": lambda ids: target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False
        ),
    }


def measure(runners: dict[str, Callable[[Tensor], object]], ids: Tensor, repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds of every runner, one for each repeat."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(repeats + 1):
        for name, run in runners.items():
            began = time.perf_counter()
            run(ids)
            if number:  # the first is a warm-up
                times[name].append(1000 * (time.perf_counter() - began))
    return times


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompts", type=int, nargs="+", default=[128, 512, 2048], help="tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    print(
        f"{harness.processor()}, {torch.get_num_threads()} threads, ISA {ops.isa()}, torch {torch.__version__}; "
        "ms to the first token; random weights"
    )
    print("hidden layers dtype     prompt      ours  transformers  ratio")
    for hidden, dtype in itertools.product(arguments.hidden, arguments.dtypes):
        made = runners(hidden, arguments.layers, dtype, max(arguments.prompts))
        for length in arguments.prompts:
            ids = torch.randint(2, 4000, (1, length), generator=torch.Generator().manual_seed(0))
            times = measure(made, ids, arguments.repeats)
            ours, theirs = (statistics.median(values) for values in times.values())
            ratio = statistics.median(b / a for a, b in zip(*times.values(), strict=True))
            line = f"{hidden:6} {arguments.layers:6} {dtype:<9} {length:6} {ours:9.1f} {theirs:13.1f} {ratio:5.2f}x"
            print(line, flush=True)


if __name__ == "__main__":
    main()
