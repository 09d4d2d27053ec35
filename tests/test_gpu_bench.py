"""What ``bench/gpu`` makes of the results of a GPU machine: the page and the timeline."""

import json
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[1] / "bench" / "gpu"
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
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import page
    import timeline

    yield page, timeline
    for name in ("page", "timeline"):
        sys.modules.pop(name)


def write(path, rows, **facts):
    facts = FACTS | {"model": "qwen3-8b", "left_out": [], "overlap": True, "prefetch": True} | facts
    path.write_text(json.dumps(facts | {"rows": rows}))


def test_the_page_has_the_newest_row_and_what_was_left_out(modules, tmp_path):
    left_out = [{"runner": "compiled", "context": 1024, "batch": 1, "why": "it took too long"}]
    write(
        tmp_path / "step-1k-20261101-120000.json", [ROW | {"step_ms": 9.0}, ROW | {"runner": "graph", "step_ms": 8.0}]
    )
    write(tmp_path / "step-1k-20261102-110000.json", [ROW], left_out=left_out)
    modules[0].main(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "| 1024 | 1 | 6 | fused | 5.000 | 87 % | 90 % | - | - | 3 | abc |" in page
    assert "9.000" not in page
    assert "| graph | 8.000 |" in page
    assert "- compiled at context 1024, batch 1: it took too long" in page
    assert "| a GPU | 580.1 | 13.0 | 2.11.0 | 5.17.0 | abc | 2 |" in page


def test_the_page_compares_overlap_and_says_where_it_was_not_active(modules, tmp_path):
    write(tmp_path / "overlap1-prefetch1-20261101-120000.json", [ROW])
    write(tmp_path / "overlap1-prefetch0-20261101-120100.json", [ROW | {"step_ms": 5.5}], prefetch=False, overlap=False)
    write(tmp_path / "overlap0-prefetch0-20261101-120200.json", [ROW | {"step_ms": 6.0}], prefetch=False, overlap=False)
    modules[0].main(tmp_path)
    page = (tmp_path / "README.md").read_text()
    for line in ("| on | on | 5.000 |", "| asked for, not active | off | 5.500 |", "| off | off | 6.000 |"):
        assert line in page


def test_the_page_names_the_tests_that_failed(modules, tmp_path):
    right, wrong = (f'<testcase classname="tests.a" name="{name}">' for name in ("right", "wrong[cuda]"))
    cases = f"<testsuite>{right}</testcase>{wrong}<failure/></testcase></testsuite>"
    (tmp_path / "tests-20261101-120000.xml").write_text(cases)
    modules[0].main(tmp_path)
    page = (tmp_path / "README.md").read_text()
    assert "1 passed, 1 failed, 0 skipped" in page
    assert "- `tests.a::wrong[cuda]`" in page


def test_records_are_put_together_by_launch(modules):
    timeline = modules[1]
    records = list(timeline.made_up())
    shuffled = [records[i] for i in torch.randperm(len(records), generator=torch.Generator().manual_seed(0)).tolist()]
    assert timeline.unpack(timeline.pack(shuffled)) == shuffled
    found = timeline.launches(shuffled)
    assert [launch.kernel for launch in found] == ["linear_kernel", "block_attention_kernel"] * 3
    assert [len(launch.blocks) for launch in found] == [240, 40] * 3
    layer = timeline.one_layer(found, 1)
    assert [launch.kernel for launch in layer] == ["block_attention_kernel", "linear_kernel", "block_attention_kernel"]


def test_a_buffer_that_was_too_small_gives_the_records_it_holds(modules):
    timeline = modules[1]
    records = list(timeline.made_up())[:3]
    buffer = timeline.pack(records)
    buffer[0] = 70
    assert timeline.unpack(buffer) == records
