"""Biases on single tokens and on sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .rule import IDS, NUMBERS, Rows, Rule, Settings, slots
from .words import ANY, aligned, ends_with

__all__ = ["LogitBias", "SequenceBias"]

Biases = Sequence[tuple[tuple[int, ...], float]]
_DECISIVE_BIAS = 10.0  # smaller biases are not told to the drafter: acceptance was lower with them


class LogitBias(Rule):
    """logit_bias of single tokens: ``bias`` and ``draft_bias [batch, vocab]``, what of it the drafter is told."""

    for_drafts = True
    neutral: ClassVar = {"bias": 0.0, "draft_bias": 0.0}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        biases = settings.get("logit_bias", ())
        return _token_biases(biases, vocab_size) if biases and not _sequences(biases) else {}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        return logits + self.bias[:, None, : logits.shape[-1]]

    def apply_to_drafts(self, logits: Tensor, rows: Rows) -> Tensor:
        return logits + self.draft_bias[:, None, : logits.shape[-1]]


class SequenceBias(LogitBias):
    """logit_bias with sequences in it.

    ``biased_ends [batch, ends]`` are the last tokens of the sequences, each once, then -1. ``biased_prefixes [batch,
    ends, n, longest - 1]`` and ``prefix_biases [batch, ends, n]`` are the sequences with that last token.
    """

    reads_sequence = True
    neutral: ClassVar = LogitBias.neutral | {"biased_ends": -1, "biased_prefixes": ANY, "prefix_biases": 0.0}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        biases = settings.get("logit_bias", ())
        sequences = _sequences(biases)
        return _token_biases(biases, vocab_size) | _sequence_tables(sequences) if sequences else {}

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        matches = ends_with(rows.sequence, rows.positions, self.biased_prefixes)
        bias = torch.nn.functional.pad(self.bias, (0, 1))  # one more column, for ends of -1
        ends = self.biased_ends % bias.shape[1]
        total = bias.gather(1, ends)[:, None]
        for slot in range(matches.shape[-1]):  # one sequence after the other, so that sums have an order
            total = total + torch.where(matches[..., slot], self.prefix_biases[:, None, :, slot], 0.0)
        bias = bias[:, None].expand(-1, total.shape[1], -1).scatter(2, ends[:, None].expand_as(total), total)
        return logits + bias[..., : logits.shape[-1]]


def _sequences(biases: Biases) -> Biases:
    return [pair for pair in biases if len(pair[0]) > 1]


def _token_biases(biases: Biases, vocab_size: int) -> dict[str, Tensor]:
    single = {ids[0]: bias for ids, bias in biases if len(ids) == 1}
    bias = torch.zeros(vocab_size, **NUMBERS)
    if vocab_size and single:
        bias[list(single)] = torch.tensor(list(single.values()), **NUMBERS)
    return {"bias": bias, "draft_bias": torch.where(bias.abs() >= _DECISIVE_BIAS, bias, 0.0)}


def _sequence_tables(biases: Biases) -> dict[str, Tensor]:
    """Return the tables of `SequenceBias`; those of one last token in the order in which they are added."""
    groups = list(dict.fromkeys(len(ids) for ids, _ in biases))  # transformers adds those of one length together
    ends: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for ids, bias in sorted(biases, key=lambda pair: groups.index(len(pair[0]))):
        ends.setdefault(ids[-1], []).append((ids, bias))
    rows, deep, width = slots(len(ends)), slots(max(map(len, ends.values()))), max(groups) - 1
    last, added = torch.full((rows,), -1, **IDS), torch.zeros(rows, deep, **NUMBERS)
    prefixes = torch.full((rows, deep, width), ANY, **IDS)
    for row, (end, sequences) in enumerate(ends.items()):
        last[row] = end
        for slot, (ids, bias) in enumerate(sequences):
            prefixes[row, slot], added[row, slot] = aligned(ids, width), bias
    return {"biased_ends": last, "biased_prefixes": prefixes, "prefix_biases": added}
