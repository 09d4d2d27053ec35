"""Sampling parameters: user arguments, checked, as per-row tensors for `dflash.ops.select_tokens`.

Tokens are chosen by keyed noise, ``argmax(filter(logits / temperature) + gumbel(seed, position, token id))``. A choice
depends only on seed, position and prefix, so the text is the same whatever the drafter proposes. This is
drafter-invariant speculative decoding (Daliri et al., "Coupling without communication and drafter-invariant speculative
decoding"). The noise is counter-based, Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011).
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from . import checks

__all__ = ["Sampling", "SamplingArguments", "fold"]

_SMALLEST_TEMPERATURE = 1e-30  # below it logits / temperature would overflow fp32
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def _mix(x: int) -> int:
    """Return splitmix64's finalizer of a 64-bit integer."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def fold(seed: int, row: int) -> int:
    """Return the seed of a row in a batch: ``seed`` itself for row 0, else a hash (splitmix64) of both.

    Row r of a batch writes what a single prompt with seed ``fold(seed, r)`` writes.

    Args:
        seed: an integer that fits in int64.
        row: an integer, at least 0.

    Returns:
        A signed int64 value.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument is not an integer.
    """
    seed, row = _seed("seed", seed), checks.integer("row", row)
    if row < 0:
        raise ValueError(f"row must be at least 0, got {row}")
    if row == 0:
        return seed
    folded = _mix((_mix(seed % 2**64) + row) % 2**64)
    return folded - 2**64 if folded >= 2**63 else folded


