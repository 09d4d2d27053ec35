"""The formats in which the weights ``[out, in]`` of products lie in memory: a row each in `FORMATS`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .. import _C

_WIDENED = 2**22  # values that are widened at a time
WeightStorage = Literal["int8"] | None
"""How the weights of products are stored: "int8" for copies in 8 bits, None for the weights as they are."""


class ByteOrder(NamedTuple):
    """The order in which a kernel reads integers of 8 bits.

    Memory holds a tile of features after the other; the last may have fewer. Columns are padded to `_C.row_size`.

    Attributes:
        tile: features of a tile, the first dimension of what is permuted.
        columns: the other dimensions but the outermost: a column's digits.
        order: these dimensions in the order of memory.
        flipped: the bits of a byte that are stored inverted.
    """

    tile: int
    columns: tuple[int, ...]
    order: tuple[int, ...]
    flipped: int = 0

    def pack(self, values: Tensor, size: int) -> Tensor:
        """Return ``values [out, in]`` int8 as ``[out, size]`` uint8 in the order of memory, zeros past ``in``."""
        values = torch.nn.functional.pad(values, (0, size - values.shape[1])).contiguous()
        packed = torch.empty_like(values)
        for natural, memory in self._tiles(values, packed):
            memory.copy_(natural)
        return packed.view(torch.uint8) ^ self.flipped

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the values ``[out, size]`` int8 that `pack` was given, those past ``in`` too."""
        packed = (packed ^ self.flipped).view(torch.int8)
        values = torch.empty_like(packed)
        for natural, memory in self._tiles(values, packed):
            natural.copy_(memory)
        return values

    def _tiles(self, values: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of the whole tiles and of the last one, of both tensors in the order of memory."""
        whole = len(values) // self.tile * self.tile
        for rows, tile in ((slice(0, whole), self.tile), (slice(whole, None), len(values) - whole)):
            if tile and len(values[rows]) and values.shape[1]:
                natural = values[rows].unflatten(1, (-1, *self.columns)).unflatten(0, (-1, tile))
                natural = natural.permute(0, *(1 + i for i in self.order))
                yield natural, packed[rows].view(natural.shape)


class WeightFormat(NamedTuple):
    """A format of weights: integers with a scale per output channel, or None for weights of the storage type.

    What it stands for is the same everywhere: `dflash.ops.reference.linear` multiplies by any format on any device.

    Attributes:
        name: as ops and kernels call it; ``Format`` in params.h.
        storage: as users call it, see `WeightStorage`.
        device: the device whose kernels read it, with every instruction set or architecture; None for all.
        bits: per value.
        rounds_rows: what is multiplied is rounded to 8 bits too, so that sums are of integers
            (`dflash.ops.reference.round_rows`): their bits are the same with every instruction set.
        order: how its values lie in memory.
    """

    name: str
    storage: WeightStorage = None
    device: str | None = None
    bits: int | None = None
    rounds_rows: bool = False
    order: ByteOrder | None = None

    def size(self, columns: int) -> int:
        """Return the bytes of a row of so many columns; of a dense one its elements."""
        return _C.row_size(_C.FORMATS[self.name], columns)


DENSE = WeightFormat("dense")
FORMATS = {
    row.name: row
    for row in (
        DENSE,
        # A word of four columns of each feature in turn. 128 is added to each value (csrc/cpu/linear/linear_int8.h)
        WeightFormat("w8a8", "int8", "cpu", 8, True, ByteOrder(16, (4,), (1, 0, 2), 0x80)),
        # What a lane of a warp has as a factor of mma of 64 columns (csrc/cuda/linear/int8.cuh). Columns are [steps of
        # 16, halves, lanes, pairs]
        WeightFormat("w8a16", "int8", "cuda", 8, False, ByteOrder(8, (4, 2, 4, 2), (1, 0, 4, 2, 5, 3))),
    )
}
"""The formats by name. Which is used where is decided by `format_of` alone."""


def format_of(storage: str, device: str) -> str:
    """Return the format in which kernels for a type of device read weights that are stored so; empty if none do."""
    return next((row.name for row in FORMATS.values() if (row.storage, row.device) == (storage, device)), "")


class NotFiniteError(ValueError):
    """A weight that is to be stored as integers has an infinite or NaN value.

    Attributes:
        weight: the weight.
        value: what it has, "NaN" or "infinity".
    """

    def __init__(self, weight: Tensor, value: str) -> None:
        super().__init__(f"a weight that is stored as integers must be finite, got {value}: use the weight as it is")
        self.weight, self.value = weight, value


class PackedWeight(NamedTuple):
    """A weight, or one per expert, in a format that is not dense: it stands for ``values() * scales[..., None]``."""

    packed: Tensor  # [..., out, size] uint8
    scales: Tensor  # [..., out] float32
    format: str
    columns: int

    @classmethod
    @torch.inference_mode(False)  # the tensors outlive a call
    @torch.no_grad()
    def of(cls, weight: Tensor, format: str) -> PackedWeight:
        """Return the nearest weight ``[..., out, in]``: each channel's largest magnitude becomes the largest integer.

        Raises:
            NotFiniteError: a value is infinite or NaN.
        """
        made, columns = FORMATS[format], weight.shape[-1]
        largest = 2 ** (made.bits - 1) - 1
        packed = weight.new_empty(*weight.shape[:-1], made.size(columns), dtype=torch.uint8)
        scales = weight.new_empty(weight.shape[:-1], dtype=torch.float32)
        rows = made.order.tile * max(1, _WIDENED // (made.order.tile * max(1, columns)))
        for matrices in zip(*map(_matrices, (weight, packed, scales[..., None])), strict=True):
            for piece, to, scale in zip(*(x.split(rows) for x in matrices), strict=True):
                wide = piece.float()
                torch.div(wide.abs().amax(1, True) if columns else torch.zeros_like(scale), largest, out=scale)
                if not scale.isfinite().all():
                    raise NotFiniteError(weight, "NaN" if scale.isnan().any() else "infinity")
                values = (wide / torch.where(scale > 0, scale, 1)).round_().clamp_(-largest, largest)
                to.copy_(made.order.pack(values.to(torch.int8), to.shape[1]))
        return cls(packed, scales, format, columns)

    @torch.inference_mode(False)
    @torch.no_grad()
    def select(self, channels: Tensor) -> PackedWeight:
        """Return the weight of some output channels, in new memory."""
        packed = FORMATS[self.format].order.pack(self.values()[channels], self.packed.shape[1])
        return self._replace(packed=packed, scales=self.scales[channels])

    @property
    def shape(self) -> torch.Size:
        """``[..., out, in]``."""
        return torch.Size((*self.scales.shape, self.columns))

    def values(self) -> Tensor:
        """Return the integers ``[..., out, in]`` int8."""
        unpacked = map(FORMATS[self.format].order.unpack, _matrices(self.packed))
        return torch.stack([*unpacked]).view(self.packed.shape)[..., : self.columns]

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values that this stands for, ``[..., out, in]``, each rounded."""
        out = self.scales.new_empty(self.shape, dtype=dtype)
        return torch.mul(self.values(), self.scales[..., None], out=out)

    def record(self) -> tuple[Tensor, Tensor, int]:
        """Return the fields of ``LinearWeight``, as in params.h."""
        return self.packed, self.scales, _C.FORMATS[self.format]


def _matrices(tensor: Tensor) -> Tensor:
    """Return ``[matrices, rows, columns]`` of a tensor ``[..., rows, columns]``."""
    return tensor.view(-1 if tensor.numel() else tensor.shape[:-2].numel(), *tensor.shape[-2:])


Weight = Tensor | PackedWeight
"""A weight ``[out, in]`` of a product."""
