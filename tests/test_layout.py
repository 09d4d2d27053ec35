"""The project's rules for imports and sizes, read from the sources."""

import ast
import collections
import functools
import importlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import planted_faults
import pytest

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / "python"
PACKAGE = PYTHON / "dflash"
HOUSES = ("dflash", "dflash_serve", "dflash_tools")
MODULES = sorted(path for house in HOUSES for path in (PYTHON / house).rglob("*.py"))
FILE_LINES = 800  # one subject per file; the oracle, ops/reference.py, may be longer
LISTS = ("dflash.internals", "dflash.light")
MOST_INTERNALS = 60  # names that the server and the workshop use of the engine
# What stands around the engine's core, and which of the others each may import. The core imports none of them, but
# a generator takes drafters that `loading` has not read yet.
AROUND = {
    "hf": {"loading"},
    "grammar": set(),
    "receipts": {"grammar"},
    "answers": {"receipts"},
    "loading": set(),
    "cli": {"hf", "grammar", "receipts", "loading"},
    "internals": {"grammar", "receipts", "answers", "loading", "cli"},
    "light": {"cli"},
}
DOOR = "fit.py"  # of the core, to loading
USES_TRANSFORMERS = {"targets", "drafter", "hf", "loading", "cli"}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path, typing: bool = True) -> dict[str, set[str]]:
    """Absolute names of the modules that a file imports, with the names taken from each; or not those for types."""
    found: dict[str, set[str]] = {}
    package, body = path.relative_to(PYTHON).parent.parts, parsed(path).body
    if not typing:
        body = [node for node in body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))]
    for node in itertools.chain.from_iterable(map(ast.walk, body)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.setdefault(alias.name, set())
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            name = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found.setdefault(name, set()).update(alias.name for alias in node.names)
    return found


def rooms(path: Path) -> set[str]:
    """Folders and modules of the engine that a file of the engine imports when it runs."""
    names = set()
    for module, taken in imports(path, typing=False).items():
        if module.split(".")[0] == "dflash":
            names |= {module.split(".")[1]} if "." in module else taken
    return names


def test_houses_share_only_what_the_list_of_internals_names():
    paths = [PACKAGE / f"{name.split('.')[1]}.py" for name in LISTS]
    listed = [name for path in paths for taken in imports(path).values() for name in taken]
    assert len(set(listed)) <= MOST_INTERNALS, len(listed)
    used = set()
    for path in MODULES:
        house, where = path.relative_to(PYTHON).parts[0], path.relative_to(PYTHON)
        for module, taken in imports(path).items():
            top = module.split(".")[0]
            if top not in HOUSES or top == house:
                continue
            assert house != "dflash", f"{where} imports {module}"
            assert module in ("dflash", *LISTS), f"{where} imports {module}, not dflash.internals"
            used |= taken if module in LISTS else set()
    assert len(used) >= len(set(listed)), f"{LISTS} have names that nobody uses"


def test_the_core_imports_nothing_that_stands_around_it():
    for path in (path for path in MODULES if path.is_relative_to(PACKAGE)):
        where = path.relative_to(PACKAGE)
        room = where.parts[0].removesuffix(".py")
        assert not any(name.split(".")[0] == "dflash" for name in written(path)), f"{where}: imports are relative"
        if room in ("__init__", "public"):
            continue  # the public names
        others = (rooms(path) & AROUND.keys()) - {room}
        allowed = {"loading"} if str(where) == DOOR else AROUND.get(room, set())
        assert others <= allowed, f"{where} imports {others}"
        assert "_C" not in rooms(path) or room == "ops", f"{where}: only ops imports _C"
        external = {name.split(".")[0] for name in imports(path)} - {"dflash"}
        assert "transformers" not in external or room in USES_TRANSFORMERS, f"{where} imports transformers"
        if path.name == "reference.py":
            assert external <= {"torch", "__future__", "math", "collections"}


def written(path: Path) -> set[str]:
    """The modules that a file imports by absolute names, as it writes them."""
    nodes = [*ast.walk(parsed(path))]
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return names | {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}


def test_a_module_that_moved_is_named():
    for name, new in (("serve", "dflash_serve"), ("train.model", "dflash_tools.train"), ("evaluate", "dflash.loading")):
        with pytest.raises(ModuleNotFoundError, match=f"dflash.{name.split('.')[0]} is now {new}"):
            importlib.import_module(f"dflash.{name}")
    with pytest.raises(ImportError, match="its Recorder is dflash_serve"):
        exec("from dflash.learn import Recorder")


def test_a_file_is_one_subject():
    longer = {path.name: lines for path in MODULES if (lines := path.read_text().count("\n")) > FILE_LINES}
    assert longer.keys() <= {"reference.py"}, longer


def test_one_class_name_is_one_class():
    classes = collections.Counter(
        node.name for path in MODULES for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)
    )
    assert not {name for name, count in classes.items() if count > 1}


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


def test_what_stands_outside_imports_names_that_exist():
    for path in (path for folder in ("bench", "recipes", "docs") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in HOUSES:
                module = importlib.import_module(node.module)
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, f"{path.relative_to(ROOT)}: {node.module} has no {missing}"


def test_every_house_says_that_it_is_typed():
    assert all((PYTHON / house / "py.typed").is_file() for house in HOUSES)
