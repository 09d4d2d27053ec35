"""Whole generations, several ways, in one process: interleaved over prompts, medians over prompts.

    python bench/bench_generate.py [--pair FOLDER] [--prompts N] [--temperature 0] [--dtype float32] [--compile]
                                   [--busy N] [--json results.json]
    python bench/bench_generate.py --against FOLDER [--rounds N] [...]

Runners:
    transformers          `generate`, one token per forward; greedy, or sampling at the temperature
    prompt lookup         `generate(prompt_lookup_num_tokens=...)`, --lookup of them
    transformers dflash   `generate(speculation_type="dflash")` with transformers' own drafter class
                          (MuseGlimmerAssistantModel) and the pair's weights; left out where they do not fit it
    as_assistant          the same loop around this package's drafter, by `dflash.as_assistant`
    reference             the reference package's loop and drafter, where `.peers/dflash/model.py` exists
                          (`pip install --no-deps --target .peers dflash==0.1.0`)
    one-token             this package without a drafter, one row per step
    dflash                this package; with --compile also `dflash compiled`
    dflash-first          the same with the pair's drafter of the first generation, if it has another one too;
                          transformers dflash and as_assistant always draft with that one

Columns: ms/token and tokens/s include the prompt's forward pass. acceptance: tokens emitted per step, bonus token
counted, where a step is a forward pass of the target that may verify drafts (for prompt lookup and one-token decoding
the prompt's is one too). ms/step: over the same steps. speedup: over transformers. identical: answers equal token for
token to transformers' at T = 0 and to one-token's at T > 0, where other runners draw other random numbers.

With --busy other processes use the processors all the while. With --against this release takes turns with another,
each in a process of its own: ms/token of both, the other's time over this one's, and answers equal in both.

Prints; asserts nothing.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import harness
import package_pair
import releases
import torch
import transformers
from package_pair import Loaded
from peers import checkpoint, native_drafter, reference_loop
from torch import Tensor, nn

import dflash
from dflash import ops

BASE, ONE_TOKEN = "transformers", "one-token"


class Answer(NamedTuple):
    """A sequence ``[1, prompt + new]``, and the tokens that its steps emitted."""

    ids: Tensor
    tokens: int
    steps: int


Runner = Callable[[Tensor], Answer]


def runners(arguments: argparse.Namespace, pair: Loaded) -> dict[str, Runner]:
    """Return every runner that can run here, by name; says on standard error what is left out and why."""
    found = {}
    for name, make in _makers(arguments, pair).items():
        try:
            found[name] = make()
        except (ValueError, RuntimeError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return found


def our_runners(arguments: argparse.Namespace, pair: Loaded) -> dict[str, Callable[[], Runner]]:
    """Return what makes this package's own runners, by name."""
    makers = {
        ONE_TOKEN: lambda: ours(arguments, pair, drafts=False),
        "dflash": lambda: ours(arguments, pair),
    }
    if pair.first is not pair.draft:
        makers["dflash-first"] = lambda: ours(arguments, pair._replace(draft=pair.first))
    if arguments.compile:
        makers["dflash compiled"] = lambda: ours(arguments, pair, compile=True)
    return makers


def _makers(arguments: argparse.Namespace, pair: Loaded) -> dict[str, Callable[[], Runner]]:
    def theirs(**options) -> Runner:
        return hf_generate(pair.target, arguments.temperature, arguments.new, **options)

    def assisted(drafter: nn.Module) -> Runner:
        return theirs(assistant_model=drafter, speculation_type="dflash", prompt_is_step=False)

    dtype = getattr(torch, arguments.dtype)
    best, first = (checkpoint(package_pair.draft_folder(arguments.pair, generation), dtype) for generation in (None, 1))
    return {
        BASE: theirs,
        "prompt lookup": lambda: theirs(prompt_lookup_num_tokens=arguments.lookup),
        "transformers dflash": lambda: assisted(native_drafter(*first)),
        "as_assistant": lambda: assisted(dflash.as_assistant(pair.first)),
        "reference": lambda: _reference(reference_loop(*best, pair.target, arguments.temperature, arguments.new)),
        **our_runners(arguments, pair),
    }


