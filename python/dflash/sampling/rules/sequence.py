"""The tokens that each row of a block sees: the emitted ones, which all rows share, then drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ...state import Tree


__all__ = ["ChainTokens", "SeenTokens", "TreeTokens"]


class SeenTokens(Protocol):
    """The tokens before ``positions [batch, rows]`` as each row sees them."""

    def at(self, places: Tensor) -> Tensor:
        """Return the tokens ``[batch, rows, n]`` at places ``[batch, rows, n]``, which are 0 or more.

        What is returned for places that a row does not see means nothing.
        """
        ...

    def windows(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """Return the windows of ``size`` consecutive tokens that each row sees, each once.

        They come as ``tokens [batch, rows or 1, n + size - 1]``, where window ``i`` begins at token ``i``, and as
        ``is_seen [batch, rows or 1, n]`` bool.
        """
        ...


class ChainTokens:
    """The tokens that the rows of a chain see, which are in one tensor for all of them.

    Args:
        tokens: ``[batch, capacity]`` int64, the emitted ones.
        ids: ``[batch, rows]`` int64, the block.
        positions: ``[batch, rows]`` int64, of the tokens that the rows choose.
    """

    def __init__(self, tokens: Tensor, ids: Tensor, positions: Tensor) -> None:
        self._tokens, self._positions = tokens.scatter(1, positions - 1, ids)[:, None], positions

    def at(self, places: Tensor) -> Tensor:
        return self._tokens.expand(-1, places.shape[1], -1).gather(2, places)

    def windows(self, size: int) -> list[tuple[Tensor, Tensor]]:
        count = self._tokens.shape[2] - size + 1
        if count < 1:
            return []
        starts = torch.arange(count, device=self._tokens.device)
        return [(self._tokens, starts + size <= self._positions[..., None])]


class TreeTokens:
    """The tokens that the rows of a tree see. Only the drafts on their paths are stored per row.

    Args:
        tokens: ``[batch, capacity]`` int64, the emitted ones.
        ids: ``[batch, rows]`` int64, the block.
        length: ``[batch]`` int64, the position of the block's first row.
        tree: which row continues which.
    """

    def __init__(self, tokens: Tensor, ids: Tensor, length: Tensor, tree: Tree) -> None:
        rows = ids.shape[1]
        # Rows that a row does not see are written to one more column, which is cut off again.
        columns = torch.where(tree.visible, tree.depth[:, None], rows)
        path = ids.new_zeros(len(ids), rows, rows + 1).scatter(2, columns, ids[:, None].expand(-1, rows, -1))
        self._path = path[..., :rows]  # [batch, rows, depth]
        self._tokens, self._length, self._depth = tokens[:, None], length[:, None, None], tree.depth[..., None]

    def at(self, places: Tensor) -> Tensor:
        rows, capacity = self._path.shape[1], self._tokens.shape[2]
        emitted = self._tokens.expand(-1, rows, -1).gather(2, places.clamp(max=capacity - 1))
        drafted = self._path.gather(2, (places - self._length).clamp(0, rows - 1))
        return torch.where(places < self._length, emitted, drafted)

    def windows(self, size: int) -> list[tuple[Tensor, Tensor]]:
        count, device = self._tokens.shape[2] - size + 1, self._tokens.device
        # 1. Windows that end on the path, the block's first row included.
        rows = self._path.shape[1]
        places = self._length - (size - 1) + torch.arange(rows + size - 1, device=device)
        is_seen = (places[..., :rows] >= 0) & (torch.arange(rows, device=device) <= self._depth)
        on_path = self.at(places.clamp(min=0).expand(-1, rows, -1)), is_seen
        # 2. Windows of emitted tokens only.
        if count < 1:
            return [on_path]
        return [(self._tokens, torch.arange(count, device=device) + size <= self._length), on_path]
