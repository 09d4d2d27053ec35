"""Whole answers of the package's pair on a device, each compared with one token at a time at the same shapes.

    python bench/gpu/answers.py [--device cpu] [--prompts N]

In bfloat16, as chains and as trees of 16 rows, greedy and sampled. Exits with 1 if an answer differs.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).resolve().parents[1])

from package_pair import PAIR, load  # noqa: E402

import dflash  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=16)
    options = parser.parse_args()
    target, *drafts, prompts = load(PAIR, "bfloat16", options.prompts)
    target, draft, first = (module.to(options.device) for module in (target, *drafts))
    one = dflash.Generator(target, max_length=512, block_size=16)
    ours = {
        "DFlash 2": dflash.Generator(target, draft, max_length=512),
        "first generation": dflash.Generator(target, first, max_length=512),
        "first generation, trees": dflash.Generator(target, first, max_length=512, tree=16),
    }
    different = 0
    for style in ({}, {"temperature": 1.0, "seed": 7}):
        for ids in prompts:
            call = style | {"ids": ids.to(options.device), "max_new_tokens": 80}
            want = one.generate(**call)
            different += sum(not torch.equal(generator.generate(**call), want) for generator in ours.values())
    for name, generator in ours.items():
        print(f"{name}: CUDA graphs {generator.graph_reason or 'used'}")
    print(f"{2 * len(ours) * len(prompts)} answers on {options.device}, {different} different")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
