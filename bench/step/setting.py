"""Setting."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

import dflash
from dflash.target import structural_twin

from .forced import Forced, ForcedGenerator
from .meter import Meter, Waits
from .pair import BLOCK

Run = Callable[[Meter, int, int], None]  # marks the begin of so many steps that each emit so many tokens


@dataclass
class Setting:
    """What all runners of one context and batch share."""

    target: nn.Module
    drafter: dflash.Drafter
    draft_config: dict
    forced: Forced
    waits: Waits
    context: int
    batch: int
    steps: int  # of a round, at most
    compile: bool

    @functools.cached_property
    def generator(self) -> ForcedGenerator:
        return self.make_generator()

    @functools.cached_property
    def peers_target(self) -> nn.Module:
        """The target for loops that are not ours: what they hang on its modules would keep it from being fused."""
        return structural_twin(self.target)

    def make_generator(self, **options) -> ForcedGenerator:
        room = self.context + BLOCK * (self.steps + 2)
        length = -(-room // 64) * 64 - BLOCK  # with the block's rows a multiple of 64, which is kind to every kernel
        generator = ForcedGenerator(
            self.target, self.drafter, max_length=length, batch_size=self.batch, reuse_prefix=False, **options
        )
        generator.forced = self.forced
        return generator


def check(found: Tensor, wanted: int, accepted: int) -> None:
    if not (found == wanted).all():
        raise RuntimeError(f"its steps did not emit {accepted} tokens each: {found.tolist()} instead of {wanted}")
