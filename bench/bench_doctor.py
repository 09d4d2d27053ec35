"""The doctor's confusion table: each fault planted in the package's pair against what the doctor names.

    python bench/bench_doctor.py [--prompts 8] [--max-new-tokens 128] [--places 32] [--only NAME ...]

Prints a line per fault, and per healthy pair of another kind that is made of the package's: what should be named and
what was, tokens per step as configured and with the best variant at the same places, and seconds. Asserts nothing;
`tests/test_doctor_pair.py` does.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from planted_pairs import FAULTS, KINDS, PROMPTS, plant

from dflash.doctor import Effort, diagnose


def main() -> None:
    """Plant every fault, one at a time."""
    cases = {f"(none, {kind})": pair for kind, pair in KINDS.items()} | FAULTS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--places", type=int, default=32)
    parser.add_argument("--only", nargs="*", choices=cases, help="faults; default: all, and none")
    given = parser.parse_args()
    right = 0
    print("| planted | fault | named | tokens per step | repaired | seconds |\n" + "| --- " * 6 + "|")
    for name in given.only or cases:
        with tempfile.TemporaryDirectory() as folder:
            effort = Effort(given.max_new_tokens, given.places)
            found = diagnose(plant(cases[name], Path(folder)), PROMPTS[: given.prompts], effort)
        named = ", ".join(finding.fault for finding in found.findings)
        right += named == cases[name].named
        after = [finding.after for finding in found.findings if finding.after is not None]
        before = next((finding.before for finding in found.findings if finding.after is not None), found.replayed)
        best = f"{after[-1]:.2f}" if after else ""
        numbers = f"{before or found.acceptance_length:.2f} | {best} | {found.seconds:.0f}"
        print(f"| {name} | {cases[name].named} | {named} | {numbers} |", flush=True)
    print(f"\n{right} of {len(given.only or cases)} right")


if __name__ == "__main__":
    main()
