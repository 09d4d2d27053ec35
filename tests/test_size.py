"""README says how many lines of code the core and the package have; this keeps the sentence true."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "dflash"
AROUND = {"hf", "grammar", "receipts", "answers", "loading", "internals", "cli"}
ORACLE = PACKAGE / "ops" / "reference.py"  # the tests' plain-torch twins of the ops
TOLERANCE = 100  # README rounds to hundreds; a small change need not touch it
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Count the lines of ``source`` that hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_the_counter_leaves_out_blank_lines_comments_and_docstrings():
    source = (
        '"""Module."""\n\nx = 1  # why\n\ndef f():\n    """Return."""\n    # why\n    return [\n        x,\n    ]\n'
    )
    assert code_lines(source) == 5


def test_readme_states_the_size_of_the_core_and_the_package():
    counted = {path: code_lines(path.read_text()) for path in PACKAGE.parent.rglob("*.py")}
    core = sum(
        lines for path, lines in counted.items()
        if path.is_relative_to(PACKAGE) and path != ORACLE
        and path.relative_to(PACKAGE).parts[0].removesuffix(".py") not in AROUND
    )  # fmt: skip
    readme = " ".join((ROOT / "README.md").read_text().split())
    stated = re.search(r"The core is ([\d,]+) code lines of Python, the whole package ([\d,]+)", readme)
    assert stated, "README.md must state the size of the core and of the package"
    for number, actual in zip(stated.groups(), (core, sum(counted.values())), strict=True):
        said = int(number.replace(",", ""))
        assert abs(said - actual) <= TOLERANCE, f"README.md says {said} lines, counted are {actual}: round to hundreds"
