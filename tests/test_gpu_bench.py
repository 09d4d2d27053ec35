"""What ``bench/gpu`` makes of the results of a GPU machine: the page."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench" / "gpu"
FACTS = {
    "machine": "a GPU",
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "transformers": "5.17.0",
    "commit": "abc",
}
ROW = {
    "runner": "fused", "context": 1024, "batch": 1, "accepted": 6, "rounds": 3, "step_ms": 5.0, "floor_share": 0.87,
    "floor_4300_share": 0.9, "host_us": None, "kernels": None,
}  # fmt: skip


@pytest.fixture
def page_module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import page

    yield page
    sys.modules.pop("page")


def write(path, rows, **facts):
    facts = FACTS | {"model": "qwen3-8b", "left_out": [], "overlap": True, "prefetch": True} | facts
    path.write_text(json.dumps(facts | {"rows": rows}))


def test_the_page_has_the_newest_row_and_what_was_left_out(page_module, tmp_path):
    left_out = [{"runner": "compiled", "context": 1024, "batch": 1, "why": "it took too long"}]
    write(
        tmp_path / "step-1k-20261101-120000.json", [ROW | {"step_ms": 9.0}, ROW | {"runner": "graph", "step_ms": 8.0}]
    )
    write(tmp_path / "step-1k-20261102-110000.json", [ROW], left_out=left_out)
    page_module.main(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| 1024 | 1 | 6 | fused | 5.000 | 87 % | 90 % | - | - | 3 | abc |" in page
    assert "9.000" not in page
    assert "| graph | 8.000 |" in page
    assert "- compiled at context 1024, batch 1: it took too long" in page
    assert "| a GPU | 580.1 | 13.0 | 2.11.0 | 5.17.0 | abc | 2 |" in page


def test_the_page_names_the_tests_that_failed_and_counts_those_that_did_not_run(page_module, tmp_path):
    def line(test, outcome, why=""):
        return {"test": f"tests/{test}", "outcome": outcome, "why": why}

    lines = [
        {
            "tests": [
                f"tests/{name}" for name in ("a.py::right", "a.py::wrong", "a.py::left_out", "b.py::one", "b.py::two")
            ]
        },
        line("a.py::right", "passed"),
        line("a.py::wrong", "failed", "    def wrong():\nE   CUDA error: misaligned address\n\na.py:7: RuntimeError"),
        line("a.py::wrong", "failed", "worker 'gw0' crashed"),
        line("a.py::left_out", "skipped"),
    ]
    half = '\n{"test": "tests/b.py::one", "out'  # written when the machine went
    (tmp_path / "tests-20261101-120000.jsonl").write_text("\n".join(map(json.dumps, lines)) + half)
    page_module.main(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "1 passed, 1 failed, 1 skipped, 2 did not run" in page
    assert "- `tests/a.py::wrong`: CUDA error: misaligned address" in page
    assert "- `tests/b.py`: 2 did not run" in page


# In the place of every command that run.sh calls on a GPU machine: writes the call down.
STAND_IN = """#!/bin/sh
name=$(basename "$0")
echo "$name ${PYTORCH_NO_CUDA_MEMORY_CACHING:+uncached }${PYTHONPATH:-} $*" >>"$CALLS"
case "$name $*" in
  nvidia-smi*compute_cap*) echo 9.0 ;;
  cmake*--build*) mkdir -p "$2" && touch "$2/_C.so" ;;
  nvcc*) for last; do case $before in -o) cp /bin/true "$last" ;; esac; before=$last; done ;;
  "$FAILS"*) exit 3 ;;
esac
"""


class GpuMachine:
    """A tree with run.sh and no GPU, in which every command is a stand-in."""

    def __init__(self, folder):
        self.root, self.tools, self.out = folder / "tree", folder / "tools", folder / "tree" / "out"
        (self.root / "bench" / "gpu").mkdir(parents=True)
        shutil.copy(BENCH / "run.sh", self.root / "bench" / "gpu")
        for name in ("csrc/kernel.cu", "python/dflash/__init__.py", "CMakeLists.txt"):
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        self.tools.mkdir()
        for name in ("python3", "nvidia-smi", "cmake", "nvcc", "ncu", "compute-sanitizer"):
            (self.tools / name).write_text(STAND_IN)
            (self.tools / name).chmod(0o755)

    def run(self, *arguments, fails="nothing"):
        """Run run.sh; returns its exit code and the calls."""
        calls = self.root.parent / "calls"
        calls.write_text("")
        tools = {"PATH": f"{self.tools}:/usr/bin:/bin", "CALLS": calls, "FAILS": fails}
        command = ["bash", self.root / "bench" / "gpu" / "run.sh", "--out", self.out, "--commit", "abc", *arguments]
        environment = {name: str(value) for name, value in (os.environ | tools).items() if name not in ENVIRONMENT}
        code = subprocess.run(list(map(str, command)), env=environment, capture_output=True).returncode
        return code, calls.read_text().splitlines()

    def outcomes(self):
        """The last line about each stage."""
        lines = [line.split("\t") for path in sorted(self.out.glob("stages-*.tsv")) for line in path.open()]
        return {stage: outcome.strip() for stage, *_, outcome in lines}


ENVIRONMENT = ("CUDACXX", "PYTHONPATH")


@pytest.fixture
def machine(tmp_path):
    return GpuMachine(tmp_path)


def test_every_stage_runs_and_one_build_serves_all(machine):
    code, calls = machine.run()
    assert code == 0
    assert len([call for call in calls if "cmake" in call and " --build " in call]) == 1
    outcomes = machine.outcomes()
    assert len(outcomes) == 8
    assert all(outcome.endswith("; ok") for outcome in outcomes.values())
    assert len([call for call in calls if call.startswith("compute-sanitizer uncached")]) == 3
    (profiled,) = [call for call in calls if call.startswith("ncu")]
    assert "-k regex:dflash:: --filter-mode per-launch-config" in profiled
    assert all("build/gpu/plain/python" in call for call in calls if "-m pytest" in call or "bench/step" in call)


def test_what_fails_is_named_and_what_follows_runs(machine):
    code, _ = machine.run("overlap", "probe", fails="python3")
    assert code == 1
    assert machine.outcomes()["overlap"].endswith("overlap0-prefetch0: exit code 3")
    assert machine.outcomes()["probe"].endswith("; ok")