def hf_generate(target: nn.Module, temperature: float, new: int, prompt_is_step: bool = True, **options) -> Runner:
    """Return a runner of transformers' ``generate`` with ``options``.

    Args:
        target: the model. It always gets a cache, whatever its generation_config says.
        temperature: 0 for greedy.
        new: new tokens at most.
        prompt_is_step: whether the prompt's forward pass counts as a step.
        options: of ``generate``.
    """
    options["use_cache"] = True
    sample = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}

    def run(ids: Tensor) -> Answer:
        torch.manual_seed(1)
        with _forwards(target) as count:
            out = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **sample, **options)
        first = 0 if prompt_is_step else 1
        return Answer(out, out.shape[1] - ids.shape[1] - first, count[0] - first)

    return run


@contextmanager
def _forwards(target: nn.Module) -> Iterator[list[int]]:
    """Count the forward passes of ``target`` in a list of one."""
    count = [0]
    handle = target.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    try:
        yield count
    finally:
        handle.remove()


def _reference(loop: Callable[[Tensor], tuple[Tensor, list[int]]]) -> Runner:
    def run(ids: Tensor) -> Answer:
        out, lengths = loop(ids)
        return Answer(out, sum(lengths), len(lengths))

    return run


def ours(arguments: argparse.Namespace, pair: Loaded, drafts: bool = True, **options) -> Runner:
    """Return a runner of a `dflash.Generator` with ``options``."""
    length = max(ids.shape[1] for ids in pair.prompts) + arguments.new
    draft = pair.draft if drafts else None
    generator = dflash.Generator(pair.target, draft, max_length=length, reuse_prefix=False, **options)

    def run(ids: Tensor) -> Answer:
        out = generator.generate(
            ids,
            max_new_tokens=arguments.new,
            temperature=arguments.temperature,
            seed=1,
            draft_sharpness=arguments.draft_sharpness,
            return_dict_in_generate=True,
        )
        lengths = out.statistics.acceptance_lengths[0]
        first = 0 if drafts else 1  # without drafts the prompt's forward pass is a step like the others
        return Answer(out.sequences, sum(lengths) + first, len(lengths) + first)

    return run


HEADS = "runner               ms/token  tokens/s  acceptance  ms/step  speedup  identical"


def measure(found: dict[str, Runner], prompts: list[Tensor], temperature: float) -> list[dict]:
    """Return a row of results per runner; the first is what speedups refer to."""
    # 1. Warm up: allocation, compilation
    for run in found.values():
        run(prompts[0])
    # 2. Take turns over the prompts
    answers: dict[str, list[tuple[Answer, float]]] = {name: [] for name in found}
    for ids in prompts:
        for name, run in found.items():
            began = time.perf_counter()
            answer = run(ids)
            answers[name].append((answer, 1000 * (time.perf_counter() - began)))
    # 3. Medians, and how many answers equal the base's. At T > 0 a seed decides within this package only.
    base = [answer.ids for answer, _ in answers[BASE if temperature == 0 else ONE_TOKEN]]
    rows = [_row(name, results, prompts, base) for name, results in answers.items()]
    for row in rows:
        row["speedup"] = rows[0]["ms_per_token"] / row["ms_per_token"]
    return rows


def _row(name: str, results: list[tuple[Answer, float]], prompts: list[Tensor], base: list[Tensor]) -> dict:
    counts = [answer.ids.shape[1] - ids.shape[1] for (answer, _), ids in zip(results, prompts, strict=True)]
    per_token = statistics.median(ms / count for (_, ms), count in zip(results, counts, strict=True))
    steps = sum(answer.steps for answer, _ in results)
    return {
        "runner": name,
        "ms_per_token": per_token,
        "tokens_per_second": 1000 / per_token,
        "acceptance_length": sum(answer.tokens for answer, _ in results) / max(steps, 1),
        "ms_per_step": statistics.median(ms / max(answer.steps, 1) for answer, ms in results),
        "identical": sum(torch.equal(answer.ids, ids) for (answer, _), ids in zip(results, base, strict=True)),
        "prompts": len(prompts),
    }


