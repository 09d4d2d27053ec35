"""What the benches use of the package beyond its public names.

Only this file follows when the engine changes; every other bench goes through it.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

import dflash
from dflash import ops
from dflash.engine import Direct, Replay
from dflash.state import Block
from dflash.targets import find_layers, structural_twin

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


class _ForcedAcceptance:
    """An acceptance whose choices are overwritten."""

    def __init__(self, acceptance, force: Force) -> None:
        self._acceptance, self._force = acceptance, force

    def choose(self, logits: Tensor, block, state) -> Tensor:
        return self._force(block.ids, self._acceptance.choose(logits, block, state))


class _ForcedProposer:
    """A proposer of trees that are overwritten."""

    def __init__(self, proposer, replace: Callable) -> None:
        self._proposer, self._replace = proposer, replace

    def propose(self, state) -> Block:
        block = self._proposer.propose(state)
        return Block(*self._replace(block.ids, block.tree))

    def __getattr__(self, name: str):
        return getattr(self._proposer, name)


class ForcedStep:
    """A generator's step whose target's choices are overwritten, at a random state in the middle of a text.

    Args:
        target: the target.
        drafter: its drafter.
        force: what overwrites the choices; with ``tree`` also the drafted trees, by its ``replace``.
        options: of `dflash.Generator`.

    Attributes:
        state: the engine's.
        report: what the step writes for the host.
    """

    def __init__(self, target: nn.Module, drafter: dflash.Drafter, force: Force, **options) -> None:
        self._generator = dflash.Generator(target, drafter, reuse_prefix=False, **options)
        engine = self._generator.engine
        if rows := options.get("tree"):
            engine.tree.configure(engine.rules, samples=False, rows=rows)
            engine.proposer = _ForcedProposer(engine.tree, force.replace)
        engine.acceptance = _ForcedAcceptance(engine.acceptance, force)
        self.drafter, self.force = drafter, force
        self.state, self.report = engine.state, engine.state.report.tensor

    def __call__(self) -> None:
        """Take one step."""
        self._generator.step()

    def fill_(self) -> None:
        """Fill tokens, features and both caches with random numbers."""
        state, target = self.state, self._generator.engine.target
        state.tokens.random_(0, self._generator.vocab_size)
        state.context.normal_()
        config, sizes = target.config, {"dtype": target.dtype, "device": target.device}
        state.target_cache.allocate(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, **sizes)
        for buffer in (*state.target_cache.buffers, *state.draft_cache.buffers):
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
        self._generator.engine.target.refresh(ours.target_cache)

    def launcher(self) -> tuple[Replay | Direct, Callable[[], None], Hashable]:
        """Return the runner, the step, and the key under which the runner keeps the step's graph."""
        return self._generator.runner, self._generator.step, self._generator.engine.kind


def cache_layers(cache: object) -> tuple[list[Tensor], list[Tensor]]:
    """Return the keys and the values of a cache, a tensor per layer."""
    return list(cache.keys.values()), list(cache.values.values())


def make_runner(report: Tensor) -> Replay | Direct:
    """Return what launches steps that write ``report`` for the host."""
    return Replay(report) if report.is_cuda else Direct(report)


class Parts:
    """The parts of a step, each callable by itself on the state of a generation that has just ended.

    Args:
        generator: has a drafter, and has just generated one row.
    """

    def __init__(self, generator: dflash.Generator) -> None:
        self._engine, self._state, self._draft = generator.engine, generator.state, generator.draft
        self._step = generator.step
        rows, dtype = generator.block_size, self._draft.dtype
        self.block, self.length = self._state.block.clamp(min=0).clone(), self._state.length.clone()
        self._state.num_context.fill_(rows - 6)
        self._features = self.fuse()
        self._hidden = torch.randn(1, rows, self._draft.config.hidden_size, dtype=dtype)
        self._logits, _ = self.verify()
        self._positions = self._state.positions(rows).clone()

    def verify(self) -> tuple[Tensor, list[Tensor]]:
        """Run the target over the block."""
        return self._engine.target.forward(self.block, self.length, self._state.target_cache)

    def draft(self) -> Tensor:
        """Run the drafter over the block, head included."""
        proposer = self._engine.proposer
        return proposer.predict(proposer.rows_for(self._state, proposer.num_drafts), self._features, self._state).logits

    def draft_layers(self) -> Tensor:
        """Run the drafter over the block, without the head."""
        embeds = self._engine.proposer.rows_for(self._state, self.block.shape[1] - 1).embeds
        return self._draft(self._features, self._state.num_context, embeds, self._state.length, self._state.draft_cache)

    def propose(self) -> Tensor:
        """Draft a block as the last call did, context and draws included."""
        return self._engine.proposer.propose(self._state).ids

    def fuse(self) -> Tensor:
        """Fuse the context's features."""
        return self._draft.fuse(self._state.context, self._state.num_context)

    def draft_head(self) -> Tensor:
        """Compute the logits of drafted rows with the target's head."""
        return self._draft.logits(self._hidden[:, 1:], self._engine.target.head)

    def choose(self) -> Tensor:
        """Choose the block's tokens from the target's logits."""
        return self._engine.keyed.choose_at(self._logits, self._positions, self._state)

    def tree(self, rows: int, greedy: bool) -> dict[str, Callable[[], object]]:
        """Return the parts of a step that only a tree has, by name; the drafter's pass has been run.

        Args:
            rows: of the tree.
            greedy: whether the temperature is 0.
        """
        engine, state = self._engine, self._state
        # 1. A tree of real logits, half of whose depths are accepted
        proposer = engine.tree
        proposer.configure(engine.rules, samples=not greedy, rows=rows)
        logits = self._draft_logits()
        positions = state.positions(proposer.num_drafts)
        candidates = proposer.candidates(logits, positions, state.sampling)
        ids, parents, depth, _, _ = ops.build_tree(state.anchor[:, 0], *candidates, rows)
        choices, row = torch.full_like(ids, -1), int(depth[0].clamp(max=self.block.shape[1] // 2).argmax())
        while row > 0:
            choices[0, parents[0, row]] = ids[0, row]
            row = int(parents[0, row])
        choices = torch.where(choices < 0, ids.amin(1, keepdim=True), choices)
        # 2. Where it is kept
        told = [torch.zeros_like(self.block) for _ in range(3)]
        features = self._state.context.new_zeros(1, rows, self._state.context.shape[2])
        states = [x.clone() for x in (state.tokens, self.length, state.num_context, state.done)]
        first = self.length.clone()

        def walk() -> None:
            states[1].copy_(first)
            states[3].zero_()
            ops.accept_path_(ids, parents, choices, state.stop_token_ids, state.limits + rows, *states, *told)

        walk()
        caches = cache_layers(state.target_cache)
        return {
            "candidates": lambda: proposer.candidates(logits, positions, state.sampling),
            "build": lambda: ops.build_tree(state.anchor[:, 0], *candidates, rows),
            "walk": walk,
            "compact": lambda: ops.compact_kv_(told[0], states[2], first, *caches),
            "gather": lambda: ops.gather_rows_(features, told[0], state.context),
        }

    def _draft_logits(self) -> Tensor:
        return self._engine.tree.predict(self.block, self._features, self._state).logits

    def step(self) -> None:
        """Run the whole step from the same state again."""
        self._state.done.zero_()
        self._state.length.copy_(self.length)
        self._step()
