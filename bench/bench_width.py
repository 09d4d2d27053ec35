"""Fixed widths of chains next to ``block_size="auto"``: what they accept, and tokens per second.

    python bench/bench_width.py [--pair FOLDER] [--noise 0.4] [--temperature 0] [--widths 4 8 12 16 auto]

The pair, `--noise` and the columns are those of bench_trees.py; "over" is over the widest. "predicted" is the
acceptance that the widest's steps promise of a width (docs/context.md). Prints; asserts nothing.
"""

import argparse
import math

import harness
import package_pair
import torch
from bench_trees import HEADS, line, measure

import dflash
from dflash import ops
from dflash_tools.measure import demo_prompts, encode


def predicted(answers: list[list[int]], widest: int, width: int) -> float:
    """Return the tokens per step of ``width`` that the steps of ``widest`` promise.

    Args:
        answers: per answer, the tokens that each step emitted.
        widest: rows of these steps.
        width: rows of those that are promised.
    """
    tokens = steps = 0
    for answer in answers:
        run = 0
        for emitted in [*answer, 0]:
            run += emitted
            if emitted < widest:  # the first wrong draft, or the answer's end
                steps += math.ceil(run / width)
                tokens, run = tokens + run, 0
    return tokens / steps


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package_pair.add_answer_options(parser)
    package_pair.add_sizes(parser, "--widths", [4, 8, 12, 16, "auto"], "rows of the chains, anchor included, or auto")
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    target, draft, tokenizer = dflash.demo_pair(arguments.pair, generation=1)
    package_pair.perturb(draft, arguments.noise)
    prompts = [encode(tokenizer, prompt.text) for prompt in demo_prompts(arguments.pair)[: arguments.prompts]]
    longest = max(ids.shape[1] for ids in prompts) + arguments.new
    generators = {
        f"width {width}": dflash.Generator(target, draft, max_length=longest, block_size=width, reuse_prefix=False)
        for width in arguments.widths
    }
    print(
        f"{harness.processor()}, {torch.get_num_threads()} threads, {ops.isa()}, torch {torch.__version__}, float32; "
        f"noise {arguments.noise:g}, T = {arguments.temperature:g}, {len(prompts)} prompts\n{HEADS}  predicted"
    )
    results = measure(generators, prompts, arguments)
    fixed = [width for width in arguments.widths if width != "auto"]
    widest = results[f"width {max(fixed)}"]
    for width, result in zip(arguments.widths, results.values(), strict=True):
        promised = f"{predicted(widest.steps, max(fixed), width):10.2f}" if width in fixed else ""
        print(line(f"width {width}", result, widest) + promised, flush=True)


if __name__ == "__main__":
    main()
