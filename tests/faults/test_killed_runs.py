"""A run that is killed, or finds the disk full, continues from what it had written: training, its files, learning."""

import os
import stat
from pathlib import Path

import process
import pytest
from examples import examples

from dflash_tools.train.regenerate import check_out

PROGRAM = (Path(__file__).parent / "killed_runs.py").read_text()
LEARNERS = (Path(__file__).parent / "killed_learners.py").read_text()
WORKS = 3  # regenerate, train, export


@pytest.mark.long
@pytest.mark.parametrize("fault", ["killed", "limited"])
def test_a_run_that_continues_after_a_fault_writes_the_same_files(fault, tmp_path):
    """Kills come before any operation on files, and at any time. The disk is full after any number of bytes."""
    count = min(examples(3).max_examples, 40)  # an attempt is several runs
    done = process.python(PROGRAM, fault, tmp_path, count, seconds=240 * count)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the same"] * (WORKS * count)


@pytest.mark.long
def test_servers_and_learners_that_are_killed_lose_no_answer(tmp_path):
    """Two of each per folder, killed at any moment 20 times. Then a server and a learner end their work."""
    folders = min(examples(1).max_examples, 10)
    done = process.python(LEARNERS, tmp_path, folders, seconds=600 * folders)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "nothing is lost\n"


def test_an_output_that_is_not_a_regular_file_is_refused_and_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder"):
        with pytest.raises(ValueError, match=f"{name} is not a regular file: name another"):
            check_out(tmp_path / name)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert len(list(tmp_path.iterdir())) == 3
