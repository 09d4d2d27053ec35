"""What the benches use of the package beyond its public names.

Only this file follows when the engine changes; every other bench goes through it.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

import dflash
from dflash.engine.runner import Direct, Replay
from dflash.target import decoder_layers, structural_twin

__all__ = ["Direct", "ForcedGenerator", "Parts", "Replay", "decoder_layers", "make_runner", "structural_twin"]


class ForcedGenerator(dflash.Generator):
    """A generator whose target's choices are overwritten, at a random state in the middle of a text.

    Attributes:
        force: called with the block ``[batch, rows]`` and the target's choices ``[batch, rows]`` for the token after
            each row; returns the choices to use.
    """

    force: Callable[[Tensor, Tensor], Tensor]

    def _accept(self, block: Tensor, posterior: Tensor, limits: Tensor, stopped: tuple[int, ...] = ()) -> None:
        super()._accept(block, self.force(block, posterior), limits, stopped)

    def fill_(self) -> None:
        """Fill tokens, features and both caches with random numbers."""
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
        """Put every row between two steps at length ``context``, the last of which emitted ``accepted`` tokens."""
        self.length.fill_(context)
        self.num_context.fill_(accepted)
        self.limits.fill_(self.tokens.shape[1])
        self.done.zero_()

    def share_(self, other: "ForcedGenerator") -> None:
        """Use the tokens, features and caches of ``other`` from now on."""
        self.tokens, self.context = other.tokens, other.context
        self.target_cache, self.draft_cache = other.target_cache, other.draft_cache

    def launcher(self) -> tuple[Replay | Direct, Callable[[], None], Hashable]:
        """Return the runner, the step, and the key under which the runner keeps the step's graph."""
        return self._runner, self.step, self._kind()


def make_runner(report: Tensor) -> Replay | Direct:
    """Return what launches steps that leave ``report`` for the host."""
    return Replay(report) if report.is_cuda else Direct(report)


class Parts:
    """The parts of a step, each callable by itself on the state of a generation that has just ended.

    Args:
        generator: has a drafter, and has just generated one row.
    """

    def __init__(self, generator: dflash.Generator) -> None:
        self._generator, self._draft = generator, generator.draft
        rows, dtype = generator.block_size, generator.target.dtype
        self.block, self.length = generator.block.clamp(min=0).clone(), generator.length.clone()
        generator.num_context.fill_(rows - 6)
        self._features = self.fuse()
        self._hidden = torch.randn(1, rows, self._draft.config.hidden_size, dtype=dtype)
        self._logits, _ = self.verify()
        self._positions = self.length[:, None] + torch.arange(rows) + 1

    def verify(self) -> tuple[Tensor, list[Tensor]]:
        """Run the target over the block."""
        return self._generator.target.forward(self.block, self.length, self._generator.target_cache)

    def draft(self) -> Tensor:
        """Run the drafter over the block, head included."""
        return self._generator._draft_logits(self.block, self._features)

    def fuse(self) -> Tensor:
        """Fuse the context's features."""
        return self._draft.fuse(self._generator.context, self._generator.num_context)

    def draft_head(self) -> Tensor:
        """Compute the logits of drafted rows with the target's head."""
        return self._draft.logits(self._hidden[:, 1:], self._generator.target.head)

    def choose(self) -> Tensor:
        """Choose the block's tokens from the target's logits."""
        return self._generator._select(self._logits, self._positions, self._generator._ones)

    def step(self) -> None:
        """Run the whole step from the same state again."""
        self._generator.done.zero_()
        self._generator.length.copy_(self.length)
        self._generator.step()
