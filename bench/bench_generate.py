"""Whole generations, several ways, in one process: interleaved over prompts, medians over prompts.

    python bench/bench_generate.py [--pair FOLDER] [--prompts N] [--temperature 0] [--dtype float32] [--compile]
                                   [--busy N] [--json results.json] [--plot results.png]
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
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import package_pair
import releases
import torch
import transformers
from generate.header import header
from generate.plot import plot
from generate.runners import Runner, our_runners, runners
from generate.table import HEADS, busy, line, measure
from torch import Tensor


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
    add("--plot", type=Path, metavar="FILE", help="draw the results (PNG, SVG or PDF)")
    releases.add_option(parser)
    add("--rounds", type=int, default=3, help="with --against: how often each prompt is answered")
    arguments = parser.parse_args()
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[bench]'")
    if arguments.against and arguments.plot:
        parser.error("--plot draws the runners of one release: leave out --against")
    return arguments


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
    if arguments.plot:
        plot(arguments.plot, rows, about)


if __name__ == "__main__":
    main()
