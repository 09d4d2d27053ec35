"""The house's import rules, read from the sources."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "python" / "dflash"
MODULES = sorted(PACKAGE.rglob("*.py"))
# Which modules of the package each module may import.
MAY_IMPORT = {
    "reference": set(),
    "ops": {"_C", "reference"},
    "cache": {"ops"},
    "sampling": {"ops", "reference"},
    "rules": set(),
    "layouts": set(),
    "config": {"layouts"},
    "sharpness": set(),
    "denoise": set(),
    "rejection": {"reference", "sampling"},
    "replay": set(),
    "fused": {"ops", "cache"},
    "drafter": {"ops", "cache", "config", "fused"},
    "target": {"ops", "cache", "fused"},
    "streaming": set(),
    "generate": {
        "ops",
        "cache",
        "sampling",
        "denoise",
        "rejection",
        "replay",
        "rules",
        "sharpness",
        "drafter",
        "config",
        "target",
        "streaming",
    },
    "files": set(),
    "shell": set(),
    "progress": set(),
    "prompts": {"files"},
    "demo": {"drafter", "files", "generate", "prompts", "streaming"},
    "benchmark": {"ops", "drafter", "files", "generate", "progress", "prompts", "target"},
    "doctor": {"ops", "replay"},
    "loading": set(),
    "doors": {"cache", "drafter", "generate", "streaming", "target"},
    "__init__": {"config", "demo", "doors", "drafter", "generate", "sampling", "target", "ops"},
}


def imports(path: Path) -> tuple[set[str], set[str]]:
    """Top-level packages that a module imports anywhere, and modules of the package itself."""
    external, internal = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            external.update(alias.name.split(".")[0] for alias in node.names)
            internal.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("dflash."))
        elif isinstance(node, ast.ImportFrom):
            inside = node.level > 0 or (node.module or "").split(".")[0] == "dflash"
            if not inside:
                external.add(node.module.split(".")[0])
                continue
            parts = (node.module or "").removeprefix("dflash").strip(".").split(".")
            internal.update([parts[0]] if parts[0] else [alias.name for alias in node.names])
    return external, internal


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_run_one_way(path):
    external, internal = imports(path)
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert "cli" not in internal, "nothing imports the command line"
    assert "doctor" not in internal or name == "cli"
    if "_C" in internal:
        assert name == "ops"
    if "transformers" in external:
        assert name in {"target", "cli", "demo", "loading", "train"}
    if name == "reference":
        assert external <= {"torch", "__future__", "math"}
    if name in MAY_IMPORT:
        assert internal <= MAY_IMPORT[name]
    else:
        assert name in {"cli", "train"}, f"{name} has no import rule"


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
