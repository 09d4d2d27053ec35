"""Write the table of docs/reliability.md: the groups of tests/faults, with the number of their tests and examples.

python docs/make_reliability.py            # writes the table
python docs/make_reliability.py --check    # exits 1 if the table is out of date
"""

import argparse
import collections
import contextlib
import io
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE, FAULTS = ROOT / "docs" / "reliability.md", ROOT / "tests" / "faults"
BEGIN, END = "<!-- the table: python docs/make_reliability.py -->\n", "<!-- the table ends -->\n"


class Groups:
    """A pytest plugin that counts the tests of each file, and the examples of its property tests."""

    def __init__(self) -> None:
        self.promises: dict[Path, str] = {}
        self.tests: collections.Counter[Path] = collections.Counter()
        self.examples: collections.Counter[Path] = collections.Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Count."""
        for item in items:
            self.promises[item.path] = " ".join((item.module.__doc__ or "").split("\n\n")[0].split())
            self.tests[item.path] += 1
            drawn = getattr(item.function, "_hypothesis_internal_use_settings", None)
            self.examples[item.path] += drawn.max_examples if drawn else 0


def collect() -> Groups:
    """Return the groups that pytest collects."""
    groups, output = Groups(), io.StringIO()
    with contextlib.redirect_stdout(output):
        code = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", str(FAULTS)], plugins=[groups])
    if code:
        sys.exit(output.getvalue())
    return groups


def table(groups: Groups) -> str:
    """Return the table, one row per file, and the sums."""
    sys.path.insert(0, str(FAULTS))
    from examples import LONG_FACTOR

    lines = ["| what is promised | tests | drawn examples | in a long run |", "| --- | --- | --- | --- |"]
    for path in sorted(groups.tests):
        drawn = groups.examples[path]
        numbers = f"{groups.tests[path]} | {drawn or ''} | {f'{drawn * LONG_FACTOR:,}' if drawn else ''}"
        lines.append(f"| {groups.promises[path]} (`{path.name}`) | {numbers} |")
    drawn = groups.examples.total()
    lines.append(f"| together | {groups.tests.total()} | {drawn:,} | {drawn * LONG_FACTOR:,} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or compare the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with docs/reliability.md instead of writing it")
    arguments = parser.parse_args()
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    text = before + BEGIN + "\n" + table(collect()) + "\n" + END + rest.split(END)[1]
    if not arguments.check:
        PAGE.write_text(text)
    return int(arguments.check and text != page)


if __name__ == "__main__":
    sys.exit(main())
