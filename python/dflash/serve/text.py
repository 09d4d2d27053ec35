"""The text of an answer, split while it grows into reasoning, content and tool calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..streaming import open_suffix
from .logprobs import ShownToken

_HEAD = re.compile(r'\s*\{"name": "([^"]*)", "arguments":\s*')


class CallPiece(NamedTuple):
    """What is new of a tool call: JSON text of its arguments; in its first piece, the function's name and an id."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None


class CallText:
    """Splits calls off a text whose grammar lets nothing else follow ``begin``, the mark that begins one.

    ``begin`` is empty if the whole text is calls; ``end`` follows a call's JSON object. ``is_whole``: there is a call,
    and the last is complete.
    """

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin, "}" + end
        self.calls: list[dict[str, Any]] = []
        self.is_whole = False
        self._held, self._is_blank = "", False
        self._advance = self._find_call
        self._depth, self._is_string, self._is_escaped = 0, False, False  # inside the arguments

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[CallPiece]]:
        """Add text; return what of it is content, and pieces of calls."""
        self._held += text
        content: list[str] = []
        pieces: list[CallPiece] = []
        while self._advance(content, pieces):
            pass
        if is_last and self._advance == self._find_call:
            content.append(self._held)
            self._held = ""
        return "".join(content), pieces

    def _find_call(self, content: list[str], _: list[CallPiece]) -> bool:
        """Pass on text until a call begins."""
        if self._is_blank:  # between calls
            self._held = self._held.lstrip()
            self._is_blank = not self._held
        before, mark, after = self._held.partition(self._begin) if self._begin else ("", self._held, self._held)
        if not mark:
            shown = len(before) - open_suffix(before, [self._begin]) if self._begin else 0
            content.append(before[:shown])
            self._held = before[shown:]
            return False
        content.append(before)
        self._held, self._advance = after, self._read_name
        return True

    def _read_name(self, _: list[str], pieces: list[CallPiece]) -> bool:
        found = _HEAD.match(self._held)
        if found is None or found.end() == len(self._held):  # spaces may follow
            return False
        self._held, self._advance, self.is_whole = self._held[found.end() :], self._read_arguments, False
        call = {"name": found[1], "arguments": ""}
        self.calls.append({"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call})
        pieces.append(CallPiece(len(self.calls) - 1, "", found[1], self.calls[-1]["id"]))
        return True

    def _read_arguments(self, _: list[str], pieces: list[CallPiece]) -> bool:
        """Pass on the arguments, an object, up to the bracket that closes it."""
        end = next((place for place, sign in enumerate(self._held, 1) if self._closes(sign)), None)
        text, self._held = self._held[:end], "" if end is None else self._held[end:]
        if text:
            self.calls[-1]["function"]["arguments"] += text
            pieces.append(CallPiece(len(self.calls) - 1, text))
        if end is None:
            return False
        self._advance, self.is_whole = self._skip_end, True
        return True

    def _closes(self, sign: str) -> bool:
        """Take a character of the arguments; return True if it is their last."""
        if self._is_string:
            self._is_string = self._is_escaped or sign != '"'
            self._is_escaped = not self._is_escaped and sign == "\\"
        elif sign == '"':
            self._is_string = True
        elif sign in "{[":
            self._depth += 1
        elif sign in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _skip_end(self, _content: list[str], _pieces: list[CallPiece]) -> bool:
        _, mark, after = self._held.partition(self._end)
        if not mark:
            return False
        self._held, self._advance, self._is_blank = after, self._find_call, True
        return True


OPEN, CLOSE = "<think>", "</think>"


class Delta(NamedTuple):
    """Text that is new and final, and its tokens if their log probabilities are asked for."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()
    tokens: Sequence[ShownToken] = ()


class AnswerText:
    """Splits an answer into reasoning and content while it grows, and drops what follows a stop string.

    Args:
        stop: strings that end the answer and are no part of it.
        thinks: the model writes its reasoning between ``<think>`` and ``</think>``, at the answer's beginning.
        is_thinking: the prompt ends with ``<think>``.
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
