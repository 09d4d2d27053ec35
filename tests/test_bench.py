"""The benches of the ops: one a stem, and all of them run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from dflash import ops

BENCH = Path(__file__).parents[1] / "bench"
STEMS = {name.rstrip("_") for name in ops.__all__ if hasattr(torch.ops.dflash, name)}


def test_every_op_has_a_bench_of_its_stem():
    assert {"rms_norm", "accept_prefix", "block_attention"} <= STEMS
    on_harness = {path.stem for path in BENCH.glob("bench_*.py") if "from harness import" in path.read_text()}
    assert on_harness == {f"bench_{stem}" for stem in STEMS}


def test_all_of_them_run_and_leave_their_rows(tmp_path):
    rows_file = tmp_path / "rows.json"
    command = [sys.executable, BENCH / "bench_all.py", "--quick", "--threads", "1", "--json", rows_file]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    written = json.loads(rows_file.read_text())
    assert written["isa"] == ops.isa()
    assert written["threads"] == 1
    assert written["torch"] == torch.__version__
    rows = written["rows"]
    assert {row["op"] for row in rows} == STEMS
    assert len({(row["op"], row["shape"], row["dtype"]) for row in rows}) == len(rows)
    for row in rows:
        assert row["us"] > 0
        assert row["gb_s"] > 0
        assert row["peers_us"][row["peer"]] == min(row["peers_us"].values())
    assert len(done.stdout.splitlines()) == 1 + len(rows)


def test_a_device_that_is_not_there_is_named():
    command = [sys.executable, BENCH / "bench_rms_norm.py", "--quick", "--device", "cuda"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False
    )
    assert done.returncode == 2
    assert "sees no GPU" in done.stderr
