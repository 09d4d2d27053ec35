"""An answer while it grows: its text split into reasoning, content and tool calls, and its tokens' places in it."""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..outputs import TokenLogprobs
from ..streaming import TextDecoder, Tokenizer, open_suffix

_HEAD = re.compile(r'\s*\{"name": "([^"]*)", "arguments":\s*')


class CallText:
    """Splits calls off a text whose grammar lets nothing else follow ``begin``, the mark that begins one.

    ``begin`` is empty if the whole text is calls; ``end`` follows a call's JSON object. ``calls`` and pieces of them
    are as OpenAI's API has them. ``is_whole``: there is a call, and the last is complete.
    """

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin, "}" + end
        self.calls: list[dict[str, Any]] = []
        self.is_whole = self._is_open = False
        self._held, self._parser = "", self._parse()

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Add text; return what of it is content, and pieces of calls: the first of each has its id and name."""
        self._held += text
        self._content: list[str] = []
        self._pieces: list[dict[str, Any]] = []
        next(self._parser)
        if is_last and not self._is_open:
            self._content.append(self._held)
            self._held = ""
        return "".join(self._content), self._pieces

    def _parse(self) -> Iterator[None]:
        """Take what is held, and yield where more text is needed."""
        begin, is_after_call = self._begin, False
        while True:
            # 1. Text, until a call begins.
            self._is_open = False
            while True:
                if is_after_call:  # spaces between calls
                    self._held = self._held.lstrip()
                    is_after_call = not self._held
                before, mark, after = self._held.partition(begin) if begin else ("", self._held, self._held)
                shown = len(before) - (0 if mark else open_suffix(before, [begin]))
                self._content.append(before[:shown])
                if mark:
                    break
                self._held = before[shown:]
                yield
            self._held, self._is_open = after, True
            # 2. The name of the function.
            while (found := _HEAD.match(self._held)) is None or found.end() == len(self._held):  # spaces may follow
                yield
            self._held, self.is_whole = self._held[found.end() :], False
            function = {"name": found[1], "arguments": ""}
            call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
            self.calls.append(call)
            self._pieces.append({"index": len(self.calls) - 1, **call, "function": {**function}})
            # 3. The arguments, an object, up to the bracket that closes it.
            end, depth, is_quoted, is_escaped = None, 0, False, False
            while True:
                for place, sign in enumerate(self._held, 1):
                    if is_quoted:
                        is_quoted, is_escaped = is_escaped or sign != '"', not is_escaped and sign == "\\"
                    elif sign == '"':
                        is_quoted = True
                    elif sign in "{[}]":
                        depth += 1 if sign in "{[" else -1
                        if depth == 0:
                            end = place
                            break
                text, self._held = self._held[:end], "" if end is None else self._held[end:]
                if text:
                    function["arguments"] += text
                    self._pieces.append({"index": len(self.calls) - 1, "function": {"arguments": text}})
                if end is not None:
                    break
                yield
            self.is_whole = True
            # 4. What ends the call.
            while self._end not in self._held:
                yield
            self._held, is_after_call = self._held.partition(self._end)[2], True


OPEN, CLOSE = "<think>", "</think>"


class Delta(NamedTuple):
    """Text that is new and final, and its tokens if their log probabilities are asked for."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[dict[str, Any]] = ()
    tokens: Sequence[ShownToken] = ()


class AnswerText:
    """Splits an answer into reasoning and content while it grows, and drops what follows a stop string.

    Args:
        stop: strings that end the answer and are not part of it.
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
            text = self._held.lstrip()
            if text.startswith(OPEN):
                self._held, self._mark = text.removeprefix(OPEN), CLOSE
            elif is_last or not OPEN.startswith(text):
                self._mark, self._is_blank = None, False  # all is content, leading spaces too
            else:
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

    def _shown(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text


# ---------------------------------------------------------------------------------------------- log probabilities

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LEAST = -9999.0  # OpenAI's for a probability of 0: JSON has no infinity


class Piece(NamedTuple):
    """A token as a client sees it; in its text, bytes that are not UTF-8 are escaped, as OpenAI writes them."""

    text: str
    bytes: bytes


class ShownToken(NamedTuple):
    """A token of a text, ``start`` characters after its beginning; a prompt's first token has no log probabilities."""

    piece: Piece
    start: int
    logprob: float | None
    top: list[tuple[Piece, float]] | None


def _byte_letters() -> dict[str, int]:
    """Return the letters by which byte-level vocabularies write bytes, as GPT-2 does."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_letters()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


class Pieces:
    """The tokens of a vocabulary, each read when it is first needed."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.of = functools.cache(self._read)

    def _read(self, token: int) -> Piece:
        text = self._tokenizer.decode([token])
        if _REPLACEMENT in text:
            found = self._bytes(token)
            try:
                return Piece(found.decode(), found)
            except UnicodeDecodeError:
                return Piece("bytes:" + "".join(f"\\x{byte:02x}" for byte in found), found)
        twice = self._tokenizer.decode([token, token])
        if twice.startswith(text):  # some tokenizers drop the space that a text begins with
            text = twice[len(text) :]
        return Piece(text, text.encode())

    def _bytes(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token) or ""
        if found := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(found[1], 16)])
        if all(letter in _BYTES for letter in name):
            return bytes(_BYTES[letter] for letter in name)
        return name.encode()

    def shown(self, token: int, start: int, values: TokenLogprobs | None) -> ShownToken:
        if values is None:
            return ShownToken(self.of(token), start, None, None)
        pairs = zip(values.top_ids, values.top_logprobs, strict=True)
        top = [(self.of(other), max(value, _LEAST)) for other, value in pairs]
        return ShownToken(self.of(token), start, max(values.logprob, _LEAST), top)

    def of_prompt(self, ids: Sequence[int], values: Sequence[TokenLogprobs | None], text: str) -> list[ShownToken]:
        """Return a prompt's tokens. A BOS token that the tokenizer put before the text has no characters of it."""
        starts = _Starts(self._tokenizer, skip_special_tokens=False)
        places = [starts.push(token) for token in ids]
        added = max(0, starts.finish() - len(text))
        tokens = zip(ids, places, values, strict=True)
        return [self.shown(token, max(0, place - added), value) for token, place, value in tokens]


class _Starts:
    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._decoder, self._length = TextDecoder(tokenizer, (), skip_special_tokens), 0

    def push(self, token: int) -> int:
        """Add a token; return how many characters are complete before it."""
        start = self._length
        self._length += len(self._decoder.push([token]))
        return start

    def finish(self) -> int:
        return self._length + len(self._decoder.finish())


class AnswerTokens:
    """Holds the tokens of an answer until text after their beginning is shown.

    ``before`` counts the characters of the text before the answer, for ``echo``.
    """

    def __init__(self, pieces: Pieces, tokenizer: Tokenizer, before: int = 0) -> None:
        self._pieces, self._before = pieces, before
        self._starts = _Starts(tokenizer, skip_special_tokens=True)
        self._held: list[ShownToken] = []

    def push(
        self, ids: Sequence[int], values: Sequence[TokenLogprobs], length: int, *, is_whole: bool
    ) -> list[ShownToken]:
        """Add what a step wrote; return the tokens that are shown now.

        ``length`` counts the characters that are final and come before a stop string; ``is_whole`` says that the answer
        has ended, and no stop string has cut it.
        """
        for token, value in zip(ids, values, strict=True):
            self._held.append(self._pieces.shown(token, self._before + self._starts.push(token), value))
        count = sum(is_whole or token.start < self._before + length for token in self._held)
        shown, self._held = self._held[:count], self._held[count:]
        return shown
