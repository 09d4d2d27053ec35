"""An answer while it grows: its tokens as a client sees them, its reasoning and content, and blocks of these."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers.convert_slow_tokenizer import bytes_to_unicode

from dflash import TokenLogprobs
from dflash.internals import TextDecoder, open_suffix

from .reasoning import ReasoningForm

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LEAST = -9999.0  # OpenAI's for a probability of 0: JSON has no infinity


# ---------------------------------------------------------------------------------------------- tokens


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


_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}  # of byte-level vocabularies
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


class MarkedTokenizer:
    """A tokenizer that does not skip special tokens which are marks of tool calls or reasoning."""

    def __init__(self, tokenizer: Any, specials: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        skipped = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._skipped = skipped - {*specials.values()}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        if skip_special_tokens:
            token_ids = [token for token in token_ids if token not in self._skipped]
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _Starts:
    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
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

    def __init__(self, pieces: Pieces, tokenizer: Any, before: int = 0) -> None:
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


# ---------------------------------------------------------------------------------------------- text


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
        form: how the model writes its reasoning, first in an answer; None if it has none.
        is_thinking: the prompt ends with what begins it.
    """

    def __init__(
        self, stop: Sequence[str] = (), *, form: ReasoningForm | None = None, is_thinking: bool = False
    ) -> None:
        self._stop, self._longest = stop, max(map(len, stop), default=1)
        self.stopped_by, self.length = "", 0  # the stop string that ended it
        self._tail = ""  # the end of the text so far, where a stop string may have begun
        self._form, self._is_thinking = form, is_thinking
        self._is_first = form is not None and not is_thinking  # reasoning may begin
        self._hidden = [mark for mark in (form.reply, form.next, *form.hidden) if mark] if form else []
        self._held = ""  # may be the beginning of a mark
        self._is_blank = is_thinking  # spaces at the beginning of a part are dropped

    def push(self, piece: str, *, is_last: bool) -> Delta:
        """Add a piece of the answer; return what can be shown."""
        piece = self._before_stop(piece)
        self._held, self.length = self._held + piece, self.length + len(piece)
        parts, is_last = {False: "", True: ""}, is_last or bool(self.stopped_by)  # content, reasoning
        while self._form is not None:
            begin, end = self._form.open, self._form.close
            if self._is_first:
                text = self._held.lstrip()
                if not text.startswith(begin) and begin.startswith(text) and not is_last:
                    break
                self._is_first = False
                if text.startswith(begin):
                    self._held, self._is_thinking, self._is_blank = text.removeprefix(begin), True, True
            # Some models reason again after content.
            mark = end if self._is_thinking else begin if self._form.next else ""
            before, found, _ = self._held.partition(mark) if mark else (self._held, "", "")
            marks = [end] if self._is_thinking else [*self._hidden, *filter(None, [mark])]
            kept = 0 if found or is_last else open_suffix(before, marks)
            parts[self._is_thinking] += self._shown(len(before) - kept)
            if not found:
                break
            self._held, self._is_thinking, self._is_blank = self._held.removeprefix(found), not self._is_thinking, True
        else:
            parts[False] = self._shown(len(self._held))
        return Delta(parts[False], parts[True])

    def _before_stop(self, piece: str) -> str:
        """Return what of a piece comes before a stop string. One that began in earlier pieces was held back there."""
        if self.stopped_by:
            return ""
        if not self._stop:
            return piece
        text, old = self._tail + piece, len(self._tail)
        found = [(at, string) for string in self._stop if (at := text.find(string)) >= 0]
        self._tail = text[len(text) - min(len(text), self._longest - 1) :]
        if not found:
            return piece
        at, self.stopped_by = min(found)
        return text[old : max(old, at)]

    def _shown(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        for mark in () if self._is_thinking else self._hidden:
            text = text.replace(mark, "")
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text


# ---------------------------------------------------------------------------------------------- blocks


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return a call's arguments; None if the text is cut short, or not what JSON can hold."""
    try:
        found = json.loads(text or "{}", parse_constant=int)  # refuses NaN and infinities
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class BlockEvent(NamedTuple):
    """What happens to a block of an answer: it ``"open"``s, gets more ``text``, or is ``"close"``d.

    Attributes:
        what: ``"open"``, ``"add"`` or ``"close"``.
        kind: ``"thinking"``, ``"text"`` or ``"call"``.
        index: of the block in its answer.
        text: what is added; all of the block when it closes.
        call: id and name, of a call.
    """

    what: str
    kind: str
    index: int
    text: str = ""
    call: tuple[str, str] = ("", "")


class BlockWriter:
    """Writes an answer as blocks of thoughts, text and calls, one after another."""

    def __init__(self) -> None:
        self._index, self._kind, self._text, self._call = -1, "", "", ("", "")
        self._blank = ""  # white space that is text only if more text follows, or nothing

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> list[BlockEvent]:
        """Return what happens in a whole answer."""
        blocks = cls()
        return [block for delta in deltas for block in blocks.push(delta)] + [*blocks.close()]

    def push(self, delta: Delta) -> Iterator[BlockEvent]:
        """Yield what new text does."""
        yield from self._add("thinking", delta.reasoning)
        text = self._blank + delta.content
        self._blank = text[len(text.rstrip()) :]
        yield from self._add("text", text.rstrip())
        for piece in delta.calls:
            function = piece.get("function", {})
            if "id" in piece:
                yield from self._end()
                self._call = piece["id"], function["name"]
            yield from self._add("call", function.get("arguments", ""), is_new="id" in piece)

    def close(self) -> Iterator[BlockEvent]:
        """End the answer, and the block that is open, if one is."""
        if self._kind == "text":
            yield from self._add("text", self._blank)
        yield from self._end()

    def _end(self) -> Iterator[BlockEvent]:
        if self._kind:
            yield BlockEvent("close", self._kind, self._index, self._text, self._call)
        self._kind = self._text = self._blank = ""

    def _add(self, kind: str, text: str, *, is_new: bool = False) -> Iterator[BlockEvent]:
        if not text and not is_new:
            return
        if kind != self._kind:
            yield from self._end()
            self._index, self._kind = self._index + 1, kind
            yield BlockEvent("open", kind, self._index, call=self._call)
        self._text += text
        if text:
            yield BlockEvent("add", kind, self._index, text, self._call)
