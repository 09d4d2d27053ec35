"""An answer's tokens as a client sees them, with their log probabilities and their places in its text."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dflash import TokenLogprobs
from dflash.internals import TextDecoder

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
