"""Text that is safe to show while a call runs, and stop strings met in the middle of a block.

Nothing here knows the model: token ids go in, text or a position comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a decoder shows for bytes that are not a character (yet)
_WINDOW = 64  # tokens that every push decodes again; at most twice as many
# What tokenizers replace when they clean up spaces: text that may become one of these is not final.
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
_NO_TOKEN = 2**31 - 1  # past every vocabulary; transformers' criterion takes it for a token that matches nothing


class Tokenizer(Protocol):
    """Methods that are used of transformers' tokenizers."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of token ids."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token."""
        ...

    @property
    def all_special_ids(self) -> list[int]: ...


class Streamer(Protocol):
    """Methods that are used of transformers' streamers."""

    def put(self, value: Tensor) -> None:
        """Take the prompt, ``[1, length]``, or new ids, ``[n]``."""
        ...

    def end(self) -> None:
        """Take note of the end."""
        ...


class StopCriterion(Protocol):
    """Parts that are used of transformers' ``StopStringCriteria``."""

    maximum_token_len: int

    def __call__(self, input_ids: Tensor, scores: None) -> Tensor:
        """Return ``[batch]`` bool: whether ``input_ids [batch, length]`` ends in a stop string."""
        ...


def open_suffix(text: str, patterns: Sequence[str]) -> int:
    """Return the length of the longest suffix of ``text`` that begins a pattern without completing it."""
    longest = 0
    for pattern in patterns:
        for length in range(min(len(pattern) - 1, len(text)), longest, -1):
            if text.endswith(pattern[:length]):
                longest = length
                break
    return longest


class TextDecoder:
    """Decodes one row's answer as it grows; text that was returned never changes.

    All pieces joined are ``tokenizer.decode(ids, skip_special_tokens=...)`` of all ids. A piece never ends inside a
    character, nor inside what may still become a stop string.

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
        vocabulary = tokenizer.get_vocab()
        names = (f"<0x{byte:02X}>" for byte in range(256))
        self._open = {vocabulary[name] for name in names if name in vocabulary}
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


def first_stop(criteria: Sequence[StopCriterion], history: list[int], new: int) -> int | None:
    """Return how many of the last ``new`` ids of ``history`` a one-token loop would have emitted before it stopped.

    Args:
        criteria: transformers' ``StopStringCriteria``; called with one row for every prefix, all in one batch.
        history: prompt and answer so far.
        new: how many ids at the end are new.

    Returns:
        1 .. new, or None if nothing stops.
    """
    stops = None
    for criterion in criteria:
        width = criterion.maximum_token_len
        padded = [_NO_TOKEN] * width + history
        ends = range(len(padded) - new + 1, len(padded) + 1)
        rows = torch.tensor([padded[end - width : end] for end in ends], dtype=torch.int64, device="cpu")
        found: Tensor = criterion(rows, None)
        stops = found if stops is None else stops | found
    if stops is None or not stops.any():
        return None
    return int(stops.int().argmax()) + 1


def check_streamer(streamer: object, rows: int) -> None:
    """Raise unless ``streamer`` is like those of transformers and the batch has the one row that they want."""
    for name in ("put", "end"):
        if not callable(getattr(streamer, name, None)):
            raise TypeError(f"streamer must have put() and end() as transformers' do, got {type(streamer).__name__}")
    if rows != 1:
        raise ValueError(f"a streamer takes a batch of one row, got {rows} rows; stream() takes any batch")
