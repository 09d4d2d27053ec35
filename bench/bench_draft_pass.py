"""What a DFlash 2 drafter's pass costs on a CPU next to one of the first generation of the same sizes, random weights.

    python bench/bench_draft_pass.py [--hidden 512 1024] [--vocab 151936] [--seconds 5] [--dtypes float32]

The DFlash 2 drafter has kernels of 2 rows, groups of 16 channels, a selector of rank 256 and 16 candidates, as the
published ones have. "layers" is the pass up to the final norm, "logits" with the head, "proposal" with the drafts
drawn: at temperature 0, and at temperature 1 for every level of sharpness. Calls take turns; medians. Prints; asserts
nothing.
"""

import argparse
import itertools
import statistics

import harness
import torch
from internals import Parts
from random_pair import Pair, make_pair

import dflash
from dflash import ops

SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
SETTINGS = {"": {"temperature": 0.0}, ", T = 1": {"temperature": 1.0, "seed": 0}}


def second_generation(pair: Pair) -> dflash.Drafter:
    """Return a DFlash 2 drafter of the sizes of the pair's."""
    section = pair.draft_config["dflash_config"] | SIZES
    config = pair.draft_config | {"architectures": ["DFlash2DraftModel"], "dflash_config": section}
    drafter = dflash.Drafter(dflash.DraftConfig.from_config(config), dtype=pair.drafter.dtype).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    return drafter


def parts_of(target: torch.nn.Module, drafter: dflash.Drafter, settings: dict) -> Parts:
    """Return the parts of a step after a short answer."""
    generator = dflash.Generator(target, drafter, max_length=256)
    ids = torch.randint(2, 200, (1, 64), generator=torch.Generator().manual_seed(0))
    generator.generate(ids, max_new_tokens=4, **settings)
    return Parts(generator)


@torch.no_grad()
def measure(pair: Pair, seconds: float) -> dict[str, list[float]]:
    """Return the milliseconds of both drafters by what is called, the first generation's first."""
    drafters, runs = {"first": pair.drafter, "second": second_generation(pair)}, {}
    for (generation, drafter), (name, settings) in itertools.product(drafters.items(), SETTINGS.items()):
        parts = parts_of(pair.target, drafter, settings)
        runs[f"proposal{name}", generation] = parts.propose
        if not name:
            runs["layers", generation] = parts.draft_layers
            runs["logits", generation] = parts.draft
    timer = harness.Timer(torch.device("cpu"))
    times = {key: 1000 * statistics.median(found) for key, found in timer.interleaved(runs, [()], seconds).items()}
    names = ("layers", "logits", *(f"proposal{name}" for name in SETTINGS))
    return {name: [times[name, generation] for generation in drafters] for name in names}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each width and dtype")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    print(
        f"{harness.processor()}, {torch.get_num_threads()} threads, ISA {ops.isa()}, torch {torch.__version__}; "
        "ms per call, 3 layers, 16 rows, random weights"
    )
    print("hidden dtype      part                 first generation   DFlash 2   ratio")
    for hidden, dtype in itertools.product(arguments.hidden, arguments.dtypes):
        size = harness.Model(hidden, hidden // 64, max(hidden // 128, 1), 64, 3 * hidden, arguments.vocab, 3, 3)
        pair = make_pair(size, 8, getattr(torch, dtype), torch.device("cpu"), tied=True)
        for name, (first, second) in measure(pair, arguments.seconds).items():
            row = f"{hidden:6} {dtype:<10} {name:<20} {first:16.2f} {second:10.2f} {second / first:6.2f}x"
            print(row, flush=True)


if __name__ == "__main__":
    main()
