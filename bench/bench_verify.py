"""How long `dflash.verify` takes next to generating the same answers.

    python bench/bench_verify.py [--pair FOLDER] [--dtype float32] [--temperature 1] [--new 120] [--prompts 32]

Per prompt: the answer with the drafter, the same without one, and the check of its receipt. `passes` is the part of the
check that runs the target; the rest, a SHA-256 of the weights and a copy of the target, does not grow with the answer.
Medians over prompts, milliseconds. Prints; asserts nothing.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import package_pair
import torch
from torch import Tensor

import dflash
from dflash import ops
from dflash.receipts import Fingerprints


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds that a call took, and what it returned."""
    began = time.perf_counter()
    result = run()
    return 1000 * (time.perf_counter() - began), result


def measure(pair: package_pair.Loaded, ids: Tensor, arguments: dict[str, Any]) -> dict[str, float]:
    """Return the times of one prompt's answer and its check, and what the check found."""
    target, known = pair.target, Fingerprints.of(pair.target)
    recorder = dflash.Recorder(target, ids, fingerprints=known, **arguments)
    call = {**recorder.arguments, "return_dict_in_generate": True}
    drafted, output = timed(lambda: dflash.generate(target, pair.draft, ids, **call))
    alone, _ = timed(lambda: dflash.generate(target, None, ids, **call))
    receipt = recorder.receipt(output)
    whole, found = timed(lambda: dflash.verify(receipt, target))
    return {
        "tokens": found.num_tokens,
        "drafted": drafted,
        "one token per step": alone,
        "verify": whole,
        "passes": 1000 * found.seconds,
        "exact": found.is_exact,
    }


@torch.no_grad()
def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package_pair.add_option(parser)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--new", type=int, default=120, help="new tokens at most")
    parser.add_argument("--prompts", type=int, default=32)
    options = parser.parse_args()
    pair = package_pair.load(options.pair, options.dtype, options.prompts)
    arguments = {"temperature": options.temperature, "seed": 1, "max_new_tokens": options.new, "stop_token_ids": []}
    measure(pair, pair.prompts[0], arguments)  # warm up
    rows = [measure(pair, ids, arguments) for ids in pair.prompts]
    print(
        f"{torch.get_num_threads()} threads, ISA {ops.isa()}, torch {torch.__version__}, {options.dtype}, "
        f"T = {options.temperature:g}, {len(rows)} prompts, {sum(row['exact'] for row in rows)} verified exactly"
    )
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "exact"}
    for name, value in median.items():
        print(
            f"{name:<20}{value:8.1f}" + ("" if name == "tokens" else f" ms  {value / median['verify']:6.1f} x verify")
        )


if __name__ == "__main__":
    main()