def line(row: dict) -> str:
    """Return the line of a row."""
    return (
        f"{row['runner']:<19} {row['ms_per_token']:9.2f} {row['tokens_per_second']:9.0f} "
        f"{row['acceptance_length']:11.2f} {row['ms_per_step']:8.2f} {row['speedup']:7.2f}x "
        f"{row['identical']:>7}/{row['prompts']}"
    )


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` other processes busy inside the context."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def header(arguments: argparse.Namespace) -> dict:
    """Return the header of the JSON file."""
    return {
        "command": "python " + shlex.join(sys.argv),
        "commit": harness.commit(),
        "machine": {
            "processor": harness.processor(),
            "processors": os.cpu_count(),
            "architecture": platform.machine(),
        },
        "isa": ops.isa(),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dflash-engine": dflash.__version__,
        },
        "dtype": arguments.dtype,
        "temperature": arguments.temperature,
        "busy_processes": arguments.busy,
        "new_tokens_at_most": arguments.new,
    }


def works(arguments: argparse.Namespace) -> dict[str, Callable[[], list[releases.Work]]]:
    """Return this package's runners; a piece is a prompt."""
    pair = package_pair.load(arguments.pair, arguments.dtype, arguments.prompts)

    def pieces(make: Callable[[], Runner]) -> list[releases.Work]:
        run = make()
        return [lambda ids=ids: _timed(run, ids) for ids in pair.prompts]

    return {name: lambda make=make: pieces(make) for name, make in our_runners(arguments, pair).items()}


def _timed(run: Runner, ids: Tensor) -> releases.Result:
    began = time.perf_counter()
    answer = run(ids)
    seconds = time.perf_counter() - began
    return releases.Result(seconds, answer.ids.shape[1] - ids.shape[1], answer.ids[0].tolist())


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    package_pair.add_option(parser)
    add("--prompts", type=int, help="default: all")
    add("--new", type=int, default=200, help="new tokens at most")
    add("--temperature", type=float, default=0.0)
    sharpness = {"type": float, "default": 1.0}
    add("--draft-sharpness", metavar="NUMBER", **sharpness)
    add("--lookup", type=int, default=10, help="tokens that prompt lookup proposes")
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--compile", action="store_true", help="also run this package with compile=True")
    add("--busy", type=int, default=0, metavar="N", help="other processes that compute at the same time")
    add("--json", type=Path, metavar="FILE", help="write the results, a row per runner, and what they were made with")
    releases.add_option(parser)
    add("--rounds", type=int, default=3, help="with --against: how often each prompt is answered")
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    arguments = parse()
    about, rows = header(arguments), []
    title = (
        f"{about['machine']['processor']}, {about['threads']} threads, ISA {about['isa']}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {arguments.dtype}, T = {arguments.temperature}"
    )
    beside = f", next to {arguments.busy} busy processes" if arguments.busy else ""
    if arguments.against:
        print(f"{title}{beside}\nrunner               ms/token     other    ratio  identical")
        with busy(arguments.busy):
            for found in releases.compare("bench_generate", arguments, arguments.rounds):
                rows.append(asdict(found))
                times = f"{1000 * found.seconds:9.2f} {1000 * found.other_seconds:9.2f} {found.ratio:7.2f}x"
                print(f"{found.name:<19} {times} {found.identical:>7}/{found.pieces}", flush=True)
    else:
        pair = package_pair.load(arguments.pair, arguments.dtype, arguments.prompts)
        about["prompts"] = len(pair.prompts)
        about["target_parameters"] = sum(parameter.numel() for parameter in pair.target.parameters())
        size = f"{about['prompts']} prompts, {about['target_parameters'] / 1e6:.1f} M target parameters"
        found = runners(arguments, pair)
        print(f"{title}, {size}{beside}")
        with busy(arguments.busy):
            rows = measure(found, pair.prompts, arguments.temperature)
        print("\n".join([HEADS, *map(line, rows)]))
    if arguments.json:
        arguments.json.write_text(json.dumps({**about, "runners": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
