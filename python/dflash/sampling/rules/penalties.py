"""Penalties on tokens that the text already holds."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .rule import NUMBERS, Rows, Rule, Settings

__all__ = ["CountPenalties", "RepetitionPenalty"]


class RepetitionPenalty(Rule):
    """``repetition_penalty [batch]`` float32."""

    neutral: ClassVar = {"repetition_penalty": 1.0}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        penalty = settings.get("repetition_penalty")
        return {} if penalty is None else {"repetition_penalty": torch.tensor(penalty, **NUMBERS)}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        ids, counts = _counts(rows, torch.zeros_like(rows.prompt), logits.shape[-1])
        old = logits.gather(2, ids)
        penalty = self.repetition_penalty[:, None, None]
        new = torch.where(old < 0, old * penalty, old / penalty)
        return logits.scatter(2, ids, torch.where(counts > 0, new, old))


class CountPenalties(Rule):
    """``presence_penalty`` and ``frequency_penalty [batch]`` float32."""

    neutral: ClassVar = {"presence_penalty": 0.0, "frequency_penalty": 0.0}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        names = ("presence_penalty", "frequency_penalty")
        if not any(name in settings for name in names):
            return {}
        return {name: torch.tensor(settings.get(name, 0.0), **NUMBERS) for name in names}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        ids, counts = _counts(rows, rows.prompt, logits.shape[-1])
        frequency, presence = (x[:, None, None] for x in (self.frequency_penalty, self.presence_penalty))
        loss = counts * frequency + (counts > 0) * presence
        return logits.scatter(2, ids, logits.gather(2, ids) - loss)


def _counts(rows: Rows, first: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Count the ids in each row's prefix, from position ``first [batch, 1]`` on.

    Returns:
        ``[batch, rows, n]`` int64 below ``vocab_size``, every id of the prefix and others, some of them twice; and
        their counts ``[batch, rows, n]`` float32, exact below 2^24. An id has the same count wherever it stands.
    """
    tokens, length, drafts = rows.text.tokens, rows.text.length, rows.block[:, 1:]
    place = torch.arange(tokens.shape[1], device=tokens.device)
    live = (place >= first) & (place <= length[:, None]) & (tokens < vocab_size)
    emitted = torch.zeros(tokens.shape[0], vocab_size, dtype=torch.float32, device=tokens.device)
    emitted = emitted.scatter_add(1, tokens.clamp(max=vocab_size - 1), live.float())
    ids = torch.cat([tokens, drafts], 1).clamp(max=vocab_size - 1)
    drafted, emitted = (drafts[:, :, None] == ids[:, None]).float(), emitted.gather(1, ids)[:, None]
    if rows.tree is None:
        counts = torch.cat([emitted, drafted], 1).cumsum(1)
    else:
        counts = emitted + rows.tree.visible[..., 1:].float() @ drafted  # sums of zeros and ones: exact in any order
    return ids[:, None].expand_as(counts), counts
