"""n-grams and words of several tokens that may not be completed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from .rule import IDS, Rows, Rule, slots
from .sequence import SeenTokens
from .settings import RuleSettings

__all__ = ["UNUSED", "BadWords", "NoRepeatNgram", "aligned", "ends_with"]

# In a table of words: matches all; before a row's first token; an empty slot.
ANY, ABSENT, UNUSED = -1, -2, -3


class NoRepeatNgram(Rule):
    """no_repeat_ngram_size; the size is part of the layout, since it is a number of passes."""

    reads_sequence = True

    @classmethod
    def is_on(cls, settings: RuleSettings) -> bool:
        return settings.no_repeat_ngram_size > 0

    @staticmethod
    def values(settings: RuleSettings, vocab_size: int) -> dict[str, Tensor]:
        return {}

    @staticmethod
    def constants(settings: RuleSettings) -> dict[str, Hashable]:
        return {"size": settings.no_repeat_ngram_size}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        """Ban whatever would complete an n-gram that a row has seen.

        A window bans its last token if its others equal the last ``size - 1`` tokens that the row sees.
        """
        others, sequence = self.size - 1, rows.sequence
        places = rows.positions[..., None] - others + torch.arange(others, device=logits.device)
        suffix = sequence.at(places.clamp(min=0))
        logits = logits.clone()
        for tokens, matches in sequence.windows(self.size):
            count = matches.shape[2]
            for k in range(others):
                matches = matches & (tokens[..., k : k + count] == suffix[..., k : k + 1])
            _ban_(logits, tokens[..., others:], matches)
        return logits


class BadWords(Rule):
    """bad_words_ids of two tokens or more: ``word_prefixes [words, longest - 1]``, right-aligned; ``word_ends``."""

    reads_sequence = True

    @staticmethod
    def values(settings: RuleSettings, vocab_size: int) -> dict[str, Tensor]:
        words = [word for word in settings.bad_words_ids if len(word) > 1]
        if not words:
            return {}
        width = max(map(len, words)) - 1
        prefixes = torch.full((slots(len(words)), width), UNUSED, **IDS)
        for prefix, word in zip(prefixes, words, strict=False):
            prefix.copy_(aligned(word, width))
        ends = torch.zeros(len(prefixes), **IDS)
        ends[: len(words)] = torch.tensor([word[-1] for word in words], **IDS)
        return {"word_prefixes": prefixes, "word_ends": ends}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        matches = ends_with(rows.sequence, rows.positions, self.word_prefixes)
        return _ban_(logits.clone(), self.word_ends, matches)


def _ban_(logits: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """Write -inf for ``ids [..., n]`` where ``where [batch, rows, n]``; ids may repeat or lie past the logits."""
    vocab_size = logits.shape[-1]
    where = (where & (ids < vocab_size)).expand(*logits.shape[:2], -1)
    bound = logits.new_full(where.shape, math.inf).masked_fill_(where, -math.inf)
    return logits.scatter_reduce_(2, ids.clamp(max=vocab_size - 1).expand_as(bound), bound, "amin")


def aligned(word: Sequence[int], width: int) -> Tensor:
    """Return all but the last token of ``word``, right-aligned in ``[width]``."""
    return torch.tensor([ANY] * (width - len(word) + 1) + list(word[:-1]), **IDS)


def ends_with(sequence: SeenTokens, positions: Tensor, prefixes: Tensor) -> Tensor:
    """True ``[batch, rows, ...]`` where what precedes ``positions [batch, rows]`` ends with ``prefixes [..., n]``."""
    width = prefixes.shape[-1]
    places = positions[..., None] - width + torch.arange(width, device=positions.device)
    suffix = torch.where(places < 0, ABSENT, sequence.at(places.clamp(min=0)))
    suffix = suffix.view(*positions.shape, *[1] * (prefixes.dim() - 1), width)
    return ((suffix == prefixes) | (prefixes == ANY)).all(-1)
