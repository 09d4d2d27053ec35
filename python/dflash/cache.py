"""Preallocated keys and values, one slot per absolute position. Lengths live outside, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KVCache"]


class KVCache:
    """Keys and values of every layer, ``[batch_size, num_kv_heads, capacity, head_dim]`` each, at fixed addresses.

    The cache does not know how much of it is in use. The caller keeps a length per row and trims by lowering it;
    slots at or past the length are stale and never read.

    Attributes:
        keys, values: layer index -> buffer. A layer that shares another's keys and values has none.
        rotary: ``(cos, sin)``, each ``[capacity, rotary / 2]`` float32, for layers on `dflash.ops`; else None.

    Args:
        batch_size: sequences.
        capacity: positions of each sequence, lookahead slots included.
        rotary: see above.
    """

    def __init__(self, batch_size: int, capacity: int, rotary: tuple[Tensor, Tensor] | None = None) -> None:
        self.batch_size, self.capacity, self.rotary = batch_size, capacity, rotary
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def buffers(self) -> list[Tensor]:
        """Every buffer: the keys of all layers, then the values."""
        return [*self.keys.values(), *self.values.values()]

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers of a layer, allocated at its first call.

        Args:
            index: the layer.
            key: ``[batch, num_kv_heads, rows, head_dim]``; its heads, width, dtype and device are the buffer's.
            value: likewise.
        """
        if index not in self.keys:
            for buffers, like in ((self.keys, key), (self.values, value)):
                buffers[index] = like.new_empty(self.batch_size, like.shape[1], self.capacity, like.shape[3])
        return self.keys[index], self.values[index]

    def allocate(
        self, num_layers: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        """Allocate the missing buffers of layers ``0 .. num_layers - 1`` and return the cache."""
        like = torch.empty(1, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        for index in range(num_layers):
            self.layer(index, like, like)
        return self

    def commit_(self, length: Tensor, num_context: Tensor) -> None:
        """Follow a step that committed the first rows of its block. Does nothing in this class.

        Called within every step, after the counters have advanced. A chain's committed rows already are in the slots
        of their positions, and the length trims the rest. A tree's cache moves the rows of the committed path to
        these slots. A recurrent cache rolls its state forward by ``num_context`` tokens. Implementations launch work
        of fixed shape: they never wait for the device, allocate nothing and branch on no value.

        Args:
            length: ``[batch]`` int64, positions committed so far.
            num_context: ``[batch]`` int64, how many of them this step committed; 0 for a row that has finished.
        """
