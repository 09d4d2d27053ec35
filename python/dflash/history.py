"""The target's features and best tokens at all positions of a running batch."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .cache import KVCache


class FeatureHistory(KVCache):
    """What the target has computed of all positions: features, as the keys of a layer, and its best tokens.

    Attributes:
        features: ``[batch, 1, capacity, taps * hidden]``, of the positions before ``length``.
        top_ids, top_logits: ``[batch, capacity, 16]`` int64 and float32, of the tokens of answers.
    """

    TOP = 16

    def __init__(self, context: Tensor, capacity: int) -> None:
        """``context [batch, rows, taps * hidden]`` is the state's."""
        batch, _, width = context.shape
        super().__init__(batch, capacity)
        self.features = self.keys[0] = context.new_zeros(batch, 1, capacity, width)
        self.top_logits = context.new_zeros(batch, capacity, self.TOP, dtype=torch.float32)
        self.top_ids = self.top_logits.long()
        self._seeds, self._zeros = self.top_ids.new_zeros(batch), self.top_logits.new_zeros(batch)

    def write_(self, rows: slice, start: Tensor, features: Tensor) -> None:
        """Write ``features [n, count, taps * hidden]`` of some ``rows`` at positions from ``start [n]`` int64 on.

        Those of a row past what it commits are stale, as in every cache.
        """
        row, positions = self._places(rows, start, features.shape[1])
        self.features[row, 0, positions] = features

    def write_top_(self, rows: slice, start: Tensor, logits: Tensor) -> None:
        """Write the best of the target's ``logits [n, count, vocab]`` for positions from ``start [n]`` int64 on."""
        row, positions = self._places(rows, start, logits.shape[1])
        plain = self._seeds[rows], self._zeros[rows], self._zeros[rows]
        self.top_ids[row, positions], self.top_logits[row, positions] = ops.top_candidates(
            logits, positions, *plain, self.TOP
        )

    def of(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a row's features before position ``stop - 1``, and the best ids and logits from ``start`` on."""
        return self.features[row, 0, : stop - 1], self.top_ids[row, start:stop], self.top_logits[row, start:stop]

    def _places(self, rows: slice, start: Tensor, count: int) -> tuple[Tensor, Tensor]:
        positions = start[:, None] + torch.arange(count, device=start.device)
        row = torch.arange(self.batch_size, device=start.device)[rows, None]
        return row, positions.clamp(max=self.capacity - 1)
