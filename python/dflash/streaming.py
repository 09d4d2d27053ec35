"""Text that is safe to show while a call runs, and stop strings met in the middle of a block.

Nothing here knows the model: token ids go in, text or a position comes out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # shown by decoders for bytes that are not a character (yet)
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
_WINDOW = 64  # tokens that every push decodes again; at most twice as many
_TAIL = 16  # the same where nothing is shown
_LONG_RUN = 512  # byte tokens in a row above which a window begins among them
_SETTLED = 8  # characters: the beginning of a shorter text may still change
_PLAIN = ["transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers"]
# Tokenizers replace these when they clean up spaces: text that may become one of them is not final.
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Tokenizer(Protocol):
    """Methods of transformers' tokenizers that this package uses."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of token ids."""

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]:
        """Return the ids of tokens."""

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def unk_token_id(self) -> int | None: ...


class Streamer(Protocol):
    """Methods of transformers' streamers that this package uses."""

    def put(self, value: Tensor) -> None:
        """Take the prompt, ``[1, length]``, or new ids, ``[n]``."""

    def end(self) -> None:
        """Take note of the end."""


class StopFinder(Protocol):
    """Finder of a row's end by its text."""

    def push(self, new: list[int]) -> int | None:
        """Add ids; return how many of them a one-token loop would have emitted before it stopped, or None for all."""


def open_suffix(text: str, patterns: Sequence[str]) -> int:
    """Return the length of the longest suffix of ``text`` that begins a pattern without completing it."""
    first = len(text)
    for pattern in patterns:
        start = text.find(pattern[:1], max(0, len(text) - len(pattern) + 1), first)
        while start >= 0 and not pattern.startswith(text[start:]):
            start = text.find(pattern[:1], start + 1, first)
        first = start if start >= 0 else first
    return len(text) - first


def byte_ids(tokenizer: Tokenizer) -> set[int | None]:
    """Return the ids of the byte tokens ``<0x00>`` to ``<0xFF>`` that a tokenizer has."""
    return {*tokenizer.convert_tokens_to_ids(_BYTE_TOKENS)} - {None, tokenizer.unk_token_id}


def _plain_decode(tokenizer: Tokenizer) -> Callable[[list[int]], str]:
    """Return ``tokenizer.decode``, or if no class overrides it the backend's, at half the cost."""
    methods = [getattr(getattr(type(tokenizer), name, None), "__module__", "") for name in ("decode", "_decode")]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if methods != _PLAIN or backend is None or getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return tokenizer.decode
    return functools.partial(backend.decode, skip_special_tokens=False)


class TextDecoder:
    """Decodes one row's answer as it grows; text that was returned never changes.

    All pieces joined are ``tokenizer.decode(ids, skip_special_tokens=...)`` of all ids. A piece never ends inside a
    character, nor inside a text that may become a stop string.

    Args:
        tokenizer: one of transformers.
        stop_strings: text that may become one of them is held back.
        skip_special_tokens: as in ``tokenizer.decode``.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), skip_special_tokens: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._held_back = tuple(stop_strings)
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):
            self._held_back += _CLEANED
        # A run of byte tokens is decoded as a whole or not at all: another wrong byte changes the characters before it.
        self._open = byte_ids(tokenizer)
        if self._open and skip_special_tokens:
            self._open.update(tokenizer.all_special_ids)  # a token that is skipped does not end a run
        self._ids: list[int] = []
        self._start = 0  # ids before it have been returned and are no longer decoded
        self._returned = 0  # characters of the ids from there on that have been returned
        self._text: list[str] = []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is now final and was not returned before, which may be empty."""
        self._ids.extend(ids)
        end = len(self._ids)
        while end > self._start and self._ids[end - 1] in self._open:
            end -= 1
        text = self._decode(self._ids[self._start : end])
        safe = len(text.rstrip(_REPLACEMENT))
        safe -= open_suffix(text[:safe], self._held_back)
        if safe <= self._returned:
            return ""
        piece, self._returned = text[self._returned : safe], safe
        self._text.append(piece)
        if end - self._start > 2 * _WINDOW:
            # Decode less from now on, if the shorter text is the end of the longer one.
            start = end - _WINDOW
            tail = self._decode(self._ids[start:end])
            gone = len(text) - len(tail)
            if text.endswith(tail) and 0 <= gone <= self._returned:
                self._start, self._returned = start, self._returned - gone
        return piece

    def finish(self) -> str:
        """Return the rest of the text; there will be no more ids."""
        text, given = self._decode(self._ids), "".join(self._text)
        if not text.startswith(given):  # the tokenizer changed earlier text: take its last word on the rest
            text, given = self._decode(self._ids[self._start :]), ""
            text = text[self._returned :]
        return text[len(given) :]


