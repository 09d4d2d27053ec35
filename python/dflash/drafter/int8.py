"""A drafter whose decoder layers multiply by weights in 8 bits."""

from __future__ import annotations

from typing import Any

import torch

from ..ops import DecoderLayer, Int8Weight, NotFiniteError, WeightStorage, int8_weights
from ..targets import ValuesFingerprint, not_finite
from .drafter import Drafter


def check_draft_weights(weights: WeightStorage, draft: Drafter | None) -> None:
    """Raise ValueError unless a drafter's weights can be stored so, if they are finite; None for no drafter."""
    if weights is None:
        return
    if draft is None:
        raise ValueError(f"draft_weights={weights!r} needs a drafter, got draft=None or block_size=1: leave it out")
    if draft.device.type != "cpu" or draft.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"draft_weights={weights!r} needs a drafter on CPU in float32 or bfloat16, got one on {draft.device} in "
            f"{draft.dtype}: leave it out"
        )


def quantized_draft(weights: WeightStorage, draft: Drafter) -> Drafter:
    """Return the drafter itself, or with ``weights="int8"`` an `Int8Drafter` of it."""
    return draft if weights is None else Int8Drafter.of(draft)


class Int8Drafter(Drafter):
    """A drafter with another's parameters, whose layers run on copies of their weights in 8 bits.

    What is outside of the layers runs as it is, and so do the products of prefill.
    """

    _copies: list[dict[str, Int8Weight]]  # per layer
    _quantized_values: ValuesFingerprint

    @classmethod
    def of(cls, draft: Drafter) -> Int8Drafter:
        """Return a drafter with the parameters of ``draft``, in the same memory. Raises ValueError if one is NaN."""
        stored = cls.__new__(cls)
        stored.__dict__.update(draft.__dict__, _stack=None, _copies=[], _quantized_values=ValuesFingerprint())
        stored._restack()
        return stored

    def forget_values(self) -> None:
        """Read all weights again at the next `refresh`."""
        super().forget_values()
        self._quantized_values = ValuesFingerprint()

    def _stack_layers(self) -> list[DecoderLayer]:
        """Return the layers in 8 bits, made again if the weights have changed."""
        layers = super()._stack_layers()
        if not self._quantized_values.matches([self.layers]):
            try:
                self._copies = list(map(int8_weights, layers))
            except NotFiniteError as error:
                raise ValueError(not_finite("draft_weights", self, error)) from error
            self._quantized_values.take([self.layers])
        return [layer._replace(**copies) for layer, copies in zip(layers, self._copies, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_copies": [], "_quantized_values": ValuesFingerprint()}
