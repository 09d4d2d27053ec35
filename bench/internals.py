"""What the benches use of the package beyond its public names.

Only this file follows when the engine changes; every other bench goes through it.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

import dflash
from dflash.engine.runner import Direct, Replay
from dflash.target import decoder_layers, structural_twin

__all__ = [
    "Direct",
    "ForcedStep",
    "Parts",
    "Replay",
    "cache_layers",
    "find_layers",
    "make_runner",
    "structural_twin",
]

Force = Callable[[Tensor, Tensor], Tensor]
"""Called with the block ``[batch, rows]`` and the target's choices ``[batch, rows]``; returns the choices to use."""


class _ForcedGenerator(dflash.Generator):
    force: Force

    def _accept(self, block: Tensor, posterior: Tensor, limits: Tensor, stopped: tuple[int, ...] = ()) -> None:
        super()._accept(block, self.force(block, posterior), limits, stopped)


class ForcedStep:
    """A generator's step whose target's choices are overwritten, at a random state in the middle of a text.

    Args:
        target: the target.
        drafter: its drafter.
        force: what overwrites the choices.
        options: of :class:`dflash.Generator`.

    Attributes:
        state: holds ``tokens``, ``length``, ``num_context``, ``block`` and ``context``, and both caches.
        report: what the step writes for the host.
    """

    def __init__(self, target: nn.Module, drafter: dflash.Drafter, force: Force, **options) -> None:
        self._generator = self.state = _ForcedGenerator(target, drafter, reuse_prefix=False, **options)
        self._generator.force = self.force = force
        self.drafter, self.report = drafter, self._generator.report

    def __call__(self) -> None:
        """Take one step."""
        self._generator.step()

    def fill_(self) -> None:
        """Fill tokens, features and both caches with random numbers."""
        state, target = self.state, self._generator.target
        state.tokens.random_(0, self._generator.vocab_size)
        state.context.normal_()
        config = target.config
        like = target.embedding_weight.new_empty(len(state.tokens), config.num_key_value_heads, 0, config.head_dim)
        for index in range(config.num_hidden_layers):
            state.target_cache.layer(index, like, like)
        for cache in (state.target_cache, state.draft_cache):
            for buffers in cache_layers(cache):
                for buffer in buffers:
                    buffer.normal_()

    def place_(self, context: int, accepted: int) -> None:
        """Put every row between two steps at length ``context``, the last of which emitted ``accepted`` tokens."""
        state = self.state
        state.length.fill_(context)
        state.num_context.fill_(accepted)
        state.limits.fill_(state.tokens.shape[1])
        state.done.zero_()

    def share_(self, other: "ForcedStep") -> None:
        """Use the tokens, features and caches of ``other`` from now on."""
        ours, theirs = self.state, other.state
        ours.tokens, ours.context = theirs.tokens, theirs.context
        ours.target_cache, ours.draft_cache = theirs.target_cache, theirs.draft_cache

    def launcher(self) -> tuple[Replay | Direct, Callable[[], None], Hashable]:
        """Return the runner, the step, and the key under which the runner keeps the step's graph."""
        return self._generator._runner, self._generator.step, self._generator._kind()


def cache_layers(cache: object) -> tuple[list[Tensor], list[Tensor]]:
    """Return the keys and the values of a cache, a tensor per layer."""
    keys, values = cache.keys, cache.values
    return (list(keys.values()), list(values.values())) if isinstance(keys, dict) else (keys, values)


def find_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a model."""
    return decoder_layers(model, model.config.num_hidden_layers)


def make_runner(report: Tensor) -> Replay | Direct:
    """Return what launches steps that write ``report`` for the host."""
    return Replay(report) if report.is_cuda else Direct(report)


class Parts:
    """The parts of a step, each callable by itself on the state of a generation that has just ended.

    Args:
        generator: has a drafter, and has just generated one row.
    """

    def __init__(self, generator: dflash.Generator) -> None:
        self._generator, self._draft = generator, generator.draft
        rows, dtype = generator.block_size, self._draft.dtype
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
