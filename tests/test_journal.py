"""The journal of finished work: what was appended is read again, and nothing else is."""

import json

import pytest

from dflash.evaluate import Journal

ROWS = [{"row": 1}, {"row": 2}]


def write(path, *records, settings=None) -> bytes:
    with Journal(path, settings) as journal:
        journal.append(records)
    return path.read_bytes()


def read(path, settings=None) -> list:
    with Journal(path, settings) as journal:
        return [record for _, record in journal.read()]


@pytest.mark.parametrize("settings", [None, {"seed": 1}])
def test_what_was_appended_is_read_again(tmp_path, settings):
    path = tmp_path / "x.jsonl"
    write(path, ROWS[0], settings=settings)
    before = write(path, ROWS[1], settings=settings)
    assert read(path, settings) == ROWS
    assert path.read_bytes() == before
    assert before.count(b"\n") == 2 + (settings is not None)


@pytest.mark.parametrize("torn", [b'{"row": ', b"\xc3", b'{"row": 3}'])
def test_a_line_that_was_cut_short_is_overwritten_by_the_next(tmp_path, torn):
    path = tmp_path / "x.jsonl"
    before = write(path, ROWS[0], settings={"seed": 1})
    path.write_bytes(before + torn)
    assert read(path, {"seed": 1}) == ROWS[:1]
    assert path.read_bytes() == before + torn, "reading changes nothing"
    assert write(path, ROWS[1], settings={"seed": 1}) == before + json.dumps(ROWS[1]).encode() + b"\n"


def test_other_settings_are_named(tmp_path):
    path = tmp_path / "x.jsonl"
    before = write(path, ROWS[0], settings={"seed": 1, "padded": False})
    with pytest.raises(ValueError, match=r"written with seed 1, now 2, padded False, now None, raw None, now True:"):
        read(path, {"seed": 2, "raw": True})
    assert path.read_bytes() == before


def test_a_file_that_stays_empty_is_removed(tmp_path):
    assert read(tmp_path / "x.jsonl", {"seed": 1}) == []
    assert not list(tmp_path.iterdir())


def test_two_processes_do_not_write_one_file(tmp_path):
    path = tmp_path / "x.jsonl"
    with Journal(path) as journal:
        with pytest.raises(ValueError, match=r"x\.jsonl is being written by another process"), Journal(path):
            pass
        journal.append(ROWS)
    assert read(path) == ROWS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"settings": \n{}\n', r"x\.jsonl, line 1: not JSON"),
        (b'{"settings": {}}\n{"row":\n', r"x\.jsonl, line 2: not JSON"),
        (b'["settings"]\n', r"x\.jsonl, line 1: must hold the settings of the run"),
        (b"\xff\n", r"x\.jsonl, line 1: not JSON"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, content, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(path, {})
    assert path.read_bytes() == content


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"there is no folder .*no' to write x\.jsonl into"):
        read(tmp_path / "no" / "x.jsonl")
