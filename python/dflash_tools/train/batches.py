"""Micro-batches of rows, and the anchors and blocks of a batch: the drafter's inputs, labels and loss weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

_Step = list[list[int]]  # the rows of each micro-batch


class Batches:
    """The micro-batches of every step. Each holds rows of similar length; lengths vary from one to the next.

    ``batch_tokens`` counts padding; a longer row gets its own micro-batch. ``group`` is the number of micro-batches per
    step, over all processes.
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
        lengths, batches = self.lengths.tolist(), []
        for part in order.split(pool):
            batches += group_by_length(part.tolist(), lengths, self.batch_tokens)
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


def group_by_length(rows: Iterable[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group rows of similar length, the longest first, into batches of up to ``batch_tokens``, padding included."""
    batches: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -lengths[row]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches


def mix_seed(*numbers: int) -> int:
    """Combine several numbers into one seed."""
    value = 0
    for number in numbers:
        value = (value * 0x9E3779B97F4A7C15 + number + 1) & (2**63 - 1)
    return value


def pad(rows: Iterable[Sequence[int]]) -> Tensor:
    """Return rows of integers as ``[batch, length]`` int64 on the CPU, padded with 0 on the right."""
    tensors = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def add_noise(context: Tensor, taps: int, scale: float, generator: torch.Generator) -> Tensor:
    """Return features with uniform noise of up to ``scale`` times the root mean square of each tap.

    ``generator`` is on their device.
    """
    tapped = context.unflatten(-1, (taps, -1))
    size = tapped.float().square().mean(-1, keepdim=True).sqrt() * scale
    noise = torch.empty(tapped.shape, dtype=torch.float32, device=tapped.device).uniform_(-1, 1, generator=generator)
    return (tapped + noise * size).to(context.dtype).flatten(-2)


def default_gamma(block_size: int) -> float:
    """Return the published decay of the slots' weights: 7, 5 and 4 for blocks of 16, 10 and 8, linear in between."""
    return block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3


class BatchBlocks(NamedTuple):
    """The blocks of a batch. Sequences with fewer anchors are padded with blocks of weight 0.

    Attributes:
        anchors: ``[batch, anchors]`` int64, ascending; padding is 0 and comes last.
        ids: ``[batch, anchors, block]`` int64: the anchor's token, then mask ids.
        labels: ``[batch, anchors, block]`` int64: the token at ``anchor + k``, 0 past the end of the sequence.
        weights: ``[batch, anchors, block]`` float32: ``exp(-(k - 1) / gamma)``. 0 in slot 0, and in all slots from the
            first token that is missing or that the target did not write.
    """

    anchors: Tensor
    ids: Tensor
    labels: Tensor
    weights: Tensor


_TOKENS_PER_ANCHOR, _MOST_ANCHORS = 8, 512


def sample_anchors(
    loss_mask: Tensor, count: int | None, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw up to ``count`` anchors per sequence, without replacement.

    A position can be an anchor if its token and the next are both supervised.

    Args:
        loss_mask: ``[batch, length]``, nonzero on the tokens that the target wrote.
        count: maximum number of anchors per sequence; None for one per 8 positions that can be anchors, up to 512.
        generator: random generator on the same device; None for torch's default.

    Returns:
        ``anchors [batch, n]`` int64, ascending with padding last, and ``valid [batch, n]`` bool; ``1 <= n <= count``.
    """
    supervised = loss_mask.bool()
    eligible = supervised.clone()
    eligible[:, :-1] &= supervised[:, 1:]
    eligible[:, -1] = False
    wanted = eligible.sum(1, keepdim=True)
    wanted = wanted.clamp(max=count) if count else (wanted / _TOKENS_PER_ANCHOR).ceil().long().clamp(max=_MOST_ANCHORS)
    count = max(1, int(wanted.max()))
    draw = torch.rand(loss_mask.shape, generator=generator, dtype=torch.float32, device=loss_mask.device)
    chosen = torch.where(eligible, draw, -1.0).topk(count, dim=1)
    length = loss_mask.shape[1]
    is_wanted = torch.arange(count, device=loss_mask.device) < wanted
    anchors = torch.where(is_wanted, chosen.indices, length).sort(1).values
    valid = anchors < length
    return torch.where(valid, anchors, 0), valid


def make_blocks(
    input_ids: Tensor, loss_mask: Tensor, anchors: Tensor, valid: Tensor, block_size: int, mask_id: int, gamma: float
) -> BatchBlocks:
    """Build the blocks ``[batch, anchors, block]`` at ``anchors`` and ``valid``, both from `sample_anchors`.

    Args:
        input_ids: ``[batch, length]``, padded on the right.
        loss_mask: ``[batch, length]``, 0 on padding.
        anchors: ``[batch, anchors]``.
        valid: ``[batch, anchors]`` bool.
        block_size: slots per block, the anchor's included.
        mask_id: input token of all slots but the anchor's.
        gamma: decay of the weights, in slots.
    """
    length, slot = input_ids.shape[1], torch.arange(block_size, device=input_ids.device)
    positions = anchors[..., None] + slot
    inside, index = positions < length, positions.clamp(max=length - 1).flatten(1)
    labels = input_ids.gather(1, index).view(positions.shape)
    supervised = loss_mask.bool().gather(1, index).view(positions.shape) & inside
    counted = supervised.long().cumprod(-1).bool() & valid[..., None]
    weights = torch.exp(-(slot - 1).float() / gamma) * counted * (slot > 0)
    ids = torch.where(slot == 0, labels, mask_id)
    return BatchBlocks(anchors, ids, torch.where(inside, labels, 0), weights)