def _seed(name: str, value: object) -> int:
    value = checks.integer(name, value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit in int64, got {value}")
    return value


def _seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    if seed is None:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    if hasattr(seed, "tolist"):  # a tensor, an array or one of its scalars
        seed = seed.tolist()
    if isinstance(seed, Sequence) and not isinstance(seed, (str, bytes)):
        if len(seed) != rows:
            raise ValueError(f"seed must be an integer or one per row, {rows} in all, got {len(seed)} of them")
        return [_seed(f"seed[{row}]", value) for row, value in enumerate(seed)]
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed must be an integer, a sequence with one per row, or None, got {seed!r}")
    return [fold(seed, row) for row in range(rows)]


@dataclass(frozen=True)
class SamplingArguments:
    """Sampling arguments of one call, named as in ``generate``.

    Attributes:
        temperature: finite, at least 0. 0 is greedy, and so is anything below 1e-30.
        top_k: keep the ``top_k`` best tokens, and ties with the last of them; 0 is off.
        top_p: in (0, 1]. Keep a token if the total probability of all strictly more probable ones is below this; 1 is
            off.
        min_p: in [0, 1]. Keep tokens at least ``min_p`` times as probable as the best; 0 is off.
        seed: one integer per row, or a single one, from which row r gets ``fold(seed, r)``. None draws one from torch's
            default generator.
        draft_sharpness: at least 0, infinity included. The drafter proposes
            ``argmax(draft_sharpness * logits / temperature + gumbel)``. 1 couples it to the target's own noise (Daliri
            et al.), infinity is its plain argmax. It changes the speed, never the text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | Sequence[int] | None = None
    draft_sharpness: float = 1.0

    def checked(self) -> SamplingArguments:
        """Return checked arguments as plain Python numbers.

        Raises:
            ValueError: a value is out of range.
            TypeError: a value has the wrong type.
        """
        temperature = checks.real("temperature", self.temperature, "a finite number of at least 0")
        if not 0 <= temperature <= _LARGEST_FLOAT32:
            raise ValueError(f"temperature must be a finite number of at least 0, got {temperature}")
        top_k = checks.integer("top_k", self.top_k)
        if top_k < 0:
            raise ValueError(f"top_k must be an integer of at least 0 (0 is off), got {top_k}")
        top_p = checks.real("top_p", self.top_p, "a number in (0, 1]")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (1 is off), got {top_p}")
        min_p = checks.real("min_p", self.min_p, "a number in [0, 1]")
        if not 0 <= min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1] (0 is off), got {min_p}")
        sharpness = checks.real("draft_sharpness", self.draft_sharpness, "a number of at least 0")
        if math.isnan(sharpness) or sharpness < 0:
            raise ValueError(f"draft_sharpness must be at least 0 (infinity is allowed), got {sharpness}")
        return SamplingArguments(temperature, top_k, top_p, min_p, self.seed, sharpness)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, one value per row, in tensors whose addresses never change.

    Attributes:
        seeds: ``[batch]`` int64.
        temperature: ``[batch]`` float32; 0 is greedy.
        top_k: ``[batch]`` int64; 0 is off.
        top_p: ``[batch]`` float32; 1 is off.
        min_p: ``[batch]`` float32; 0 is off.
        sharpness: ``[batch]`` float32, for the drafter; the target's is always 1.
    """

    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    sharpness: Tensor

    @classmethod
    def create(cls, batch: int, device: torch.device | str = "cpu") -> Sampling:
        """Return greedy parameters for ``batch`` rows on ``device``."""

        def rows(fill: float, dtype: torch.dtype) -> Tensor:
            return torch.full((batch,), fill, dtype=dtype, device=device)

        ints, floats = torch.int64, torch.float32
        return cls(rows(0, ints), rows(0, floats), rows(0, ints), rows(1, floats), rows(0, floats), rows(1, floats))

    def rows(self, rows: slice) -> Sampling:
        """Return the parameters of some rows; they share these tensors' memory."""
        return Sampling(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    def set_(self, rows: int, arguments: SamplingArguments | None = None, **changes: Any) -> None:
        """Write the first ``rows`` rows in place. A wrong argument raises before anything is written.

        Args:
            rows: number of rows, 1 to batch.
            arguments: parameters of every row; greedy by default.
            changes: fields of `SamplingArguments` that replace those in ``arguments``.

        Raises:
            ValueError: a value is out of range, or the number of seeds is not ``rows``.
            TypeError: a value has the wrong type.
        """
        rows = checks.integer("rows", rows)
        if not 1 <= rows <= len(self.seeds):
            raise ValueError(f"rows must lie in 1 .. {len(self.seeds)}, got {rows}")
        given = dataclasses.replace(arguments or SamplingArguments(), **changes).checked()
        greedy = given.temperature < _SMALLEST_TEMPERATURE
        seed = 0 if given.seed is None and greedy else given.seed  # greedy: leave torch's generator as it is
        self.seeds[:rows] = torch.tensor(_seeds(seed, rows), dtype=torch.int64, device="cpu")
        self.temperature[:rows] = 0.0 if greedy else given.temperature
        self.top_k[:rows] = min(given.top_k, 2**63 - 1)
        self.top_p[:rows] = given.top_p
        self.min_p[:rows] = given.min_p
        self.sharpness[:rows] = math.inf if given.draft_sharpness > _LARGEST_FLOAT32 else given.draft_sharpness

    def row(self, row: int) -> Sampling:
        """Return the parameters of one row, as views."""
        return Sampling(*(getattr(self, field.name)[row : row + 1] for field in dataclasses.fields(self)))

    def select(self, logits: Tensor, positions: Tensor, sharpness: Tensor) -> Tensor:
        """Choose a token per row with keyed noise. See `dflash.ops.select_tokens`.

        Args:
            logits: ``[batch, rows, vocab]``, any floating dtype.
            positions: ``[batch, rows]`` int64, positions of the tokens that are chosen; ``[batch]``, that of the token
                before the first.
            sharpness: ``[batch]`` float32.

        Returns:
            ``[batch, rows]`` int64; -1 where a logit is NaN.
        """
        return ops.select_tokens(
            *(logits, positions, self.seeds, self.temperature, self.top_k, self.top_p, self.min_p, sharpness)
        )
