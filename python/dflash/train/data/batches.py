"""Micro-batches: grouping rows by length, padding, and noise on features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Batches", "add_noise", "mix_seed", "pad_rows"]

_Step = list[list[int]]  # the rows of each micro-batch


class Batches:
    """The micro-batches of every step. Each holds rows of similar length; lengths vary from one to the next.

    Args:
        lengths: length of each row in tokens.
        batch_tokens: tokens per micro-batch, padding included. A longer row gets its own micro-batch.
        group: micro-batches per step, over all processes.
        seed: seed of the shuffling.
    """

    _POOL = 24  # micro-batches whose rows are sorted by length together

    def __init__(self, lengths: Sequence[int], batch_tokens: int, group: int, seed: int) -> None:
        self.lengths = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        self.batch_tokens, self.group, self.seed = batch_tokens, group, seed
        self._last: tuple[int, list[_Step]] = (-1, [])

    def epoch(self, epoch: int) -> list[_Step]:
        """Return the steps of an epoch. Micro-batches that do not fill a last step are left out."""
        if self._last[0] != epoch:
            self._last = (epoch, self._draw(epoch))
        return self._last[1]

    def _draw(self, epoch: int) -> list[_Step]:
        # 1. Shuffle the rows, and sort them by length within pools
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch, 0))
        order = torch.randperm(len(self.lengths), generator=generator, device="cpu")
        pool = max(1, self._POOL * self.batch_tokens // max(1, int(self.lengths.float().mean())))
        # 2. Fill micro-batches, the longest rows of a pool first
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
        # 3. Shuffle the micro-batches, and group them into steps
        mixed = [batches[i] for i in torch.randperm(len(batches), generator=generator, device="cpu").tolist()]
        while len(mixed) < self.group:  # less data than one step takes
            mixed += mixed[: self.group - len(mixed)]
        return [mixed[i : i + self.group] for i in range(0, len(mixed) - self.group + 1, self.group)]

    def count(self, epochs: int) -> int:
        """Return the number of steps in the first ``epochs`` epochs."""
        return sum(len(self.epoch(epoch)) for epoch in range(epochs))

    def tokens(self, step: _Step) -> int:
        """Return the number of tokens in a step, padding excluded."""
        return int(self.lengths[[row for rows in step for row in rows]].sum())


def mix_seed(*numbers: int) -> int:
    """Combine several numbers into one seed."""
    value = 0
    for number in numbers:
        value = (value * 0x9E3779B97F4A7C15 + number + 1) & (2**63 - 1)
    return value


def pad_rows(rows: Any, index: list[int]) -> tuple[Tensor, Tensor]:
    """Return ``input_ids`` and ``loss_mask`` of some rows, ``[batch, length]``, padded with 0 on the right."""
    part = rows[index]

    def pad(values: list[list[int]]) -> Tensor:
        return nn.utils.rnn.pad_sequence(
            [torch.tensor(value, dtype=torch.int64, device="cpu") for value in values], batch_first=True
        )

    return pad(part["input_ids"]), pad(part["loss_mask"])


def add_noise(context: Tensor, taps: int, scale: float, generator: torch.Generator) -> Tensor:
    """Return features with uniform noise of up to ``scale`` times the root mean square of each tap."""
    tapped = context.unflatten(-1, (taps, -1))
    size = tapped.float().square().mean(-1, keepdim=True).sqrt() * scale
    noise = (
        torch.empty(tapped.shape, dtype=torch.float32, device="cpu")
        .uniform_(-1, 1, generator=generator)
        .to(tapped.device)
    )
    return (tapped + noise * size).to(context.dtype).flatten(-2)
