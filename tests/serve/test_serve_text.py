"""An answer's text as a client sees it, however its pieces are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import cut

from dflash_serve.answer_text import AnswerText
from dflash_serve.reasoning import REASONING_FORMS

THINK = REASONING_FORMS["think"]


def shown(pieces, *stop: str, **options) -> tuple[str, str]:
    text = AnswerText(stop, **options)
    deltas = [text.push(piece, is_last=is_last) for piece, is_last in pieces]
    return "".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas)


CASES = [
    ("<think>\nwhy < not\n</think>\n\nSo.", {"form": THINK}, ("So.", "why < not\n")),
    ("\n<think>a</think>b</think>", {"form": THINK}, ("b</think>", "a")),
    ("why</think> So.", {"form": THINK, "is_thinking": True}, ("So.", "why")),
    ("why </thin", {"form": THINK, "is_thinking": True}, ("", "why </thin")),
    ("  plain <think>x</think>", {"form": THINK}, ("  plain <think>x</think>", "")),
    ("<thi", {"form": THINK}, ("<thi", "")),
    ("<think>a</think>b", {}, ("<think>a</think>b", "")),
]


@pytest.mark.parametrize(("text", "options", "expected"), CASES)
@given(places=st.lists(st.integers(0, 30), max_size=30))
def test_reasoning_is_split_off_wherever_pieces_end(text, options, expected, places):
    assert shown(cut(text, places), **options) == expected


def test_text_ends_before_the_first_stop_string():
    assert shown(cut("abcd, ef. g", [2, 7]), ". ", ", ") == ("abcd", "")
    assert shown(cut("<think>a, b</think>", [11]), ", ", form=THINK) == ("", "a")


def test_what_was_shown_already_is_not_taken_back():
    """A decoder holds back what may begin a stop string; if one does not, only the rest is dropped."""
    assert shown(cut("one STOP two", [6]), "STOP") == ("one ST", "")


def test_text_is_shown_as_soon_as_it_is_final():
    text = AnswerText((), form=THINK, is_thinking=True)
    assert text.push("because </", is_last=False).reasoning == "because "
    assert text.push("b>", is_last=False).reasoning == "</b>"
