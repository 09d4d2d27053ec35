"""Drafting next to one token per step, with a drafter as it is and with a useless one: does ``auto`` ever lose?

    python bench/bench_auto.py --model PATH --draft PATH [--weights int8] [--new 160] [--threads N] [--rows 1 | --tree]

PATHs are what --model and --draft of the commands take; --draft random is an untrained drafter of three layers. The
useless drafter is the same one with random weights where the target's features come in. All answer the same questions,
greedily, and take turns. With --rows, so many answers are written at the same time by a session, as the server does.
With --tree, drafts are trees.

    speed      tokens per second over those of one token per step: steps only, median over the questions (or the rounds)
    per step   tokens that a step emits
    rows       that a step verifies, on average
    same       answers that equal those of one token per step

Prints; asserts nothing.
"""

import argparse
import copy
import statistics
import time

import harness
import torch
from torch import Tensor

import dflash
from dflash import ops
from dflash.cli.sources import Source, load_target, load_tokenizer
from dflash.loading import prompt_ids
from dflash.session import Session
from dflash_tools.train import draft_config, new_drafter

QUESTIONS = [
    "Explain photosynthesis to a child.", "Write a Python function that reverses a string.",
    "Give me three tips for learning a language.", "Summarize the plot of Cinderella.", "What causes the tides?",
    "Write the opening of a story about a lighthouse.", "How does a bicycle stay upright?",
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell in all?",
]  # fmt: skip
Answers = tuple[float, list[list[int]], list[int]]  # seconds of the steps, texts, and the rows of each step


def answer(generator: dflash.Generator, prompts: list[Tensor], new: int) -> Answers:
    """Answer prompts at the same time; one prompt in a call of its own."""
    call = {"max_new_tokens": new, "temperature": 0.0}
    if len(prompts) == 1:
        output = generator.generate(prompts[0][None], return_dict_in_generate=True, **call)
        found = output.statistics
        return sum(found.step_seconds), [output.sequences[0, len(prompts[0]) :].tolist()], found.rows
    session, texts, seconds = Session(generator, cache_bytes=0), {}, 0.0
    for ids in prompts:
        texts[session.admit(session.resolve(ids[None], **call))] = []
    rows: list[int] = []
    while session.is_busy:
        began = time.perf_counter()
        events = session.step()
        seconds += time.perf_counter() - began if min(map(len, texts.values())) else 0.0
        for row, event, _ in events:
            texts[row] += event.ids[0]
            rows = max(rows, event.statistics.rows, key=len)
    for row in texts:
        session.retire(row)
    return seconds, list(texts.values()), rows


def spoiled(draft: dflash.Drafter) -> dflash.Drafter:
    """Return a drafter that knows nothing of the context."""
    useless = copy.deepcopy(draft)
    with torch.no_grad():
        useless.fc.weight.normal_(0, float(draft.fc.weight.float().std()))
    return useless


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--weights", choices=["int8"], help="of both models")
    parser.add_argument("--dtype", default="auto", help="default: that of the target's files")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--rows", type=int, default=1, help="answers at the same time")
    kinds.add_argument("--tree", action="store_true")
    parser.add_argument("--limit", type=int, default=len(QUESTIONS), help="questions")
    parser.add_argument("--new", type=int, default=160, help="new tokens per answer at most")
    parser.add_argument("--repeats", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    source = Source(arguments.model)
    target, tokenizer = load_target(source, arguments.dtype, "cpu"), load_tokenizer(source)
    if arguments.draft == "random":
        config = draft_config(target, mask_token_id=0, num_layers=3, block_size=8)
        draft = new_drafter(config).to(target.dtype)
    else:
        draft = dflash.load_draft(arguments.draft, dtype=target.dtype)
    prompts = [torch.tensor(prompt_ids(tokenizer, {"prompt": question})) for question in QUESTIONS[: arguments.limit]]
    groups = [prompts[first : first + arguments.rows] for first in range(0, len(prompts), arguments.rows)]
    room = max(map(len, prompts)) + arguments.new
    if arguments.tree:
        ways = {"trees of 16": {"tree": 16}, "tree auto": {"tree": "auto"}}
    else:
        ways = {"whole blocks": {}, "auto": {"block_size": "auto"}}
    settings = {"one token": (None, {"block_size": 1})}
    for name, drafter in (("drafter", draft), ("useless", spoiled(draft))):
        settings |= {f"{name}, {way}": (drafter, options) for way, options in ways.items()}
    generators = {
        name: dflash.Generator(
            target, drafter, max_length=room, batch_size=arguments.rows, reuse_prefix=False, **options,
            weights=arguments.weights, draft_weights=arguments.weights if drafter is not None else None,
        )
        for name, (drafter, options) in settings.items()
    }  # fmt: skip
    print(f"{harness.processor()}, {arguments.threads} threads, {ops.isa()}, torch {torch.__version__}, {target.dtype}")
    for generator in generators.values():  # costs are measured
        answer(generator, groups[0], min(8, arguments.new))
    found: dict[str, list[Answers]] = {name: [] for name in generators}
    for _ in range(arguments.repeats):
        for group in groups:
            for name, generator in generators.items():
                found[name].append(answer(generator, group, arguments.new))
    print(f"{'':24} speed  per step  rows  same")
    plain = found["one token"]
    for name, runs in found.items():
        speeds = [one[0] / run[0] for one, run in zip(plain, runs, strict=True)]
        rows = [count for run in runs for count in run[2]]
        per_step = sum(len(text) - 1 for run in runs for text in run[1]) / arguments.rows / len(rows)
        same = sum(a == b for one, run in zip(plain, runs, strict=True) for a, b in zip(one[1], run[1], strict=True))
        speed, width = statistics.median(speeds), statistics.mean(rows)
        print(f"{name:24} {speed:5.2f} {per_step:9.2f} {width:5.1f} {same:5}", flush=True)


if __name__ == "__main__":
    main()
