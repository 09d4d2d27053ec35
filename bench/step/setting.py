"""What all runners share at one context and batch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from internals import ForcedStep, structural_copy
from random_pair import BLOCK, Pair
from torch import Tensor, nn

from .forced import Forced
from .meter import Meter, Waits

Run = Callable[[Meter, int, int], None]  # (meter, accepted, steps): marks the start of each of `steps` steps


@dataclass
class Setting:
    """One context and batch, and what its runners share.

    Attributes:
        pair: target and drafter.
        forced: the acceptance of every runner.
        waits: how long the host has waited so far.
        context: positions in the caches when a round starts.
        batch: rows.
        steps: per round, at most.
        compile: whether runners that torch.compile makes are compiled, or run as they are.
        tree_rows: the most rows of a tree; the caches have room for them.
    """

    pair: Pair
    forced: Forced
    waits: Waits
    context: int
    batch: int
    steps: int
    compile: bool
    tree_rows: int = 0

    @functools.cached_property
    def ours(self) -> ForcedStep:
        """Our step with the target's own modules, which owns the caches."""
        return self.make_step(fused=False)

    @functools.cached_property
    def peers_target(self) -> nn.Module:
        """The target for loops that are not ours: their hooks on its modules would keep ours from being fused."""
        return structural_copy(self.pair.target)

    def make_step(self, **options) -> ForcedStep:
        """Return a step of a generator with these options and room for a round."""
        room = self.context + BLOCK * (self.steps + 2) + self.tree_rows
        length = -(-room // 64) * 64 - BLOCK  # with the block's rows a multiple of 64, which suits every kernel
        target, drafter, _ = self.pair
        force = self.forced.tree(options["tree"]) if "tree" in options else self.forced
        return ForcedStep(target, drafter, force, max_length=length, batch_size=self.batch, **options)


def check(found: Tensor, wanted: int, accepted: int) -> None:
    """Raise unless every step emitted ``accepted`` tokens, so that ``found`` equals ``wanted``."""
    if not (found == wanted).all():
        raise RuntimeError(f"its steps did not emit {accepted} tokens each: got {found.tolist()}, expected {wanted}")
