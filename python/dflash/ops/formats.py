"""The formats in which the weights ``[out, in]`` of products lie in memory: a row each in `FORMATS`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from ..settings import WeightStorage

_TILE = 16  # features of a tile of a weight in blocks
_WIDENED = 2**22  # values that are widened at a time


class Order:
    """The order in which a kernel reads the bytes of a weight: tiles of features; the last may have fewer."""

    flipped = 0  # the bits of a byte that are stored inverted

    def pack(self, values: Tensor, size: int) -> Tensor:
        """Return bytes ``values [out, in]`` as ``[out, size]`` uint8 in the order of memory, zeros past ``in``."""
        values = torch.nn.functional.pad(values, (0, size - values.shape[1])).contiguous()
        packed = torch.empty_like(values)
        for natural, memory in self._views(values, packed):
            memory.copy_(natural)
        packed = packed.view(torch.uint8)
        return packed.bitwise_xor_(self.flipped) if self.flipped else packed

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the values ``[out, size]`` uint8 that `pack` was given, those past ``in`` too."""
        packed = packed ^ self.flipped if self.flipped else packed
        values = torch.empty_like(packed)
        for natural, memory in self._views(values, packed):
            natural.copy_(memory)
        return values

    def _views(self, values: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of both tensors in the order of memory."""
        raise NotImplementedError


def _tiles(values: Tensor, packed: Tensor, tile: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``[tiles, tile, size]`` of both for the whole tiles, then for the last one."""
    whole = len(values) // tile * tile
    for rows, features in ((slice(0, whole), tile), (slice(whole, None), len(values) - whole)):
        if features and values[rows].numel():
            yield values[rows].unflatten(0, (-1, features)), packed[rows].unflatten(0, (-1, features))


@dataclass(frozen=True)
class ByteOrder(Order):
    """The order of integers of 8 bits. Columns are padded to `_C.row_size`.

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

    def _views(self, values: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for natural, memory in _tiles(values, packed, self.tile):
            natural = natural.unflatten(2, (-1, *self.columns)).permute(0, *(1 + i for i in self.order))
            yield natural, memory.view(natural.shape)


@dataclass(frozen=True)
class TileOrder(Order):
    """The order of weights in blocks, tiles of 16 features.

    A chunk of a tile is lines of two bytes of each feature, then lines of four (csrc/cpu/linear/blocks.h).

    Attributes:
        shorts, words: the lines of a chunk that are two and four bytes of each feature.
    """

    shorts: int
    words: int

    def _views(self, values: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        short, size = 2 * self.shorts, 2 * self.shorts + 4 * self.words
        for natural, memory in _tiles(values, packed, _TILE):
            tile = natural.shape[1]
            natural = natural.unflatten(2, (-1, size)).transpose(1, 2)
            memory = memory.view(-1, natural.shape[1], tile * size)
            for place, unit in ((slice(0, short), 2), (slice(short, None), 4)):
                lines = natural[..., place].unflatten(-1, (-1, unit)).transpose(2, 3)
                yield lines, memory[..., place.start * tile : short * tile if unit == 2 else None].view(lines.shape)


@dataclass(frozen=True)
class GroupOrder(Order):
    """The order of weights with groups of columns, tiles of eight features (csrc/cuda/linear/groups.cuh).

    A feature's bytes are its codes, as many as whole 64 columns have, then what scales them. Codes of 4 bits are two
    per byte: of 16 columns the first eight are in the lower halves.

    Attributes:
        bits: of a code.
        group: columns that share a scale.
        scales: what is stored of groups: a "word" of four bytes, two "half" numbers (scale and minimum), or two bytes
            per 32 columns, then two half numbers per 256 ("super").
    """

    bits: int
    group: int
    scales: str

    def parts(self, size: int) -> tuple[int, int]:
        """Return how many of a feature's bytes are codes, and how many are codes or bytes of groups."""
        step = 8 * self.bits + (5 if self.scales == "super" else 256 // self.group)  # of 64 columns
        steps = size // step
        return steps * 8 * self.bits, steps * (8 * self.bits + 4 * (self.scales == "super"))

    def _views(self, values: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for natural, memory in _tiles(values, packed, 8):
            tile, (codes, end) = natural.shape[1], self.parts(natural.shape[2])
            memory = memory.flatten(1)
            # Digits of a place among a feature's codes: 64 columns, a lane's words, halves or steps, lanes, pairs
            lanes = natural[..., :codes].unflatten(2, (-1, self.bits // 2, 2, 4, 2)).permute(0, 2, 1, 5, 3, 6, 4)
            yield lanes, memory[:, : tile * codes].view(lanes.shape)
            for first, last, unit in ((codes, end, 2), (end, natural.shape[2], 4)):
                if first < last:
                    groups = natural[..., first:last].unflatten(2, (-1, unit)).transpose(1, 2)
                    yield groups, memory[:, tile * first : tile * last].view(groups.shape)


class WeightFormat(NamedTuple):
    """A format of weights: integers with scales, or weights of the storage type.

    What it stands for is the same everywhere: `dflash.ops.reference.linear` multiplies by any format on any device.

    Attributes:
        name: as ops and kernels call it; ``Format`` in params.h.
        storage: as users call it, see `WeightStorage`.
        device: the device whose kernels read it, with every instruction set or architecture; None for all.
        row_group: what is multiplied is rounded to 8 bits too, so many adjacent elements of a row by one scale
            (`dflash.ops.reference.round_rows`). Sums are of integers, with the same bits on every instruction set.
        order: how its values lie in memory; of blocks and groups the bytes of their features.
        blocks: the type of a GGUF file's tensors whose integers and scales it holds.
    """

    name: str
    storage: WeightStorage = None
    device: str | None = None
    row_group: int | None = None
    order: ByteOrder | TileOrder | GroupOrder | None = None
    blocks: str = ""

    def size(self, columns: int) -> int:
        """Return the bytes of a row of so many columns; of a dense one its elements."""
        return _C.row_size(_C.FORMATS[self.name], columns)


def _blocks(name: str, blocks: str = "") -> WeightFormat:
    """Return the row of a format in blocks, which the kernels describe (``kBlockFormats`` in params.h)."""
    columns, bits, _, scales, *_ = _C.coding(_C.FORMATS[name])
    size, codes = _C.row_size(_C.FORMATS[name], columns), columns // 32 * 4 * bits
    shorts = (size - codes) // 2 if scales in ("half", "super") else 0
    return WeightFormat(name, None, "cpu", 32, TileOrder(shorts, (size - 2 * shorts) // 4), blocks)


def _groups(name: str) -> WeightFormat:
    """Return the row of a format with groups of columns."""
    return WeightFormat(name, None, "cuda", None, GroupOrder(*_C.grouping(_C.FORMATS[name])))


DENSE = WeightFormat("dense")
FORMATS = {
    row.name: row
    for row in (
        DENSE,
        # A word of four columns of each feature in turn. 128 is added to each value (csrc/cpu/linear/linear_int8.h)
        WeightFormat("w8a8", "int8", "cpu", 64, ByteOrder(16, (4,), (1, 0, 2), 0x80)),
        # What a lane of a warp has as a factor of mma of 64 columns (csrc/cuda/linear/int8.cuh). Columns are [steps of
        # 16, halves, lanes, pairs]
        WeightFormat("w8a16", "int8", "cuda", None, ByteOrder(8, (4, 2, 4, 2), (1, 0, 4, 2, 5, 3))),
        # Codes in 4 or 8 bits with scales per group of columns, by the bytes of a weight
        *map(_groups, ("w4a16g128", "w4a16g32k", "w4a16g32", "w4a16g32m")),
        *map(_groups, ("w8a16g128", "w8a16g32k", "w8a16g16k", "w8a16g32", "w8a16g32m")),
        # Blocks of GGUF files: the file's own integers and scales
        *(_blocks(name, name.upper()) for name in ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")),
        *(_blocks(name, name.upper()) for name in ("iq4_nl", "iq4_xs", "mxfp4")),
        # Integers with a float scale per 32 or 128 columns, and a zero point (`PackedWeight.of_integers`)
        *map(_blocks, ("w4g32", "w4g128", "w8g32", "w8g128")),
        *map(_blocks, ("w4g32m", "w4g64m", "w8g32m", "w8g64m")),  # with a float minimum instead of the zero point
    )
}
"""The formats by name. Which is used where is decided by `format_of` alone."""
BLOCKS = {row.blocks: row.name for row in FORMATS.values() if row.blocks}
"""The names of formats by the type of a GGUF file's tensors."""


def format_of(storage: str, device: str) -> str:
    """Return the format in which kernels for a type of device read weights that are stored so; empty if none do."""
    return next((row.name for row in FORMATS.values() if (row.storage, row.device) == (storage, device)), "")


class Blocks(NamedTuple):
    """What a weight ``[out, in]`` in blocks stands for: ``scales * codes``, plus ``minima``. ``in`` is padded."""

    codes: Tensor  # [out, groups, parts, columns] int32, the offset or zero point taken off
    scales: Tensor  # [out, groups, parts] float32
    minima: Tensor | None  # [out, groups] float32
    # Products that these are: [out, in / 256, 2] half numbers times [out, in / 32, 2] bytes; None if they are not
    factors: tuple[Tensor, Tensor] | None = None

    def dense(self) -> Tensor:
        """Return the values ``[out, in]`` float32."""
        values = (self.codes * self.scales[..., None]).flatten(2)
        return (values if self.minima is None else values + self.minima[..., None]).flatten(1)


def unpack(packed: Tensor, format: str) -> Blocks:
    """Read a weight ``[out, bytes]`` whose scales are among the bytes as the kernels do.

    Those of GPUs are in csrc/cuda/linear/groups.cuh, those of CPUs in csrc/cpu/linear/blocks.h.
    """
    order = FORMATS[format].order
    if isinstance(order, GroupOrder):
        return _unpack_groups(order, order.unpack(packed))
    columns, bits, offset, kind, has_minima, size, table = _C.coding(_C.FORMATS[format])
    groups, parts = columns // 32, max(1, 32 // size)
    rows = order.unpack(packed).unflatten(-1, (-1, 2 * order.shorts + 4 * order.words))
    head, body = rows.split([rows.shape[-1] - 4 * groups * bits, 4 * groups * bits], -1)
    # 1. Codes: lines of words of four columns
    lines = body.unflatten(-1, (groups, bits, 4)).int()
    words = lines if bits == 8 else torch.cat([lines[..., :4, :] & 15, lines[..., :4, :] >> 4], -2)
    if bits == 5:
        words |= (lines[..., 4:, :] >> torch.arange(8)[:, None] & 1) << 4
    elif bits == 6:
        words |= ((lines[..., 4:, None, :] >> 2 * torch.arange(4)[:, None] & 3) << 4).flatten(-3, -2)
    words = torch.tensor(table, device=words.device)[words] if table else words
    codes = words.flatten(-2).unflatten(-1, (parts, 32 // parts)) - (0 if kind == "float" else offset)
    # 2. Scales, and minima or zero points
    halves, minima, factors = head.contiguous().view(torch.float16).float(), None, None
    if kind == "half":
        scales, minima = halves[..., :groups], halves[..., groups:]
    elif kind == "super":
        small, count = head[..., 4:], groups * parts
        pairs = small.unflatten(-1, (2, -1)).mT if has_minima else small[..., :count].unflatten(-1, (-1, parts))
        scales, minima = _products(halves[..., None, :2], pairs, has_minima=has_minima)
        factors = halves[..., :2].half(), pairs.expand(*pairs.shape[:-1], 2).flatten(1, 2)
    elif kind == "exponent":
        byte = head.int()
        scales = torch.where(byte < 2, byte + 1 << 21, byte - 1 << 23).view(torch.float32)
    else:
        floats = head[..., : 4 * columns // size * (1 + has_minima)].contiguous().view(torch.float32)
        floats = floats.repeat_interleave(size // 32, -1)
        scales, minima = floats[..., :groups], floats[..., groups:]
        codes -= 0 if has_minima else head[..., -4:, None, None].int()
    scales = scales.reshape(*scales.shape[:2], groups, parts)
    return Blocks(codes.flatten(1, 2), scales.flatten(1, 2), minima.flatten(1, 2) if has_minima else None, factors)


def _products(halves: Tensor, pairs: Tensor, *, has_minima: bool) -> tuple[Tensor, Tensor | None]:
    """Return scales and minima of half numbers ``[..., 2]`` and bytes ``[..., 2]`` or signed ones ``[..., parts]``."""
    if not has_minima:
        return halves[..., :1] * pairs.view(torch.int8), None
    return halves[..., 0] * pairs[..., 0], -halves[..., 1] * pairs[..., 1]


def _unpack_groups(order: GroupOrder, rows: Tensor) -> Blocks:
    """Read a weight with groups of columns, ``[out, bytes]`` of its features."""
    size, end = order.parts(rows.shape[-1])
    codes, pairs, words = (x.contiguous() for x in rows.split([size, end - size, rows.shape[-1] - end], -1))
    zeros, minima, parts = 0, None, max(1, 32 // order.group)
    if order.bits == 4:
        halves = codes.unflatten(-1, (-1, 1, 8))
        codes = torch.cat([halves & 15, halves >> 4], -2).flatten(-3)
    elif order.scales == "word":
        codes = codes.view(torch.int8)
    if order.scales == "super":
        halves, pairs = words.view(torch.float16).float().unflatten(-1, (-1, 2)), pairs.unflatten(-1, (-1, 2))
        halves = halves.repeat_interleave(8, 1)[:, : pairs.shape[1]]
        scales, minima = _products(halves, pairs, has_minima=parts == 1)
    elif order.scales == "half":
        scales, minima = words.view(torch.float16).float().unflatten(-1, (-1, 2)).unbind(-1)
    elif order.bits == 4:
        words = words.view(torch.int32)
        zeros = (words & 31)[..., None, None]
        scales = (words & ~0xFFFF).view(torch.float32) + (words << 16 & ~0x1FFFFF).view(torch.float32)
    else:
        scales = words.view(torch.float32)
    group = order.group * parts
    padded = torch.nn.functional.pad(codes.int(), (0, -codes.shape[-1] % group))
    codes = padded.unflatten(-1, (-1, parts, order.group)) - (128 if parts == 2 else zeros)
    return Blocks(codes, scales.reshape(*codes.shape[:-1]), minima)


def _pack_groups(format: str, blocks: Blocks, columns: int, dtype: torch.dtype) -> Tensor | None:
    """Pack a weight with groups of columns, for rows of a dtype; None if the format does not hold its values.

    Args:
        format: one with groups.
        blocks: what the weight stands for.
        columns: of the weight, a multiple of 32.

    Returns:
        ``[out, size]`` uint8.
    """
    order: GroupOrder = FORMATS[format].order
    # 1. Whole groups and stages. What is missing is as the last 32 columns
    size, unit = FORMATS[format].size(columns), max(64, order.group)
    padded = -(-columns // unit) * unit
    places = torch.arange(padded // 32, device=blocks.codes.device).clamp_(max=columns // 32 - 1)
    scales, minima = blocks.scales[:, places], None if blocks.minima is None else blocks.minima[:, places]
    pairs = scales.new_empty(len(scales), 0, dtype=torch.uint8)
    # 2. What scales them
    if order.scales == "super":
        if blocks.factors is None or (minima is None) != (order.group == 16):
            return None
        halves, pairs = blocks.factors[0][:, : -(-padded // 256)], blocks.factors[1][:, places].flatten(1)
        words, fits = halves.contiguous().view(torch.int32).flatten(1), halves.isfinite()
    elif order.scales == "half":
        if minima is None:
            return None
        is_used = blocks.codes[:, places].flatten(2).any(-1)  # libraries give groups of zeros a scale of any size
        both = torch.stack([torch.where(is_used, scales[..., 0], 0), minima], -1)
        words, fits = both.half().view(torch.int32).flatten(1), both.isfinite() & (both.half() == both)
    else:
        scales = scales.flatten(1).unflatten(1, (padded // order.group, -1))
        if minima is not None or not (scales == scales[..., :1]).all():
            return None
        scales = scales[..., 0].contiguous()
        words, fits = scales.view(torch.int32), scales.isfinite()
        if dtype == torch.float16:
            fits &= scales.half() == scales
        if order.bits == 4:  # a sum, and room for a zero point
            upper = words & ~0xFFFF
            rest = (scales - upper.view(torch.float32)).view(torch.int32)
            fits &= rest & 0x1FFFFF == 0
            words = upper | rest >> 16 & 0xFFFF
    if not fits.all():
        return None
    # 3. Codes
    codes = blocks.codes[:, places].flatten(1)
    if order.bits == 4 and order.scales == "word":
        zeros = codes.unflatten(1, (-1, order.group)).amin(-1).neg().clamp_(min=0)
        if zeros.amax() > 31:
            return None
        words, codes = words | zeros, codes + zeros.repeat_interleave(order.group, 1)
    codes = codes + 128 if order.group == 16 else codes
    lowest, highest = (-128, 127) if order.bits == 8 and order.scales == "word" else (0, 2**order.bits - 1)
    if codes.amin() < lowest or codes.amax() > highest:
        return None
    codes = codes.to(torch.uint8)
    if order.bits == 4:
        low, high = codes.unflatten(-1, (-1, 2, 8)).unbind(-2)
        codes = (low | high << 4).flatten(-2)
    return order.pack(torch.cat([codes[:, : order.parts(size)[0]], pairs, words.view(torch.uint8)], 1), size)


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
    """A weight, or one per expert, in a format that is not dense.

    It stands for ``values() * scales[..., None]``, or for what a file's blocks do, whose scales are in ``packed``. With
    an ``order`` its columns lie in memory in that order, and whoever multiplies by it reorders rows first.
    """

    packed: Tensor  # [..., out, size] uint8
    scales: Tensor | None  # [..., out] float32
    format: str
    columns: int
    order: Tensor | None = None  # [in] int64, the element of a row that each column meets; None if they are in order

    @classmethod
    @torch.inference_mode(False)  # the tensors outlive a call
    @torch.no_grad()
    def of(cls, weight: Weight, format: str) -> PackedWeight:
        """Return the nearest weight ``[..., out, in]``: each channel's largest magnitude becomes the largest integer.

        ``weight`` may be one in blocks.

        Raises:
            NotFiniteError: a value is infinite or NaN.
        """
        made, columns, blocks, order = FORMATS[format], weight.shape[-1], "", None
        if isinstance(weight, PackedWeight):
            weight, blocks, order = weight.packed, weight.format, weight.order
        largest = 127  # of 8 bits
        packed = weight.new_empty(*weight.shape[:-1], made.size(columns), dtype=torch.uint8)
        scales = weight.new_empty(weight.shape[:-1], dtype=torch.float32)
        rows = made.order.tile * max(1, _WIDENED // (made.order.tile * max(1, columns)))
        for matrices in zip(*map(_matrices, (weight, packed, scales[..., None])), strict=True):
            for piece, to, scale in zip(*(x.split(rows) for x in matrices), strict=True):
                wide = unpack(piece, blocks).dense()[:, :columns] if blocks else piece.float()
                torch.div(wide.abs().amax(1, True) if columns else torch.zeros_like(scale), largest, out=scale)
                if not scale.isfinite().all():
                    raise NotFiniteError(weight, "NaN" if scale.isnan().any() else "infinity")
                values = (wide / torch.where(scale > 0, scale, 1)).round_().clamp_(-largest, largest)
                to.copy_(made.order.pack(values.to(torch.int8), to.shape[1]))
        return cls(packed, scales, format, columns, order)

    @classmethod
    @torch.inference_mode(False)
    def of_blocks(cls, blocks: Tensor, format: str, columns: int) -> PackedWeight:
        """Return the weight of a GGUF file's blocks ``[..., out, bytes]`` uint8, contiguous, of so many columns.

        Raises:
            ValueError: ``format`` is not that of a type of GGUF files.
        """
        if not FORMATS[format].blocks:
            raise ValueError(f"format must be that of a GGUF type, got {format!r}: use of_integers")
        packed = blocks.new_empty(*blocks.shape[:-1], FORMATS[format].size(columns))
        for source, to in zip(_matrices(blocks), _matrices(packed), strict=True):
            call = {"blocks": source, "packed": to, "features": len(source), "columns": columns}
            _C.run("pack_blocks", call | {"format": _C.FORMATS[format]}, torch.get_num_threads())
        return cls(packed, None, format, columns)

    @classmethod
    def of_integers(
        cls, codes: Tensor, scales: Tensor, zeros: Tensor | None = None, minima: Tensor | None = None, *, group: int,
        bits: int,
    ) -> PackedWeight:  # fmt: skip
        """Return the weight ``(codes - zeros) * scales``, as AWQ, GPTQ and compressed-tensors store it. Rounds nothing.

        With ``minima`` it is ``codes * scales + minima``, as MLX stores it.

        With ``zeros`` in the middle and scales that half precision holds, the format is that of Q4_0 or Q8_0: 4.5 or
        8.5 bits per weight. Else it has scales in float32: 4.5 or 8.5 bits if groups are multiples of 128 or a whole
        channel, 5.25 or 9.25 if not. With ``minima`` it is 5 or 9 bits if groups are multiples of 64 or a whole
        channel, else 6 or 10.

        Args:
            codes: ``[..., out, in]`` uint8, less than ``2 ** bits``.
            scales: ``[..., out, ceil(in / group)]`` float16, bfloat16 or float32.
            zeros: the same shape, uint8; None if all are ``2 ** (bits - 1)``, or with ``minima``.
            minima: the same shape, float16, bfloat16 or float32.
            group: columns that share a scale and a zero point: a multiple of 32, or at least ``in`` (one per channel).
            bits: 4 or 8.

        Raises:
            ValueError: a shape, dtype or number is not as above.
        """
        columns, middle = codes.shape[-1], 2 ** (bits - 1)
        # 1. Check what came
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, got {bits}: keep the weight dense")
        if group < 1 or (group % 32 and group < columns):
            raise ValueError(f"group must be a multiple of 32 or at least in = {columns}, got {group}: keep it dense")
        for name, values in (("scales", scales), ("minima", scales if minima is None else minima)):
            _check_groups(name, values, codes, group)
            if not values.is_floating_point() or values.dtype == torch.float64:
                raise ValueError(f"{name} must be float16, bfloat16 or float32, got {values.dtype}: convert them")
        if zeros is not None and minima is not None:
            raise ValueError("a weight has zeros or minima, got both: subtract zeros * scales from minima")
        if zeros is not None and (zeros.shape != scales.shape or zeros.dtype != torch.uint8):
            raise ValueError(f"zeros must be uint8 {list(scales.shape)}, got {zeros.dtype} {list(zeros.shape)}")
        if codes.numel() and bits == 4 and int(codes.amax()) > 15:
            raise ValueError(f"codes of 4 bits must be less than 16, got {int(codes.amax())}: unpack the bytes first")
        # 2. Choose the format
        wide, halves = scales.float(), scales.half()
        if minima is not None:
            shared = 64 if group % 64 == 0 or group >= columns else 32
            return cls._of_codes(f"w{bits}g{shared}m", codes, (wide, shared, group), (minima.float(), shared, group))
        if (zeros is None or bool((zeros == middle).all())) and torch.equal(halves.float(), wide):
            return cls._of_codes(f"q{bits}_0", codes, (halves, 32, group))
        shared = 128 if group % 128 == 0 or group >= columns else 32
        zeros = torch.full_like(wide, middle, dtype=torch.uint8) if zeros is None else zeros
        return cls._of_codes(f"w{bits}g{shared}", codes, (wide, shared, group), (zeros, 32, group))

    @classmethod
    def of_mxfp4(cls, codes: Tensor, exponents: Tensor) -> PackedWeight:
        """Return the weight of OCP MXFP4 numbers, as gpt-oss has them: a value of E2M1 times ``2 ** (exponent - 127)``.

        Args:
            codes: ``[..., out, in]`` uint8, less than 16: the sign and three bits of E2M1. Minus zero becomes zero.
            exponents: ``[..., out, ceil(in / 32)]`` uint8.

        Raises:
            ValueError: a shape, dtype or number is not as above, or an exponent is 255, which stands for NaN.
        """
        _check_groups("exponents", exponents, codes, 32)
        if exponents.dtype != torch.uint8:
            raise ValueError(f"exponents must be uint8, got {exponents.dtype}: view them as bytes")
        if (exponents == 255).any():
            raise ValueError("exponents must be below 255, got 255, which stands for NaN: keep the weight dense")
        if codes.numel() and int(codes.amax()) > 15:
            raise ValueError(f"codes must be less than 16, got {int(codes.amax())}: unpack the bytes first")
        return cls._of_codes("mxfp4", codes, (exponents, 32, 32))

    @classmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def _of_codes(cls, format: str, codes: Tensor, *head: tuple[Tensor, int, int]) -> PackedWeight:
        """Pack codes after what their chunks begin with.

        Args:
            format: one of 4 or 8 bits whose codes are as they come.
            codes: ``[..., out, in]`` uint8.
            head: of each part of a chunk's head, in order: values ``[..., out, groups]``, the columns per value in
                memory, and the columns per group.
        """
        columns, order, size = codes.shape[-1], FORMATS[format].order, FORMATS[format].size(codes.shape[-1])
        chunk, bits = _C.coding(_C.FORMATS[format])[:2]
        padded = -(-columns // chunk) * chunk
        # 1. Of each chunk the bytes of its scales and zero points
        parts = []
        for values, every, group in head:
            found = (torch.arange(0, padded, every) // group).clamp_(max=values.shape[-1] - 1)
            parts.append(values[..., found].view(torch.uint8).unflatten(-1, (padded // chunk, -1)))
        parts = torch.cat(parts, -1).flatten(-2)
        # 2. Codes after them, a few tiles at a time
        packed = codes.new_empty(*codes.shape[:-1], size)
        rows = _TILE * max(1, _WIDENED // (_TILE * max(1, columns)))
        for matrices in zip(*map(_matrices, (packed, codes.contiguous(), parts)), strict=True):
            for to, some, front in zip(*(x.split(rows) for x in matrices), strict=True):
                body = torch.nn.functional.pad(some, (0, padded - columns)) if columns < padded else some
                if bits == 4:  # eight codes at a time
                    low, high = body.view(torch.int64).unflatten(-1, (-1, 2, 2)).unbind(-2)
                    body = (low | high << 4).flatten(-2)
                words = [x.view(torch.int32).unflatten(-1, (padded // chunk, -1)) for x in (front, body)]
                to.copy_(order.pack(torch.cat(words, -1).flatten(1).view(torch.uint8), size))
        return cls(packed, None, format, columns)

    @torch.inference_mode(False)
    @torch.no_grad()
    def in_groups(self, dtype: torch.dtype) -> PackedWeight | None:
        """Return a weight in blocks as GPUs read it, for rows of a dtype, with the same values.

        Returns:
            The weight in new memory, in the format with the fewest bytes; None if none holds it: float16 does not hold
            its scales and minima (in a bfloat16 model only those next to minima matter), a zero point has 8 bits, or
            features are not a multiple of 8 or columns of 32.
        """
        if self.shape[-2] % 8 or self.columns % 32 or not self.packed.numel():
            return None

        def pieces(packed: Tensor) -> Iterator[Tensor]:
            rows = _TILE * max(1, _WIDENED // (_TILE * max(1, self.columns)))
            return itertools.chain.from_iterable(matrix.split(rows) for matrix in _matrices(packed))

        first = unpack(next(pieces(self.packed)), self.format)  # of most weights it tells which format holds them
        for name in (name for name, row in FORMATS.items() if isinstance(row.order, GroupOrder)):
            if _pack_groups(name, first, self.columns, dtype) is None:
                continue
            made = self.packed.new_empty(*self.shape[:-1], FORMATS[name].size(self.columns))
            for source, to in zip(pieces(self.packed), pieces(made), strict=True):
                packed = _pack_groups(name, unpack(source, self.format), self.columns, dtype)
                if packed is None:
                    break
                to.copy_(packed)
            else:
                return self._replace(packed=made, format=name)
        return None

    @torch.inference_mode(False)
    @torch.no_grad()
    def select(self, channels: Tensor) -> PackedWeight:
        """Return the weight of some output channels, in new memory."""
        order = FORMATS[self.format].order
        packed = order.pack(order.unpack(self.packed)[channels], self.packed.shape[1])
        return self._replace(packed=packed, scales=None if self.scales is None else self.scales[channels])

    @property
    def shape(self) -> torch.Size:
        """``[..., out, in]``."""
        return torch.Size((*self.packed.shape[:-1], self.columns))

    def values(self) -> Tensor:
        """Return the integers ``[..., out, in]`` int8 of a weight that has scales, columns as they lie in memory."""
        unpacked = map(FORMATS[self.format].order.unpack, _matrices(self.packed))
        return torch.stack([*unpacked]).view(torch.int8).view(self.packed.shape)[..., : self.columns]

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the values that this stands for, ``[..., out, in]``, each rounded."""
        if self.scales is None:
            matrices = [unpack(one, self.format).dense()[:, : self.columns] for one in _matrices(self.packed)]
            out = torch.stack(matrices).view(self.shape).to(dtype)
        else:
            out = torch.mul(self.values(), self.scales[..., None], out=self.scales.new_empty(self.shape, dtype=dtype))
        return out if self.order is None else out[..., self.order.argsort()]

    def record(self) -> tuple[Tensor, Tensor | None, int]:
        """Return the fields of ``LinearWeight``, as in params.h."""
        return self.packed, self.scales, _C.FORMATS[self.format]


def _check_groups(name: str, values: Tensor, codes: Tensor, group: int) -> None:
    """Raise ValueError unless codes are uint8 and ``values`` has one number per group of them."""
    if codes.dtype != torch.uint8 or codes.ndim < 2:
        raise ValueError(f"codes must be uint8 [..., out, in], got {codes.dtype} {list(codes.shape)}")
    wanted = [*codes.shape[:-1], -(-codes.shape[-1] // group)]
    if list(values.shape) != wanted:
        raise ValueError(f"{name} must be {wanted}, one per {group} columns, got {list(values.shape)}")


def _matrices(tensor: Tensor) -> Tensor:
    """Return ``[matrices, rows, columns]`` of a tensor ``[..., rows, columns]``."""
    return tensor.view(-1 if tensor.numel() else tensor.shape[:-2].numel(), *tensor.shape[-2:])


Weight = Tensor | PackedWeight
"""A weight ``[out, in]`` of a product."""
