"""The text of an answer as a client sees it: without the stop string, and with the reasoning apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..streaming import open_suffix
from .calls import CallPiece
from .logprobs import ShownToken

__all__ = ["AnswerText", "Delta"]

OPEN, CLOSE = "<think>", "</think>"


class Delta(NamedTuple):
    """Text that is new and final, and its tokens if their log probabilities are asked for."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    tokens: Sequence[ShownToken] = ()


class AnswerText:
    """Splits an answer while it grows.

    Args:
        stop: strings that end the answer and are no part of it.
        thinks: the model writes its reasoning between ``<think>`` and ``</think>``, at the answer's beginning.
        is_thinking: the prompt ends with ``<think>``.

    Attributes:
        is_stopped: a stop string was met. What follows is dropped.
        length: characters before a stop string so far, reasoning and its marks included.
    """

    def __init__(self, stop: Sequence[str] = (), *, thinks: bool = False, is_thinking: bool = False) -> None:
        self._stop, self._longest = stop, max(map(len, stop), default=1)
        self.is_stopped, self.length = False, 0
        self._tail = ""  # the end of the text so far, where a stop string may have begun
        self._mark = (CLOSE if is_thinking else OPEN) if thinks else None  # looked for
        self._held = ""  # may be the beginning of the mark
        self._is_blank = thinks  # spaces at the beginning of a part are dropped

    def push(self, piece: str, *, is_last: bool) -> Delta:
        """Add a piece of the answer; return what can be shown."""
        piece = self._before_stop(piece)
        self._held, self.length = self._held + piece, self.length + len(piece)
        is_last = is_last or self.is_stopped
        if self._mark == OPEN:
            self._look_for_reasoning(is_last)
        if self._mark == OPEN:
            return Delta()
        if self._mark is None:
            return Delta(content=self._shown(len(self._held)))
        before, mark, _ = self._held.partition(CLOSE)
        if not mark:
            return Delta(reasoning=self._shown(len(before) - (0 if is_last else open_suffix(before, [CLOSE]))))
        reasoning = self._shown(len(before))
        self._held, self._mark, self._is_blank = self._held.removeprefix(CLOSE), None, True
        return Delta(self._shown(len(self._held)), reasoning)

    def _before_stop(self, piece: str) -> str:
        """Return what of a piece comes before a stop string. One that began in earlier pieces was held back there."""
        if self.is_stopped:
            return ""
        if not self._stop:
            return piece
        text, old = self._tail + piece, len(self._tail)
        found = [at for string in self._stop if (at := text.find(string)) >= 0]
        self._tail = text[len(text) - min(len(text), self._longest - 1) :]
        if not found:
            return piece
        self.is_stopped = True
        return text[old : max(old, min(found))]

    def _look_for_reasoning(self, is_last: bool) -> None:
        """Decide whether the answer begins with reasoning, as soon as its text shows it."""
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._held, self._mark = text.removeprefix(OPEN), CLOSE
        elif is_last or not OPEN.startswith(text):
            self._mark, self._is_blank = None, False  # all is content, leading spaces too

    def _shown(self, end: int) -> str:
        """Take the first ``end`` characters that are held."""
        text, self._held = self._held[:end], self._held[end:]
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text
