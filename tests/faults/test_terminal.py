"""Names and texts that hold control characters never steer the terminal."""

import unicodedata

import pytest

from dflash.terminal import printable

HOSTILE = "a\x1b]0;title\x07b\rc\x08d\x9b31me\u202ef\u2066g\u2028h\ud800i\x00j\nk"


def test_control_characters_become_escapes():
    shown = printable(HOSTILE)
    assert shown == r"a\x1b]0;title\x07b\rc\x08d\x9b31me\u202ef\u2066g\u2028h\ud800i\x00j\nk"
    assert printable(shown) == shown
    assert all(unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp") for character in shown)


@pytest.mark.parametrize("text", ["plain", "naïve café", "中文", "हिन्दी", "עברית", "👩‍👩‍👧", "a\\nb", ""])
def test_text_without_control_characters_stays_as_it_is(text):
    assert printable(text) == text


def test_line_breaks_of_a_longer_text_can_be_kept():
    assert printable("a\n\tb\x1b[2J", keep="\n\t") == "a\n\tb\\x1b[2J"
