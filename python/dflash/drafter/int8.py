"""A drafter whose decoder layers multiply by weights in 8 bits."""

from __future__ import annotations

import torch

from ..ops import DecoderLayer, int8_layer
from ..target import ValuesFingerprint
from .drafter import Drafter

__all__ = ["Int8Drafter", "draft_in"]


def draft_in(weights: str | None, draft: Drafter | None) -> Drafter | None:
    """Return the drafter itself, or with ``weights="int8"`` one in its place that leaves it as it is.

    Raises:
        ValueError: there is no drafter, or its weights cannot be held in 8 bits.
    """
    if weights is None:
        return draft
    if draft is None:
        raise ValueError(f"draft_weights={weights!r} needs a drafter, got none: leave it out")
    if draft.device.type != "cpu" or draft.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"draft_weights={weights!r} needs a drafter on CPU in float32 or bfloat16, got one on {draft.device} in "
            f"{draft.dtype}: leave it out"
        )
    return Int8Drafter.of(draft)


class Int8Drafter(Drafter):
    """A drafter with another's parameters, whose layers run on copies of their weights in 8 bits.

    What is outside of the layers runs as it is, and so do the products of prefill.
    """

    _layers_in_int8: list[DecoderLayer]
    _made_of: ValuesFingerprint

    @classmethod
    def of(cls, draft: Drafter) -> Int8Drafter:
        """Return a drafter with the parameters of this one, in the same memory.

        Raises:
            ValueError: a value of a weight is infinite or NaN.
        """
        held = cls.__new__(cls)
        held.__dict__.update(draft.__dict__, _stack=None, _layers_in_int8=[], _made_of=ValuesFingerprint())
        held._restack()
        return held

    def _stack_layers(self) -> list[DecoderLayer]:
        """Return the layers in 8 bits, made again if the weights have changed."""
        if not self._made_of.matches([self.layers]):
            self._layers_in_int8 = [int8_layer(layer) for layer in super()._stack_layers()]
            self._made_of.take([self.layers])
        return self._layers_in_int8
