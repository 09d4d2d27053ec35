"""The project's rules for imports and sizes, read from the sources."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import planted_faults

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "dflash"
MODULES = sorted(PACKAGE.rglob("*.py"))
FILE_LINES = 800  # one subject per file; the oracle, ops/reference.py, may be longer
# The packages around the core, and which of the others each may import. The core imports none of them.
AROUND = {
    "hf": set(),
    "grammar": set(),
    "receipts": {"grammar"},
    "evaluate": set(),
    "doctor": {"evaluate"},
    "serve": {"evaluate", "grammar", "receipts"},
    "train": {"evaluate"},
    "learn": {"receipts", "serve", "train"},
    "cli": {"hf", "grammar", "receipts", "evaluate", "doctor", "serve", "train", "learn"},
}
USES_TRANSFORMERS = {"targets", "drafter", "hf", "evaluate", "train", "cli"}


def room(path: Path) -> str:
    """The folder or module of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Top-level packages that a module imports, and folders or modules of this package."""
    external, internal = set(), set()
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
    return external, internal


def test_the_core_imports_no_package_around_it():
    for path in MODULES:
        external, internal = imports(path)
        name, where = room(path), path.relative_to(PACKAGE)
        assert "dflash" not in external, f"{where}: imports inside the package are relative"
        if name in ("__init__", "public") or path.name == "__main__.py":
            continue  # the public names, and commands
        others = (internal & AROUND.keys()) - {name}
        assert others <= AROUND.get(name, set()), f"{where} imports {others}"
        assert "_C" not in internal or name == "ops", f"{where}: only ops imports _C"
        assert "transformers" not in external or name in USES_TRANSFORMERS, f"{where} imports transformers"
        if path.name == "reference.py":
            assert external <= {"torch", "__future__", "math", "collections"}


def test_a_file_is_one_subject():
    longer = {path.name: lines for path in MODULES if (lines := path.read_text().count("\n")) > FILE_LINES}
    assert longer.keys() <= {"reference.py"}, longer


def test_csrc_includes_no_torch():
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cuh", ".cpp", ".cu"}]
    assert sources
    for path in sources:
        for line in path.read_text().splitlines():
            if line.startswith("#include"):
                assert not any(word in line for word in ("torch", "ATen", "c10")), f"{path}: {line}"


def test_lists_of_tests_name_tests_that_exist():
    for line in [
        line for name in ("slow", "full") for line in (ROOT / "tests" / f"{name}.txt").read_text().splitlines()
    ]:
        if line and not line.startswith("#"):
            path, *names = line.split("[")[0].split("::")
            source = (ROOT / path).read_text()
            assert all(re.search(rf"^ *(class|def) {name}\b", source, re.MULTILINE) for name in names), line


def test_faults_can_be_planted():
    assert not planted_faults.stale(planted_faults.FAULTS, PACKAGE)
    named = {name for fault in planted_faults.FAULTS for name in fault.tests}
    for path, *names in (name.split("::") for name in named):
        source = (ROOT / "tests" / path).read_text()
        assert all(re.search(rf"^ *(class|def) {name}\b", source, re.MULTILINE) for name in names), (path, names)


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
