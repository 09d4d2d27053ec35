"""What the benches use of the package beyond its public names.

Only this file follows when the engine changes; every other bench goes through it.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

import dflash
from dflash.engine import Direct, Replay
from dflash.proposers import Block
from dflash.sampling import KeyedAcceptance
from dflash.target import find_layers, structural_twin

__all__ = ["Direct", "ForcedGenerator", "Parts", "Replay", "find_layers", "make_runner", "structural_twin"]


class ForcedAcceptance(KeyedAcceptance):
    """Acceptance whose choices are overwritten.

    Args:
        generator: its ``force`` does it.
    """

    def __init__(self, generator: "ForcedGenerator") -> None:
        super().__init__(generator.batch_size, generator.engine.target.device)
        self._generator = generator

    def choose(self, logits: Tensor, block: Block, state: object) -> Tensor:
        """Return the forced choices ``[batch, rows]``."""
        return self._generator.force(block.ids, super().choose(logits, block, state))


class ForcedGenerator(dflash.Generator):
    """A generator whose target's choices are overwritten, at a random state in the middle of a text.

    Attributes:
        force: called with the block ``[batch, rows]`` and the target's choices ``[batch, rows]`` for the token after
            each row; returns the choices to use.
    """

    force: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)
        self.engine.keyed = self.engine.acceptance = ForcedAcceptance(self)

    def fill_(self) -> None:
        """Fill tokens, features and both caches with random numbers."""
        state, target = self.state, self.engine.target
        state.tokens.random_(0, self.vocab_size)
        state.context.normal_()
        config, embedding = target.config, target.embedding_weight
        like = embedding.new_empty(self.batch_size, config.num_key_value_heads, 0, config.head_dim)
        for index in range(config.num_hidden_layers):
            for buffer in state.target_cache.layer(index, like, like):
                buffer.normal_()
        for buffer in state.draft_cache.buffers:
            buffer.normal_()

    def place_(self, context: int, accepted: int) -> None:
        """Put every row between two steps at length ``context``, the last of which emitted ``accepted`` tokens."""
        state = self.state
        state.length.fill_(context)
        state.num_context.fill_(accepted)
        state.limits.fill_(state.tokens.shape[1])
        state.done.zero_()

    def share_(self, other: "ForcedGenerator") -> None:
        """Use the tokens, features and caches of ``other`` from now on."""
        for name in ("tokens", "context", "target_cache", "draft_cache"):
            setattr(self.state, name, getattr(other.state, name))

    def launcher(self) -> tuple[Replay | Direct, Callable[[], None], Hashable]:
        """Return the runner, the step, and the key under which the runner keeps the step's graph."""
        return self.runner, self.step, self.engine.kind


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
        self._engine, self._state = generator.engine, generator.state
        rows, dtype = generator.block_size, self._engine.target.dtype
        self.block, self.length = self._state.block.clamp(min=0).clone(), self._state.length.clone()
        self._state.num_context.fill_(rows - 6)
        self._features = self.fuse()
        self._hidden = torch.randn(1, rows, self._draft.config.hidden_size, dtype=dtype)
        self._logits, _ = self.verify()

    def verify(self) -> tuple[Tensor, list[Tensor]]:
        """Run the target over the block."""
        return self._engine.target.forward(self.block, self.length, self._state.target_cache)

    def draft(self) -> Tensor:
        """Run the drafter over the block, head included."""
        return self._engine.proposer.logits(self.block, self._features, self._state)

    def fuse(self) -> Tensor:
        """Fuse the context's features."""
        return self._draft.fuse(self._state.context, self._state.num_context)

    def draft_head(self) -> Tensor:
        """Compute the logits of drafted rows with the target's head."""
        return self._draft.logits(self._hidden[:, 1:], self._engine.target.head)

    def choose(self) -> Tensor:
        """Choose the block's tokens from the target's logits."""
        return self._engine.keyed.choose(self._logits, Block(self.block), self._state)

    def step(self) -> None:
        """Run the whole step from the same state again."""
        self._state.done.zero_()
        self._state.length.copy_(self.length)
        self._generator.step()
