"""Which rows each micro-batch takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Batches"]


class Batches:
    """Which rows each micro-batch of each step takes: like lengths together, lengths mixed from one to the next.

    Args:
        lengths: tokens of each row.
        batch_tokens: tokens of a micro-batch, padding counted; a longer row stands alone.
        group: micro-batches of a step, over all processes.
        seed: of the order.
    """

    _POOL = 24  # micro-batches whose rows are sorted by length together

    def __init__(self, lengths: Sequence[int], batch_tokens: int, group: int, seed: int) -> None:
        self.lengths = torch.tensor(lengths)
        self.batch_tokens, self.group, self.seed = batch_tokens, group, seed
        self._last: tuple[int, list[list[list[int]]]] = (-1, [])

    def epoch(self, epoch: int) -> list[list[list[int]]]:
        """The steps of an epoch, each ``group`` lists of rows. Rows left over at the end wait for another epoch."""
        if self._last[0] != epoch:
            self._last = (epoch, self._steps(epoch))
        return self._last[1]

    def _steps(self, epoch: int) -> list[list[list[int]]]:
        generator = torch.Generator().manual_seed(_fold(self.seed, epoch, 0))
        order = torch.randperm(len(self.lengths), generator=generator)
        pool = max(1, self._POOL * self.batch_tokens // max(1, int(self.lengths.float().mean())))
        batches: list[list[int]] = []
        for part in order.split(pool):
            rows = part[self.lengths[part].argsort(descending=True, stable=True)].tolist()
            batch: list[int] = []
            for row in rows:
                if batch and (len(batch) + 1) * int(self.lengths[batch[0]]) > self.batch_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(row)
            batches.append(batch)
        mixed = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        while len(mixed) < self.group:  # less data than one step takes
            mixed += mixed[: self.group - len(mixed)]
        return [mixed[i : i + self.group] for i in range(0, len(mixed) - self.group + 1, self.group)]

    def count(self, epochs: int) -> int:
        """Steps of the first ``epochs`` epochs."""
        return sum(len(self.epoch(epoch)) for epoch in range(epochs))


def _fold(*numbers: int) -> int:
    """One seed of several numbers."""
    value = 0
    for number in numbers:
        value = (value * 0x9E3779B97F4A7C15 + number + 1) & (2**63 - 1)
    return value


def _collate(rows: Any, index: list[int]) -> tuple[Tensor, Tensor]:
    """``input_ids`` and ``loss_mask``, each ``[batch, length]``, right-padded with 0."""
    part = rows[index]

    def pad(values: list[list[int]]) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.tensor(value) for value in values], batch_first=True)

    return pad(part["input_ids"]), pad(part["loss_mask"])
