"""What ``bench/gpu`` makes of the results of a GPU machine: the page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "bench" / "gpu"
FACTS = {"machine": "a GPU", "driver": "580.1", "cuda": "13.0", "torch": "2.11.0", "transformers": "5.17.0"}
FACTS |= {"commit": "abc"}
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


def test_lines_survive_a_test_that_hangs_and_one_that_breaks_the_gpu(tmp_path):
    (tmp_path / "test_it.py").write_text(FAULTY_TESTS)
    lines = tmp_path / "lines.jsonl"
    plugin = ["-p", "bench.gpu.pytest_lines", "--lines", lines, "--test-seconds", "3", "-n", "1"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    names, *ended = map(json.loads, lines.read_text().splitlines())
    assert [name.split("::")[1] for name in names["tests"]] == ["test_breaks", "test_after", "test_hangs", "test_last"]
    outcomes = {(line["test"].split("::")[1], line["outcome"]) for line in ended}
    expected = {("test_breaks", "failed"), ("test_after", "passed"), ("test_hangs", "failed"), ("test_last", "passed")}
    assert outcomes == expected, done.stdout
    assert "the kernel is wrong" in ended[0]["why"]


FAULTY_TESTS = """
import sys, time, types

def synchronize():
    if is_broken:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

is_broken = False
sys.modules["torch"] = types.SimpleNamespace(
    cuda=types.SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
)

def test_breaks():
    global is_broken
    is_broken = True
    raise AssertionError("the kernel is wrong")

def test_after():
    synchronize()

def test_hangs():
    time.sleep(600)

def test_last():
    pass
"""
