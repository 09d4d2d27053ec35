"""Preallocated K/V whose slot index is the absolute position; lengths live on the device, outside."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KVCache", "LazyKVCache"]


class KVCache:
    """``keys[i]``, ``values[i]``: ``[batch_size, num_kv_heads, capacity, head_dim]`` of layer ``i``, never moved.

    Nothing here knows how much of it is in use: whoever appends keeps a length per row, and trims by lowering it.
    Slots at or past that length hold anything and are never read.

    Args:
        num_layers, batch_size, num_kv_heads, capacity, head_dim: the sizes; ``capacity`` counts lookahead slots too.
        rotary: ``(cos, sin)``, each ``[capacity, rotary / 2]`` float32, for whoever appends; kept as it is.
        dtype, device: of every buffer.
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int,
        num_kv_heads: int,
        capacity: int,
        head_dim: int,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch_size, self.capacity, self.rotary = batch_size, capacity, rotary

        def layers() -> list[Tensor]:
            shape = (batch_size, num_kv_heads, capacity, head_dim)
            return [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

        self.keys, self.values = layers(), layers()


class LazyKVCache:
    """The same for a model whose layers are not known beforehand: a layer's buffers come with its first rows.

    Args:
        batch_size, capacity: the sizes that all layers share; heads, widths, dtype and device follow the first rows.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        self.batch_size, self.capacity = batch_size, capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of layer ``index``, made to fit ``key`` and ``value [batch, num_kv_heads, rows, head_dim]``."""
        if index not in self.keys:
            for buffers, like in ((self.keys, key), (self.values, value)):
                buffers[index] = like.new_empty(self.batch_size, like.shape[1], self.capacity, like.shape[3])
        return self.keys[index], self.values[index]
