"""Blocks of prompts that the rows of a session share: `PrefixCache`."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from ..state import State


class PrefixCache:
    """Copies of what whole chunks of prompts have left in the caches of their rows, for any row.

    A block is found by a digest of all tokens up to its end, each made from the one before (as vLLM's prefix caching
    does). Chunks begin at multiples of their size, so a block has the target's bits that running it again would give.

    Args:
        state: whose caches they are.
        chunk: tokens of a block.
        max_bytes: memory of all blocks, on the devices of the caches. The block that was used least recently goes
            first, and of one prompt its last.
    """

    def __init__(self, state: State, chunk: int, max_bytes: int) -> None:
        self.chunk, self.max_bytes, self.num_bytes = chunk, max_bytes, 0
        caches = state.target_cache, state.draft_cache, state.history
        self._caches = [cache for cache in caches if cache is not None]
        self._blocks: OrderedDict[bytes, list[list[Tensor]]] = OrderedDict()  # the oldest first; per cache

    def keys(self, ids: Tensor) -> list[bytes]:
        """Return the keys of the whole chunks of ``ids [length]``."""
        flat, keys = ids.to("cpu", torch.int64).numpy(), [b""]
        for stop in range(self.chunk, len(flat) + 1, self.chunk):
            keys.append(hashlib.sha256(keys[-1] + flat[stop - self.chunk : stop].tobytes()).digest())
        return keys[1:]

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def load_(self, key: bytes, row: int, start: int) -> bool:
        """Copy a block to the positions from ``start`` on; False if there is none.

        The row's caches hold what comes before it.
        """
        if (block := self._blocks.get(key)) is None:
            return False
        for cache, tensors in zip(self._caches, block, strict=True):
            cache.load_(row, start, start + self.chunk, tensors)
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that the blocks of a prompt's ``keys`` are used."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def save(self, keys: Sequence[bytes], row: int) -> None:
        """Keep the block of the last of ``keys``, which a row has just run; the others come before it.

        It is dropped if there is no room but that of the others.
        """
        if keys[-1] not in self._blocks:
            stop = len(keys) * self.chunk
            block = [cache.save(row, stop - self.chunk, stop) for cache in self._caches]
            self.num_bytes += _size(block)
            self._blocks[keys[-1]] = block
        self.touch(keys)
        while self.num_bytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= _size(oldest)


def _size(block: list[list[Tensor]]) -> int:
    return sum(tensor.nbytes for tensors in block for tensor in tensors)
