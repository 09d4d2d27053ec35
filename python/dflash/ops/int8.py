"""Weights of products in 8 bits."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .checks import expect

WeightStorage = Literal["int8"] | None
"""How the weights of products are stored: "int8" for copies in 8 bits, None for the weights as they are."""

_PIECE = 2**22  # values that are widened at a time


class NotFiniteError(ValueError):
    """A weight that is to be stored as int8 has an infinite or NaN value.

    Attributes:
        weight: the weight.
        value: what it has, "NaN" or "infinity".
    """

    def __init__(self, weight: Tensor, value: str) -> None:
        super().__init__(f"a weight that is stored as int8 must be finite, got {value}: use the weight as it is")
        self.weight, self.value = weight, value


class Int8Weight(NamedTuple):
    """A weight in 8 bits with a scale per output channel: it stands for ``values * scales[:, None]``.

    Products round the activations too (see `dflash.ops.reference.round_rows`): sums of integers are exact, and so a
    product's bits are the same with every instruction set and any number of rows.
    """

    values: Tensor  # [out, in] int8, -127 .. 127
    scales: Tensor  # [out] float32

    @classmethod
    @torch.inference_mode(False)  # the tensors outlive a call
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Int8Weight:
        """Return the nearest weight in 8 bits: each channel's largest magnitude becomes 127.

        Args:
            weight: ``[out, in]``, of a floating-point dtype.

        Raises:
            NotFiniteError: a value is infinite or NaN.
        """
        values = torch.empty_like(weight, dtype=torch.int8, memory_format=torch.contiguous_format)
        scales = weight.new_empty(weight.shape[0], dtype=torch.float32)
        for piece, to, scale in zip(*(x.split(_rows(weight)) for x in (weight, values, scales)), strict=True):
            wide = piece.float()
            torch.div(wide.abs().amax(1) if weight.shape[1] else torch.zeros_like(scale), 127, out=scale)
            if not scale.isfinite().all():
                raise NotFiniteError(weight, "NaN" if scale.isnan().any() else "infinity")
            to.copy_((wide / torch.where(scale > 0, scale, 1)[:, None]).round_().clamp_(-127, 127))
        return cls(values, scales)

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``."""
        return self.values.shape

    def wide(self) -> Tensor:
        """Return the values that this stands for, ``[out, in]`` float32, each rounded."""
        return self.values.float() * self.scales[:, None]


Weight = Tensor | Int8Weight
"""A weight ``[out, in]`` of a product."""


def split_weights(*weights: Weight) -> tuple[list[Tensor], Tensor | None]:
    """Return what `linears` takes as ``weights`` and ``scales``. All must be in 8 bits, or none."""
    quantized = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if not quantized:
        return list(weights), None
    if len(quantized) < len(weights):
        raise TypeError("weights of one product must all be in 8 bits or none, got some that are")
    values, scales = zip(*quantized, strict=True)
    return list(values), scales[0] if len(scales) == 1 else torch.cat(scales)


def expect_weight(op: str, name: str, weight: Weight, shape: tuple, dtype: torch.dtype, names: str) -> None:
    """Raise unless ``weight`` has this shape (None: any size), and dtype if it is not in 8 bits."""
    if not isinstance(weight, Int8Weight):
        return expect(op, name, weight, shape, dtype, names)
    expect(op, f"{name}.values", weight.values, shape, torch.int8, names)
    return expect(op, f"{name}.scales", weight.scales, (weight.shape[0],), torch.float32, "out")


def _rows(weight: Tensor) -> int:
    """Return how many rows of a weight are widened at a time."""
    return max(1, _PIECE // max(1, weight.shape[1]))
