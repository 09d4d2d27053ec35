"""Forced acceptance."""

import torch
from torch import Tensor

import dflash

from .pair import BLOCK


class Forced:
    """The target's choices, overwritten so that every step emits the same number of tokens.

    Choice j becomes draft j + 1, which is then accepted, and at the last one to be emitted that draft with its lowest
    bit flipped, which is not. The choices that it replaces are an operand all the same, so that no compiler may leave
    out what they are computed from.
    """

    def __init__(self, device: torch.device) -> None:
        self.flip = torch.zeros(2 * BLOCK, dtype=torch.int64, device=device)
        self.off = torch.zeros(1, dtype=torch.bool, device=device)

    def set_(self, accepted: int) -> None:
        self.flip.zero_()
        self.flip[accepted - 1] = 1

    def __call__(self, block: Tensor, posterior: Tensor) -> Tensor:
        """Of the block ``[batch, rows]``, anchor and drafts, and the choices ``[batch, rows]`` behind each."""
        return torch.where(self.off, posterior, block.roll(-1, 1) ^ self.flip[: block.shape[1]])


class ForcedGenerator(dflash.Generator):
    """Our generator with :class:`Forced` choices, in the middle of a text that never was."""

    forced: Forced

    def _accept(self, block: Tensor, posterior: Tensor, limits: Tensor, stopped: tuple[int, ...] = ()) -> None:
        super()._accept(block, self.forced(block, posterior), limits, stopped)

    def fill_(self) -> None:
        """Random tokens, features, keys and values."""
        self.tokens.random_(0, self.vocab_size)
        self.context.normal_()
        config, embedding = self.target.config, self.target.embedding_weight
        like = embedding.new_empty(self.batch_size, config.num_key_value_heads, 0, config.head_dim)
        for index in range(config.num_hidden_layers):
            for buffer in self.target_cache.layer(index, like, like):
                buffer.normal_()
        for buffer in (*self.draft_cache.keys, *self.draft_cache.values):
            buffer.normal_()

    def place_(self, context: int, accepted: int) -> None:
        """The state between two steps of every row, the last of which emitted ``accepted`` tokens."""
        self.length.fill_(context)
        self.num_context.fill_(accepted)
        self.limits.fill_(self.tokens.shape[1])
        self.done.zero_()
