"""Biases on single tokens and on sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .rule import IDS, NUMBERS, Rows, Rule, slots
from .settings import RuleSettings
from .words import UNUSED, aligned, ends_with

__all__ = ["LogitBias", "SequenceBias"]

_DECISIVE_BIAS = 10.0  # smaller biases are not told to the drafter: acceptance was lower with them


class LogitBias(Rule):
    """logit_bias of single tokens: ``bias [vocab]``, and ``draft_bias [vocab]``, what of it the drafter is told."""

    for_drafts = True

    @staticmethod
    def values(settings: RuleSettings, vocab_size: int) -> dict[str, Tensor]:
        return {} if settings.sequence_bias or not settings.logit_bias else _token_biases(settings, vocab_size)

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        return logits + self.bias[: logits.shape[-1]]

    def apply_to_drafts(self, logits: Tensor, rows: Rows) -> Tensor:
        return logits + self.draft_bias[: logits.shape[-1]]


class SequenceBias(LogitBias):
    """logit_bias with sequences in it.

    ``biased_ends [ends]`` are the last tokens of the sequences, each once but for those that fill the table.
    ``biased_prefixes [ends, n, longest - 1]`` (right-aligned) and ``prefix_biases [ends, n]`` are the sequences with
    that last token.
    """

    reads_sequence = True

    @staticmethod
    def values(settings: RuleSettings, vocab_size: int) -> dict[str, Tensor]:
        if not settings.sequence_bias:
            return {}
        return _token_biases(settings, vocab_size) | _sequence_tables(settings.sequence_bias)

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        matches = ends_with(rows.sequence, rows.positions, self.biased_prefixes)
        total = self.bias[self.biased_ends]
        for slot in range(matches.shape[-1]):  # one sequence after the other, so that sums have an order
            total = total + torch.where(matches[..., slot], self.prefix_biases[:, slot], 0.0)
        bias = self.bias.expand(*rows.positions.shape, -1)
        bias = bias.scatter(2, self.biased_ends.expand_as(total), total)  # ends that fill the table have one value
        return logits + bias[..., : logits.shape[-1]]


def _token_biases(settings: RuleSettings, vocab_size: int) -> dict[str, Tensor]:
    bias = torch.zeros(vocab_size, **NUMBERS)
    if vocab_size and settings.logit_bias:
        bias[list(settings.logit_bias)] = torch.tensor(list(settings.logit_bias.values()), **NUMBERS)
    return {"bias": bias, "draft_bias": torch.where(bias.abs() >= _DECISIVE_BIAS, bias, 0.0)}


def _sequence_tables(biases: Sequence[tuple[tuple[int, ...], float]]) -> dict[str, Tensor]:
    """Return the tables of `SequenceBias`; those of one last token in the order in which they are added."""
    groups = list(dict.fromkeys(len(ids) for ids, _ in biases))  # transformers adds those of one length together
    ends: dict[int, list[tuple[tuple[int, ...], float]]] = {}
    for ids, bias in sorted(biases, key=lambda pair: groups.index(len(pair[0]))):
        ends.setdefault(ids[-1], []).append((ids, bias))
    rows, deep, width = slots(len(ends)), slots(max(map(len, ends.values()))), max(groups) - 1
    prefixes, added = torch.full((rows, deep, width), UNUSED, **IDS), torch.zeros(rows, deep, **NUMBERS)
    filled = list(ends.values()) + [list(ends.values())[-1]] * (rows - len(ends))
    for row, sequences in enumerate(filled):
        for slot, (ids, bias) in enumerate(sequences):
            prefixes[row, slot], added[row, slot] = aligned(ids, width), bias
    last = torch.tensor([sequences[0][0][-1] for sequences in filled], **IDS)
    return {"biased_ends": last, "biased_prefixes": prefixes, "prefix_biases": added}
