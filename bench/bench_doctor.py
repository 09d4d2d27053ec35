"""The doctor's confusion table: each fault planted in the package's pair against what the doctor names.

    python bench/bench_doctor.py [--prompts 8] [--max-new-tokens 128] [--places 32] [--draws 20] [--only NAME ...]

Prints, as Markdown for docs/doctor.md: the machine; a line per fault, and per healthy pair of another kind that is made
of the package's; and false alarms. A line has what was named, tokens per step as configured and with the best variant
at the same places, and seconds. "should be" marks a line that is wrong. False alarms are sought in --draws draws of two
prompts, every other of random words, with 40 new tokens each. --processes share the work, with one thread each. Asserts
nothing; `tests/tools/test_doctor_pair.py` does.
"""

import argparse
import dataclasses
import functools
import multiprocessing
import random
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import harness
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from planted_pairs import FAULTS, HEALTHY, KINDS, PROMPTS, Planted, plant

from dflash_tools.doctor import Diagnosis, diagnose

CASES = {f"(none, {kind})": pair for kind, pair in KINDS.items()} | FAULTS
DRAWN = 40, 16  # new tokens and places of each answer


def examine(name: str, count: int, effort: tuple[int, int]) -> Diagnosis:
    """Plant a fault and look for it."""
    with tempfile.TemporaryDirectory() as folder:
        return diagnose(*plant(CASES[name], Path(folder), count), *effort)


def line(name: str, found: Diagnosis) -> str:
    """Return a fault's line of the table."""
    fault, named = CASES[name].named, ", ".join(finding.fault for finding in found.findings)
    right = "" if named == fault else f" (should be {fault or 'nothing'})"
    compared = [finding for finding in found.findings if finding.after is not None]
    before = compared[0].before if compared else found.replayed or found.acceptance_length
    after = f"{compared[-1].after:.2f}" if compared else ""
    return f"| {name} | {named or '(nothing)'}{right} | {before:.2f} | {after} | {found.seconds:.0f} |"


def draw(number: int) -> Diagnosis:
    """Examine the healthy pair on two prompts, of random words if the number is odd."""
    chance = random.Random(number)
    rows = chance.sample(PROMPTS, 2)
    if number % 2:
        words = sorted({word for row in PROMPTS for word in re.findall(r"\w+", row["prompt"])})
        rows = [{"prompt": " ".join(chance.choices(words, k=12))} for _ in rows]
    with tempfile.TemporaryDirectory() as folder:
        pair, prompts = plant(Planted(""), Path(folder))
        return diagnose(pair, dataclasses.replace(prompts, rows=rows), *DRAWN)


def summary(what: str, drawn: list[Diagnosis]) -> str:
    """Return a sentence about draws of healthy pairs."""
    lengths = [found.acceptance_length for found in drawn]
    most = max(max(found.trials.values(), default=0.0) / found.replayed for found in drawn if found.replayed)
    alarms = sum(bool(found.findings) for found in drawn)
    return (
        f"{len(drawn)} draws of two {what}, {min(lengths):.1f} to {max(lengths):.1f} tokens per step: {alarms} false "
        f"alarms. No other wiring accepted more than {most:.2f} times as many."
    )


def described() -> str:
    """Return kind and sizes of the package's pair."""
    with tempfile.TemporaryDirectory() as folder:
        pair, _ = plant(Planted(""), Path(folder))
    target, drafter = (sum(x.numel() for x in model.parameters()) / 1e6 for model in (pair.target, pair.drafter))
    sizes = f"a target of {target:.1f} M parameters and a drafter of {drafter:.1f} M"
    return f"the package's pair, {sizes}, of the first generation, blocks of {HEALTHY['block_size']}"


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--places", type=int, default=32)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="NAME", help="of the lines; default: all")
    return parser.parse_args()


def main() -> None:
    """Run what the command line asks for."""
    given = parse()
    names, effort = given.only or [*CASES], (given.max_new_tokens, given.places)
    print(
        f"{harness.processor()}, {given.processes} at a time with one thread each, torch {torch.__version__}, float32; "
        f"{described()}, {given.prompts} prompts, {given.max_new_tokens} new tokens, {given.places} places per "
        "answer:\n\n| planted | named | tokens per step | repaired | seconds |\n| --- | --- | --- | --- | --- |"
    )
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.processes, context, torch.set_num_threads, (1,)) as pool:
        run = functools.partial(examine, count=given.prompts, effort=effort)
        for name, found in zip(names, pool.map(run, names), strict=True):
            print(line(name, found), flush=True)
        drawn = list(pool.map(draw, range(given.draws)))
    for what, found in (("prompts of the pair", drawn[::2]), ("lines of random words", drawn[1::2])):
        if found:
            print(f"\n{summary(what, found)}")


if __name__ == "__main__":
    main()
