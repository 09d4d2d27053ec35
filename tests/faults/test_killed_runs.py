"""A run of train, regenerate or export that is killed, or finds the disk full, continues from what it had written."""

import os
import stat
from pathlib import Path

import process
import pytest
from examples import examples

from dflash_tools.train.regenerate import check_out

PROGRAM = (Path(__file__).parent / "killed_runs.py").read_text()
WORKS = 3  # regenerate, train, export


@pytest.mark.long
@pytest.mark.parametrize("fault", ["killed", "limited"])
def test_a_run_that_continues_after_a_fault_writes_the_same_files(fault, tmp_path):
    """Kills come before any operation on files, and at any time. The disk is full after any number of bytes."""
    count = min(examples(3).max_examples, 40)  # an attempt is several runs
    done = process.python(PROGRAM, fault, tmp_path, count, seconds=240 * count)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the same"] * (WORKS * count)


def test_an_output_that_is_not_a_regular_file_is_refused_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder"):
        with pytest.raises(ValueError, match=f"{name} is not a regular file: name another"):
            check_out(tmp_path / name)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 3
