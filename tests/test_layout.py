"""The project's rules for imports and sizes, read from the sources."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "dflash"
MODULES = sorted(PACKAGE.rglob("*.py"))
SIZED = [*MODULES, *sorted((ROOT / "bench").rglob("*.py")), *sorted((ROOT / "docs").rglob("*.py"))]
FILE_LINES, FUNCTION_LINES = 400, 40  # the oracle, ops/reference.py, may be a longer file
# Folders and modules of the package from the lowest to the highest; each imports only from its own row or a lower one.
ORDER = [
    ["_C"],
    ["ops"],
    ["cache", "decoder", "files", "limits", "progress", "terminal", "tree", "weight_files"],
    ["drafter", "targets"],
    ["proposers", "sampling"],
    ["call", "fit", "options", "outputs", "prompts", "streaming", "turns"],
    ["engine"],
    ["generator"],
    ["session"],
    ["api"],
    ["receipts"],
    ["hf", "evaluate"],
    ["doctor"],
    ["train"],
    ["cli", "serve"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def short(path: Path) -> str:
    """The path of a file, as a test's id."""
    return path.relative_to(ROOT).with_suffix("").as_posix().removeprefix("python/dflash/")


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of lines of a function's body without its docstring."""
    statements = function.body[ast.get_docstring(function) is not None :]
    return function.end_lineno - statements[0].lineno + 1 if statements else 0


def imports(path: Path) -> tuple[set[str], set[str], set[str]]:
    """Top-level packages that a module imports, folders or modules of this package, and files inside its folders."""
    external, internal, files = set(), set(), set()
    package = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            external.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            external.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            base = [part for part in base if part]
            internal.update([base[0]] if base else [alias.name for alias in node.names])
            files.update([".".join(base)] if len(base) > 1 else [])
    return external, internal, files


@pytest.mark.parametrize("path", MODULES, ids=short)
def test_imports_run_downward(path):
    external, internal, files = imports(path)
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert "dflash" not in external, "imports inside the package are relative"
    if path.stem in ("__init__", "__main__") and (name == "__init__" or path.stem == "__main__"):
        return  # the public names, and commands
    assert all(LEVEL[other] <= LEVEL[name] for other in internal), internal
    # evaluate, serve and train need extras, file by file; any other folder exports what the rest uses.
    assert all(file.split(".")[0] in {name, "evaluate", "serve", "train"} for file in files), files
    if "_C" in internal:
        assert name == "ops"
    if "transformers" in external:
        assert name in {"targets", "hf", "evaluate", "train", "cli"}
    if path.name == "reference.py":
        assert external <= {"torch", "__future__", "math", "collections"}


@pytest.mark.parametrize("path", SIZED, ids=short)
def test_files_and_functions_stay_short(path):
    source = path.read_text()
    lines = source.count("\n")
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    too_long = {f"{f.name}:{f.lineno}": body_lines(f) for f in functions if body_lines(f) > FUNCTION_LINES}
    assert path.name == "reference.py" or lines <= FILE_LINES
    assert not too_long


def test_csrc_includes_no_torch():
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cuh", ".cpp", ".cu"}]
    assert sources
    for path in sources:
        for line in path.read_text().splitlines():
            if line.startswith("#include"):
                assert not any(word in line for word in ("torch", "ATen", "c10")), f"{path}: {line}"


def test_cmake_lists_stay_short():
    assert len((ROOT / "CMakeLists.txt").read_text().splitlines()) < 120


def test_contributing_names_every_file_of_the_package():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    names = {path.name for path in MODULES} - {"__init__.py", "__main__.py"}
    assert not {name for name in names if not re.search(rf"[`/]{name}`", text)}


def test_slow_names_tests_that_exist():
    for line in (ROOT / "tests" / "slow.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            path, *names = line.split("[")[0].split("::")
            source = (ROOT / path).read_text()
            assert all(re.search(rf"^ *(class|def) {name}\b", source, re.MULTILINE) for name in names), line


def test_the_import_warns_of_the_other_distribution(tmp_path):
    other = tmp_path / "dflash-0.1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: dflash\nVersion: 0.1.0\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = "import sys; sys.path.append(sys.argv[1]); import dflash"
    for path, warned in ((tmp_path, True), (elsewhere, False)):
        command = [sys.executable, "-c", code, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=elsewhere)
        assert ("dflash and dflash-engine are both installed" in done.stderr) == warned
