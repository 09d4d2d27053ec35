"""n-grams and words of several tokens that may not be completed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .rule import IDS, Rows, Rule, Settings, slots
from .sequence import SeenTokens

__all__ = ["ANY", "BadWords", "NoRepeatNgram", "aligned", "ends_with"]

ANY = -1  # in a table of words: matches every token
_ABSENT = -2  # what stands before a row's first token
_NO_TOKEN = 2**31 - 1  # past every vocabulary


class NoRepeatNgram(Rule):
    """no_repeat_ngram_size of the rows where ``applies [batch]``; the size is a number of passes, hence a constant."""

    reads_sequence = True
    neutral: ClassVar = {"applies": False}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        applies = torch.tensor(True, dtype=torch.bool, device="cpu")
        return {"applies": applies} if "no_repeat_ngram_size" in settings else {}

    @staticmethod
    def constants(settings: Settings) -> dict[str, Hashable]:
        return {"size": settings["no_repeat_ngram_size"]}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        """Ban whatever would complete an n-gram that a row has seen.

        A window bans its last token if its others equal the last ``size - 1`` tokens that the row sees.
        """
        others, sequence = self.size - 1, rows.sequence
        places = rows.positions[..., None] - others + torch.arange(others, device=logits.device)
        suffix = sequence.at(places.clamp(min=0))
        logits = logits.clone()
        for tokens, is_seen in sequence.windows(self.size):
            matches, count = is_seen & self.applies[:, None, None], is_seen.shape[2]
            for k in range(others):
                matches = matches & (tokens[..., k : k + count] == suffix[..., k : k + 1])
            _ban_(logits, tokens[..., others:], matches)
        return logits


class BadWords(Rule):
    """bad_words_ids of two tokens or more: ``word_ends [batch, n]``, ``word_prefixes [batch, n, longest - 1]``."""

    reads_sequence = True
    neutral: ClassVar = {"word_prefixes": ANY, "word_ends": _NO_TOKEN}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        words = [word for word in settings.get("bad_words_ids", ()) if len(word) > 1]
        if not words:
            return {}
        width = max(map(len, words)) - 1
        prefixes = torch.full((slots(len(words)), width), ANY, **IDS)
        for prefix, word in zip(prefixes, words, strict=False):
            prefix.copy_(aligned(word, width))
        ends = torch.full((len(prefixes),), _NO_TOKEN, **IDS)
        ends[: len(words)] = torch.tensor([word[-1] for word in words], **IDS)
        return {"word_prefixes": prefixes, "word_ends": ends}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        matches = ends_with(rows.sequence, rows.positions, self.word_prefixes)
        return _ban_(logits.clone(), self.word_ends[:, None], matches)


def _ban_(logits: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """Write -inf for ``ids [..., n]`` where ``where [batch, rows, n]``; ids may repeat or lie past the logits."""
    vocab_size = logits.shape[-1]
    where = (where & (ids < vocab_size)).expand(*logits.shape[:2], -1)
    bound = logits.new_full(where.shape, math.inf).masked_fill_(where, -math.inf)
    return logits.scatter_reduce_(2, ids.clamp(max=vocab_size - 1).expand_as(bound), bound, "amin")


def aligned(word: Sequence[int], width: int) -> Tensor:
    """Return all but the last token of ``word``, the last of them first, as ``[width]``."""
    return torch.tensor([*reversed(word[:-1]), *[ANY] * (width - len(word) + 1)], **IDS)


def ends_with(sequence: SeenTokens, positions: Tensor, prefixes: Tensor) -> Tensor:
    """True ``[batch, rows, ...]`` where ``prefixes [batch, ..., n]``, read backwards, precede ``positions``."""
    width = prefixes.shape[-1]
    places = positions[..., None] - 1 - torch.arange(width, device=positions.device)
    suffix = torch.where(places < 0, _ABSENT, sequence.at(places.clamp(min=0)))
    suffix = suffix.view(*positions.shape, *[1] * (prefixes.dim() - 2), width)
    prefixes = prefixes[:, None]
    return ((suffix == prefixes) | (prefixes == ANY)).all(-1)
