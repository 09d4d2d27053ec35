"""How far answers and log probabilities differ between the instruction sets of the CPU kernels.

    python bench/instruction_sets.py --model PATH --prompts FILE.jsonl [--count 20] [--new 64] [--weights int8]
        [--dtype bfloat16] [--sets avx2 avx512]

Each set of this build and processor (`-C cmake.define.DFLASH_ALL_ISAS=ON` builds all) answers the same prompts greedily
in a process of its own, without a drafter, and is compared with the best one. `scalar` takes minutes for what the
others do in seconds; --sets names those to run:

    texts      answers with the same tokens
    tokens     of all new tokens, those before an answer's first difference
    mean, max  difference in the log probability of a prompt's token, over all prompts

Prints; asserts nothing.
"""

import argparse
import json
import os
import subprocess
import sys

import torch

import dflash
from dflash import _C
from dflash.cli.sources import Source, load_target
from dflash.loading import Pretrained, prompt_ids
from dflash_tools.measure.datasets import load_conversations


def answers(arguments: argparse.Namespace) -> list[tuple[list[int], list[float]]]:
    """Return each answer's tokens, and the log probabilities of its prompt's."""
    target = load_target(Source(arguments.model), arguments.dtype, "cpu")
    tokenizer = Pretrained(arguments.model).load_tokenizer()
    questions = [conversation.turns[0] for conversation in load_conversations(arguments.prompts, limit=arguments.count)]
    prompts = [prompt_ids(tokenizer, {"messages": [{"role": "user", "content": text}]}) for text in questions]
    longest = max(map(len, prompts))
    generator = dflash.Generator(target, None, max_length=longest + arguments.new, weights=arguments.weights)
    found = []
    for prompt in prompts:
        out = generator.generate(
            torch.tensor(prompt)[None], max_new_tokens=arguments.new, temperature=0.0, logprobs=0, prompt_logprobs=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        values = [value.logprob for value in out.prompt_logprobs[0][1:]]
        found.append((out.sequences[0, len(prompt) :].tolist(), values))
    return found


def shared(ours: list[int], theirs: list[int]) -> int:
    """Count the tokens before the first difference."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSON lines, as for dflash benchmark --dataset")
    parser.add_argument("--count", type=int, default=20, help="the first prompts")
    parser.add_argument("--new", type=int, default=64, help="new tokens per answer")
    parser.add_argument("--weights", choices=["int8"])
    parser.add_argument("--dtype", default="auto", help="default: that of the files")
    parser.add_argument("--sets", nargs="+", choices=_C.isas(), default=_C.isas(), help="default: all")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        print(json.dumps(answers(arguments)))
        return
    found = {}
    for isa in dict.fromkeys((*arguments.sets, _C.isa())):
        command, environment = [sys.executable, *sys.argv, "--worker"], os.environ | {"DFLASH_ISA": isa}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found[isa] = json.loads(done.stdout)
    expected = found[_C.isa()]
    print(f"{arguments.model}, weights {arguments.weights}, {arguments.dtype}, next to {_C.isa()}")
    print(f"{'set':<12}{'texts':>12}{'tokens':>14}{'mean':>10}{'max':>10}")
    for isa, rows in found.items():
        pairs = list(zip(rows, expected, strict=True))
        same = sum(ours[0] == theirs[0] for ours, theirs in pairs)
        kept, total = sum(shared(ours[0], theirs[0]) for ours, theirs in pairs), sum(len(row[0]) for row in expected)
        apart = [abs(a - b) for ours, theirs in pairs for a, b in zip(ours[1], theirs[1], strict=True)]
        mean, most = sum(apart) / len(apart), max(apart)
        print(f"{isa:<12}{same:>6} of {len(pairs):<2}{kept:>7} of {total:<4}{mean:>10.2g}{most:>10.2g}")


if __name__ == "__main__":
    main()
