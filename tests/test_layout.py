"""The house's import rules, read from the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "dflash"
MODULES = sorted(PACKAGE.rglob("*.py"))
# Folders and modules of the package from the lowest to the highest; each imports only from its own row or a lower one.
ORDER = [
    ["_C"],
    ["ops"],
    ["cache", "decoder", "files", "progress"],
    ["drafter", "target"],
    ["proposers", "sampling"],
    ["call", "fit", "outputs", "streaming"],
    ["engine"],
    ["generator"],
    ["api"],
    ["hf", "evaluate"],
    ["train"],
    ["cli", "serve"],
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Top-level packages that a module imports anywhere, and folders or modules of the package itself."""
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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).with_suffix("").as_posix())
def test_imports_run_downward(path):
    external, internal = imports(path)
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if path.stem in ("__init__", "__main__") and (name == "__init__" or path.stem == "__main__"):
        return  # the public names, and commands
    assert all(LEVEL[other] <= LEVEL[name] for other in internal), internal
    if "_C" in internal:
        assert name == "ops"
    if "transformers" in external:
        assert name in {"target", "hf", "evaluate", "train", "cli"}
    if path.name == "reference.py":
        assert external <= {"torch", "__future__", "math", "collections"}


def test_csrc_includes_no_torch():
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cuh", ".cpp", ".cu"}]
    assert sources
    for path in sources:
        for line in path.read_text().splitlines():
            if line.startswith("#include"):
                assert not any(word in line for word in ("torch", "ATen", "c10")), f"{path}: {line}"


def test_cmake_lists_stay_short():
    assert len((ROOT / "CMakeLists.txt").read_text().splitlines()) < 120


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
