"""Acceptance and cost of draft trees: the chain and trees of several sizes, prompt by prompt in turns.

    python bench/bench_trees.py [--pair FOLDER] [--noise 0.4] [--temperature 0] [--rows 16 32 64 128 auto]

The pair is the package's, or another in a folder with `target/`, `draft/` and `prompts.jsonl`. All prompts are answered
in float32, prompt i with the seed 7 + i, up to --new tokens or the stop token. With --noise X the drafter is made
worse: each parameter p gets X * p.std() * normal noise, from a generator with the seed 0, in order of the parameters.
Such a drafter accepts about as much as published ones do; the package's own accepts nearly all. The drafter is of the
first generation if the pair has one, with --selector it is the pair's DFlash 2 drafter.

Columns:
    steps       of all answers
    acceptance  tokens emitted per step, bonus token counted; over: over the chain's
    ms/step     without the prompt's forward pass; over: over the chain's
    tokens/s    with it; over: over the chain's
    identical   answers equal to the chain's, token for token
    rows        mean rows of a step

Of --rounds times each answer's shortest counts. Prints; asserts nothing. --chain-steps N warns if the chain took other
than N steps, which says that pair, noise or prompts are not those of an earlier run.
"""

import argparse
import sys
from dataclasses import dataclass, field

import harness
import package_pair
import torch
from torch import Tensor

import dflash
from dflash import ops
from dflash_tools.measure import demo_prompts, encode

FIRST_SEED = 7
HEADS = "            steps  acceptance   over    ms/step   over   tokens/s   over  identical   rows"
LINE = (
    "{name:<10} {steps:6} {acceptance:11.2f} {over:5.2f}x {ms:10.3f} {ms_over:5.2f}x {speed:10.0f} {speed_over:5.2f}x "
    "{identical:>6}/{prompts:<3} {rows:6.1f}"
)


@dataclass
class Result:
    """The answers of one generator, in the order of the prompts.

    Attributes:
        steps: per prompt, the tokens that each step emitted.
        tokens: per prompt, the answer.
        rows: per prompt, the rows of its steps added up.
        seconds: per prompt, shortest time of the whole answer.
        step_seconds: per prompt, shortest time of its steps.
    """

    steps: list[list[int]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """Steps of all answers."""
        return sum(map(len, self.steps))

    @property
    def acceptance(self) -> float:
        """Tokens per step."""
        return sum(map(sum, self.steps)) / self.num_steps

    @property
    def ms_per_step(self) -> float:
        """Milliseconds per step."""
        return 1000 * sum(self.step_seconds) / self.num_steps

    @property
    def tokens_per_second(self) -> float:
        """New tokens over seconds, the prompts' forward passes included."""
        return sum(map(len, self.tokens)) / sum(self.seconds)


def measure(
    generators: dict[str, dflash.Generator], prompts: list[Tensor], arguments: argparse.Namespace
) -> dict[str, Result]:
    """Answer every prompt with all generators in turn."""
    options = {"temperature": arguments.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    options |= {"max_new_tokens": arguments.new, "stop_token_ids": [arguments.stop], "return_dict_in_generate": True}
    results = {name: Result() for name in generators}
    for generator in generators.values():
        generator.generate(prompts[0], seed=FIRST_SEED, **options)
    for index, ids in enumerate(prompts):
        names = list(generators)
        for name in names[:: -1 if index % 2 else 1]:
            outs = [generators[name].generate(ids, seed=FIRST_SEED + index, **options) for _ in range(arguments.rounds)]
            add(results[name], ids, outs)
    return results


def add(result: Result, ids: Tensor, outs: list[dflash.GenerateOutput]) -> None:
    """Add equal answers to one prompt, of which the shortest time counts."""
    found = outs[0].statistics
    result.steps.append(found.acceptance_lengths[0])
    result.tokens.append(outs[0].sequences[0, ids.shape[1] :].tolist())
    result.rows.append(sum(found.rows))
    times = [(out.statistics.seconds, out.statistics.time_to_first_token) for out in outs]
    result.seconds.append(min(seconds for seconds, _ in times))
    result.step_seconds.append(min(seconds - first for seconds, first in times))


def line(name: str, result: Result, chain: Result) -> str:
    """Return the line of a generator."""
    return LINE.format(
        name=name,
        steps=result.num_steps,
        acceptance=result.acceptance,
        over=result.acceptance / chain.acceptance,
        ms=result.ms_per_step,
        ms_over=result.ms_per_step / chain.ms_per_step,
        speed=result.tokens_per_second,
        speed_over=result.tokens_per_second / chain.tokens_per_second,
        identical=sum(a == b for a, b in zip(result.tokens, chain.tokens, strict=True)),
        prompts=len(result.tokens),
        rows=sum(result.rows) / max(result.num_steps, 1),
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    package_pair.add_answer_options(parser)
    package_pair.add_sizes(parser, "--rows", [16, 32, 64, 128], "rows of the trees, root included, or auto")
    parser.add_argument("--selector", action="store_true", help="the pair's drafter of DFlash 2")
    parser.add_argument("--chain-steps", type=int, metavar="N", help="warn if the chain takes other than N steps")
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    # 1. The pair, and a generator per size
    target, draft, tokenizer = dflash.demo_pair(arguments.pair, generation=None if arguments.selector else 1)
    package_pair.perturb(draft, arguments.noise)
    prompts = [encode(tokenizer, prompt.text) for prompt in demo_prompts(arguments.pair)[: arguments.prompts]]
    longest = max(ids.shape[1] for ids in prompts) + arguments.new

    def make(tree: int | str | None) -> dflash.Generator:
        return dflash.Generator(target, draft, max_length=longest, reuse_prefix=False, tree=tree)

    generators = {"chain": make(None)} | {f"tree {rows}": make(rows) for rows in arguments.rows}
    # 2. Measure and print
    about = (
        f"{harness.processor()}, {torch.get_num_threads()} threads, {ops.isa()}, torch {torch.__version__}, float32; "
        f"{arguments.pair.parent.name}/{arguments.pair.name}, noise {arguments.noise:g}, "
        f"T = {arguments.temperature:g}, {len(prompts)} prompts"
    )
    print(f"{about}\n{HEADS}")
    results = measure(generators, prompts, arguments)
    for name, result in results.items():
        print(line(name, result, results["chain"]), flush=True)
    steps = results["chain"].num_steps
    if arguments.chain_steps not in (None, steps):
        print(f"warning: the chain took {steps} steps, not {arguments.chain_steps}: another pair?", file=sys.stderr)


if __name__ == "__main__":
    main()
