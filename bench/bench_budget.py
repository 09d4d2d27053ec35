"""What the parts of a step cost by themselves: each called in a loop on the state of a running generation.

    python bench/bench_budget.py [--pair FOLDER] [--dtype float32] [--temperature 0] [--repeats 200] [--tree 16]

The target's and the drafter's passes are measured eager and through torch.compile. `as transformers' module` is the
target's own forward on the same rows, with transformers' cache, cropped after each call. Medians, microseconds. Prints;
asserts nothing.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import package_pair
import torch
import transformers
from internals import Parts
from torch import Tensor, nn

import dflash
from dflash import ops


def microseconds(run: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return 1e6 * statistics.median(times)


def module_pass(target: nn.Module, ids: Tensor, block: Tensor) -> Callable[[], None]:
    """Return a call of transformers' forward over ``block`` after ``ids``."""
    cache = transformers.DynamicCache(config=target.config)
    target(input_ids=ids, past_key_values=cache)

    def run() -> None:
        target(input_ids=block, past_key_values=cache)
        cache.crop(-block.shape[1])

    return run


def calls(generator: dflash.Generator, target: nn.Module, ids: Tensor, greedy: bool) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name; ``generator`` has just answered ``ids``."""
    parts = Parts(generator)
    compiled = [torch.compile(part, fullgraph=True, dynamic=False) for part in (parts.verify, parts.draft)]
    trees = parts.tree(generator.tree, greedy) if generator.tree else {}
    return {
        **{f"tree: {name}": part for name, part in trees.items()},
        "target, a block's rows, head included": parts.verify,
        "the same, compiled": compiled[0],
        "the same, as transformers' module": module_pass(target, ids, parts.block),
        "draft pass, head included": parts.draft,
        "draft pass, compiled": compiled[1],
        "fuse the context": parts.fuse,
        "draft logits through the target's head": parts.draft_head,
        "choose a block's tokens, once": parts.choose,
        "the whole step": parts.step,
        "the prompt's pass, first token included": lambda: generator.generate(ids, max_new_tokens=1),
    }


@torch.no_grad()
def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package_pair.add_option(parser)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tree", type=int, metavar="ROWS", help="also what only a tree of so many rows costs")
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    # 1. Bring a generation to some length
    target, draft, first, (ids,) = package_pair.load(arguments.pair, arguments.dtype, 1)
    draft = draft if arguments.tree is None else first
    generator = dflash.Generator(target, draft, max_length=256, reuse_prefix=False, tree=arguments.tree)
    out = generator.generate(ids, max_new_tokens=24, temperature=arguments.temperature, seed=1, tree=None)
    # 2. Call each part in a loop
    print(
        f"{torch.get_num_threads()} threads, ISA {ops.isa()}, torch {torch.__version__}, {arguments.dtype}, "
        f"T = {arguments.temperature:g}, {generator.block_size} rows at length {out.shape[1] - 1}, "
        f"prompt of {ids.shape[1]}"
    )
    for name, call in calls(generator, target, ids, arguments.temperature == 0).items():
        print(f"{name:<42}{microseconds(call, arguments.repeats):9.0f} us", flush=True)


if __name__ == "__main__":
    main()
