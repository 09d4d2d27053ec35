"""Forced acceptance."""

from __future__ import annotations

import torch
from random_pair import BLOCK, MASK
from torch import Tensor

import dflash.state


class Forced:
    """Overwrites the target's choices so that every step emits the same number of tokens.

    Choice j becomes draft j + 1, which is then accepted. The last choice to be emitted becomes its draft with the
    lowest bit flipped, which is not. The replaced choices stay an operand, or a compiler could drop what computes them.
    """

    def __init__(self, device: torch.device) -> None:
        self._accepted, self._trees = 1, dict[int, ForcedTree]()
        self.flip = torch.zeros(2 * BLOCK, dtype=torch.int64, device=device)
        self.off = torch.zeros(1, dtype=torch.bool, device=device)

    def set_(self, accepted: int) -> None:
        """Let every step emit ``accepted`` tokens from now on."""
        self._accepted = accepted
        self.flip.zero_()
        self.flip[accepted - 1] = 1
        for tree in self._trees.values():
            tree.set_(accepted)

    def tree(self, rows: int) -> ForcedTree:
        """Return what forces trees of so many rows, to emit as many tokens."""
        if rows not in self._trees:
            self._trees[rows] = ForcedTree(rows, self.off)
            self._trees[rows].set_(self._accepted)
        return self._trees[rows]

    def __call__(self, block: Tensor, posterior: Tensor) -> Tensor:
        """Return the choices to use, ``[batch, rows]``.

        Args:
            block: ``[batch, rows]``, the anchor and the drafts.
            posterior: ``[batch, rows]``, the target's choice for the token after each row.
        """
        return torch.where(self.off, posterior, block.roll(-1, 1) ^ self.flip[: block.shape[1]])


class ForcedTree:
    """Overwrites the drafted tree and the target's choices so that every step emits the same number of tokens.

    Trees of random weights are flat. The forced one is 15 deep, and all depths have as many rows, of which the last is
    accepted: every accepted row then has to be moved (from 32 rows on). What is replaced stays an operand.
    """

    def __init__(self, rows: int, off: Tensor) -> None:
        self.off, width = off, (rows - 1) // (BLOCK - 1)
        self.path = [width * depth for depth in range(BLOCK)]
        # 1. The shape; rows that are left over continue the anchor
        parents = [-1] + [self.path[(row - 1) // width] if row <= self.path[-1] else 0 for row in range(1, rows)]
        depth, ancestors = [0], [1]
        for row in range(1, rows):
            depth.append(depth[parents[row]] + 1)
            ancestors.append(ancestors[parents[row]] | 1 << row)
        words = [[_signed(bits >> 64 * word) for word in range(-(-rows // 64))] for bits in ancestors]
        # 2. Tensors; every row has a token of its own
        self.shape = dflash.state.Tree(*(torch.tensor([x], device=off.device) for x in (parents, depth, words)))
        self.ids = torch.arange(MASK + 1, MASK + 1 + rows, device=off.device)[None]
        self.choices = torch.full_like(self.ids, MASK)

    def set_(self, accepted: int) -> None:
        """Let every step emit ``accepted`` tokens from now on."""
        self.choices.fill_(MASK)  # no row has it
        for row, following in zip(self.path, self.path[1:accepted], strict=False):
            self.choices[0, row] = self.ids[0, following]

    def replace(self, ids: Tensor, tree: dflash.state.Tree) -> tuple[Tensor, dflash.state.Tree]:
        """Return the ids and the tree to verify instead of the drafted ones."""
        forced = torch.cat([ids[:, :1], self.ids[:, 1:].expand(len(ids), -1)], 1)
        shape = (torch.where(self.off, drafted, wanted) for drafted, wanted in zip(tree, self.shape, strict=True))
        return torch.where(self.off, ids, forced), dflash.state.Tree(*shape)

    def __call__(self, block: Tensor, posterior: Tensor) -> Tensor:
        """Return the choices to use, ``[batch, rows]``; see `Forced`."""
        return torch.where(self.off, posterior, self.choices)


def _signed(bits: int) -> int:
    bits &= (1 << 64) - 1
    return bits - (bits >> 63 << 64)
