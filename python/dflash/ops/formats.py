"""The formats in which the weights ``[out, in]`` of products lie in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import _C

_TILE = _C.QUANT_TILE
_WIDENED = 2**22  # int8 values that are widened at a time
WeightStorage = Literal["int8"] | None
"""How the weights of products are stored: "int8" for copies in 8 bits, None for the weights as they are."""


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
    """A weight in 8 bits with a scale per output channel: it stands for ``values() * scales[:, None]``.

    Products round the activations too (`dflash.ops.reference.round_rows`): sums of integers are exact, so their bits
    are the same with every instruction set and any number of rows.
    """

    packed: Tensor  # [out, in] uint8, in the order in which kernels read it (`pack_int8`)
    scales: Tensor  # [out] float32

    @classmethod
    @torch.inference_mode(False)  # the tensors outlive a call
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Int8Weight:
        """Return the nearest weight in 8 bits: each channel's largest magnitude becomes 127.

        Raises:
            NotFiniteError: a value is infinite or NaN.
        """
        packed = torch.empty_like(weight, dtype=torch.uint8, memory_format=torch.contiguous_format)
        scales = weight.new_empty(weight.shape[0], dtype=torch.float32)
        rows = rows_at_once(weight.shape[1])
        for piece, to, scale in zip(*(x.split(rows) for x in (weight, packed, scales)), strict=True):
            wide = piece.float()
            torch.div(wide.abs().amax(1) if weight.shape[1] else torch.zeros_like(scale), 127, out=scale)
            if not scale.isfinite().all():
                raise NotFiniteError(weight, "NaN" if scale.isnan().any() else "infinity")
            values = (wide / torch.where(scale > 0, scale, 1)[:, None]).round_().clamp_(-127, 127)
            to.copy_(pack_int8(values.to(torch.int8)))
        return cls(packed, scales)

    @torch.inference_mode(False)
    @torch.no_grad()
    def select(self, channels: Tensor) -> Int8Weight:
        """Return the weight of some output channels, in new memory."""
        return Int8Weight(pack_int8(self.values()[channels]), self.scales[channels])

    @property
    def shape(self) -> torch.Size:
        """``[out, in]``."""
        return self.packed.shape

    def values(self) -> Tensor:
        """Return the integers ``[out, in]`` int8, -127 .. 127."""
        return unpack_int8(self.packed)

    def wide(self) -> Tensor:
        """Return the values that this stands for, ``[out, in]`` float32, each rounded."""
        return self.values().float() * self.scales[:, None]


Weight = Tensor | Int8Weight
"""A weight ``[out, in]`` of a product."""


def split_weights(*weights: Weight) -> tuple[list[Tensor], Tensor | None]:
    """Return what `linears` takes as ``weights`` and ``scales``. All must be in 8 bits, or none."""
    quantized = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if not quantized:
        return list(weights), None
    if len(quantized) < len(weights):
        raise TypeError("weights of one product must all be in 8 bits or none, got some that are")
    packed, scales = zip(*quantized, strict=True)
    return list(packed), scales[0] if len(scales) == 1 else torch.cat(scales)


def rows_at_once(width: int) -> int:
    """Return how many rows of an int8 weight are widened at a time: whole tiles."""
    return _TILE * max(1, _WIDENED // (_TILE * max(1, width)))


def pack_int8(values: Tensor) -> Tensor:
    """Return int8 values ``[out, in]`` as the kernels read them: uint8, of the same shape, 128 added to each.

    Of a tile of 16 rows, memory holds four elements of each row, then the next four. The last tile may have fewer rows,
    and the last elements may be fewer than four.
    """
    packed = torch.empty_like(values, dtype=torch.uint8, memory_format=torch.contiguous_format)
    for tiles, rows, columns in _tiles(packed):
        tiles.copy_((values[rows, columns].short() + 128).reshape(tiles.shape))
    return packed


def unpack_int8(packed: Tensor) -> Tensor:
    """Return the int8 values ``[out, in]`` that `pack_int8` was given."""
    values = torch.empty_like(packed, dtype=torch.int8)
    for tiles, rows, columns in _tiles(packed):
        to = values[rows, columns]
        to.copy_(tiles.reshape(to.shape).short() - 128)
    return values


def _tiles(packed: Tensor) -> Iterator[tuple[Tensor, slice, slice]]:
    """Yield views ``[tiles, rows, words, elements]`` of a packed weight, and which rows and columns each has."""
    (out, width), whole = packed.shape, packed.shape[1] // 4 * 4
    for rows, size in ((slice(0, out // _TILE * _TILE), _TILE), (slice(out // _TILE * _TILE, out), out % _TILE)):
        for columns, each in ((slice(0, whole), 4), (slice(whole, width), width % 4)):
            if rows.start < rows.stop and columns.start < columns.stop:
                tiles = packed[rows].view(-1, size * width)[:, size * columns.start : size * columns.stop]
                yield tiles.unflatten(1, (-1, size, each)).transpose(1, 2), rows, columns
