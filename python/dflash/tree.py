"""The shape of a draft tree: which row of a block continues which."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Tree"]


class Tree(NamedTuple):
    """Which rows of a block each row continues. Row 0 is the anchor, and parents come before their children.

    Row ``i`` takes slot ``length + i`` of the cache and stands at position ``length + depth[i]``. A row that is missing
    has parent -1, depth 0 and only its own bit.

    Attributes:
        parents: ``[batch, rows]`` int64, -1 for the anchor.
        depth: ``[batch, rows]`` int64, each row's distance from the anchor.
        ancestors: ``[batch, rows, ceil(rows / 64)]`` int64: bit ``j % 64`` of word ``j // 64`` is set for the row
            itself and for all rows on its path from the anchor, which is one of them.
    """

    parents: Tensor
    depth: Tensor
    ancestors: Tensor

    @property
    def visible(self) -> Tensor:
        """``[batch, rows, rows]`` bool: the rows on the path of each row, which it sees; itself and the anchor too."""
        rows = torch.arange(self.depth.shape[1], device=self.depth.device)
        return (self.ancestors[..., rows // 64] >> rows % 64) & 1 == 1
