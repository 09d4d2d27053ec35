"""The doctor's confusion table: each fault planted in the package's pair against what the doctor names.

    python bench/bench_doctor.py [--prompts 8] [--max-new-tokens 128] [--places 32] [--only NAME ...]

Prints a line per fault: what was named, tokens per step as configured and with the best variant at the same places,
and seconds. Asserts nothing; `tests/test_doctor_pair.py` does.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from planted_pairs import FAULTS, PROMPTS, Planted, plant

from dflash.doctor import Effort, diagnose


def main() -> None:
    """Plant every fault, one at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--places", type=int, default=32)
    parser.add_argument("--only", nargs="*", help="faults; default: all, and none")
    given = parser.parse_args()
    faults = {"(none)": Planted("(nothing)"), **FAULTS}
    print("| planted | named | tokens per step | without it | seconds |\n| --- | --- | --- | --- | --- |")
    for name in given.only or faults:
        with tempfile.TemporaryDirectory() as folder:
            effort = Effort(given.max_new_tokens, given.places)
            found = diagnose(plant(faults[name], Path(folder)), PROMPTS[: given.prompts], effort)
        named = ", ".join(finding.fault for finding in found.findings) or "(nothing)"
        after = [finding.after for finding in found.findings if finding.after is not None]
        before = next((finding.before for finding in found.findings if finding.after is not None), found.replayed)
        best = f"{after[-1]:.2f}" if after else ""
        print(f"| {name} | {named} | {before:.2f} | {best} | {found.seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
