"""JSON of unknown origin is parsed, or refused in words that say where it stands and what is wrong with it."""

import json

import pytest

from dflash.files import parse_json


@pytest.mark.parametrize(("text", "words"), [
    ("[" * 100_000, "recursion"),
    ('{"a":' * 100_000 + "1" + "}" * 100_000, "recursion"),
    (f'{{"a": {"9" * 5000}}}', "digits"),
    ('{"a": "\\ud83d"}', "surrogates not allowed"),
    ('{"\\uDE00": 1}', "surrogates not allowed"),
    (b"\xff\xfe{\x00}\x00", "utf-8"),
    ('{"a": "\x1b[2J"}', "control character"),
    ("", "Expecting value"),
])  # fmt: skip
def test_json_that_cannot_be_read_is_refused_with_its_place(text, words):
    with pytest.raises(ValueError, match=rf"^here: not JSON that can be read: .*{words}"):
        parse_json(text, "here")


@pytest.mark.parametrize("value", ["😀", "한국어", 10**400])
def test_what_only_looks_broken_is_read(value):
    for ascii_only in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only), "here", unique_keys=True) == value
    assert parse_json(json.dumps(value).encode(), "here") == value


def test_a_key_that_is_there_twice_is_refused_where_keys_must_be_unique():
    text = '{"outer": {"a": 1, "a\\u001b": 2, "a\\u001b": 3}}'
    assert parse_json(text, "here") == {"outer": {"a": 1, "a\x1b": 3}}
    with pytest.raises(ValueError, match=r"the key 'a\\x1b' is there twice"):
        parse_json(text, "here", unique_keys=True)