class BatchDecoder:
    """Decodes the answers of ``rows`` rows; see `TextDecoder`."""

    def __init__(
        self, rows: int, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), skip_special_tokens: bool = False
    ) -> None:
        self._rows = [TextDecoder(tokenizer, stop_strings, skip_special_tokens) for _ in range(rows)]
        self._ended: set[int] = set()

    def push(self, ids: Sequence[Sequence[int]], finish_reasons: Sequence[str | None]) -> list[str]:
        """Add every row's new ids; return its text that is now final, which the row's end completes."""
        text = [row.push(new) if new else "" for row, new in zip(self._rows, ids, strict=True)]
        for row, reason in enumerate(finish_reasons):
            if reason is not None and row not in self._ended:
                text[row] += self._rows[row].finish()
                self._ended.add(row)
        return text


class StopMatcher:
    """Finds the token with which a row's text contains a stop string, wherever in a block it stands.

    The text is that of prompt and answer, special tokens included. A match may begin in the prompt, and ends
    after it. A push costs the same however long the row is.

    Args:
        tokenizer: one of transformers.
        stop_strings: not empty.
        prompt: ids.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str], prompt: list[int]) -> None:
        self._decode, self._strings, self._bytes = _plain_decode(tokenizer), stop_strings, byte_ids(tokenizer)
        self._longest = max(map(len, stop_strings))
        # Characters that later tokens may take back: incomplete ones, and spaces that are cleaned up.
        passing = _REPLACEMENT + " " * getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._looks_at_each = any(character in string for string in stop_strings for character in passing)
        # The ids decoded at every push, the characters that are wrong because they are cut, and the text before them.
        start = len(prompt) - max(len(string.encode()) for string in stop_strings) - _TAIL
        self._ids, self._wrong, self._before = prompt[self._run_start(prompt, start) :], 0, ""
        self._prompt = self._text([])
        self._forget(self._prompt)

    def push(self, new: list[int]) -> int | None:
        """See `StopFinder`. Decodes the text after each id if one of them may end a match."""
        text = self._text(new)
        if (ends := self._has_match(text)) or self._looks_at_each or _REPLACEMENT in text:
            for count in range(1, len(new)):
                if self._has_match(self._text(new[:count])):
                    return count
        if ends:
            return len(new)
        self._ids += new
        self._forget(text)
        return None

    def _text(self, new: list[int]) -> str:
        return self._before + self._decode(self._ids + new)[self._wrong :]

    def _has_match(self, text: str) -> bool:
        shared = len(self._prompt) if text.startswith(self._prompt) else _common(text, self._prompt)
        return any(text.find(string, max(0, shared + 1 - len(string))) >= 0 for string in self._strings)

    def _run_start(self, ids: list[int], at: int) -> int:
        """Return ``at``, or where the run of byte tokens begins that it would cut: they are decoded as a whole."""
        at = max(0, at)
        while at and ids[at] in self._bytes and ids[at - 1] in self._bytes:
            at -= 1
        return at

    def _forget(self, text: str) -> None:
        """Decode less from now on, if the end of the ids decodes to the end of the text and will continue to."""
        end = len(self._ids)
        if end <= 2 * _TAIL:
            return
        at = end - _TAIL
        if at - (start := self._run_start(self._ids, at)) < _LONG_RUN:
            at = start
        ids = self._ids[at:]
        if at != start and text.endswith(_REPLACEMENT):  # a character is not complete, unless the run is wrong anyway
            shorter = (part[:-cut] for part in (self._ids, ids) for cut in (1, 2, 3))
            if not all(self._decode(part).endswith(_REPLACEMENT) for part in shorter):
                return
        tail = self._decode(ids)
        same = _common(reversed(text), reversed(tail))
        if same < _SETTLED:
            return
        first = max(0, len(text) - same - self._longest)
        self._ids, self._wrong, self._before = ids, len(tail) - same, text[first : len(text) - same]
        self._prompt = self._prompt[first:]


def _common(text: Iterable[str], other: Iterable[str]) -> int:
    """Return how many characters two texts share at their beginning."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False)))


def check_streamer(streamer: object, rows: int) -> None:
    """Raise unless ``streamer`` has transformers' methods and the batch has one row."""
    for name in ("put", "end"):
        if not callable(getattr(streamer, name, None)):
            raise TypeError(f"streamer must have put() and end() as transformers' do, got {type(streamer).__name__}")
    if rows != 1:
        raise ValueError(f"a streamer takes a batch of one row, got {rows} rows; stream() takes any batch")
