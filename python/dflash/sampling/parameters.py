"""How tokens are chosen: user arguments, checked, as per-row tensors for :func:`dflash.ops.select_tokens`.

Tokens are chosen by keyed noise, ``argmax(filter(logits / temperature) + gumbel(seed, position, token id))``, so that
a choice is a function of seed, position and prefix alone and the text is the same whatever the drafter proposes:
drafter-invariant speculative decoding (Daliri et al., "Coupling without communication and drafter-invariant
speculative decoding"). The noise is counter-based, Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3", 2011).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Sampling", "fold"]

_SMALLEST_TEMPERATURE = 1e-30  # below it logits / temperature would overflow fp32
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def _mix(x: int) -> int:
    """splitmix64's finalizer, on 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def fold(seed: int, row: int) -> int:
    """The seed of row ``row`` of a batch: ``seed`` itself for row 0, a hash (splitmix64) of both for the others.

    Row r of a batch writes what a single prompt with seed ``fold(seed, r)`` writes.

    Args:
        seed: within int64.
        row: 0 or more.

    Returns:
        A signed int64 value.

    Raises:
        ValueError: out of range. TypeError: not an integer.
    """
    seed, row = _seed("seed", seed), integer("row", row)
    if row < 0:
        raise ValueError(f"row must be at least 0, got {row}")
    if row == 0:
        return seed
    folded = _mix((_mix(seed % 2**64) + row) % 2**64)
    return folded - 2**64 if folded >= 2**63 else folded


def integer(name: str, value: object) -> int:
    """``value`` as an int; TypeError unless it is an integer of Python or numpy, and not a bool."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return int(value)


def _number(name: str, value: object, wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be {wanted}, got {value!r}")
    return float(value)


def _seed(name: str, value: object) -> int:
    value = integer(name, value)
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
class Sampling:
    """The parameters of token choice, one value per row, in tensors that keep their addresses.

    Attributes:
        seeds: ``[batch]`` int64.
        temperature: ``[batch]`` float32; 0 is greedy.
        top_k: ``[batch]`` int64; 0 is off.
        top_p: ``[batch]`` float32; 1 is off.
        min_p: ``[batch]`` float32; 0 is off.
        sharpness: ``[batch]`` float32, the drafter's; the target's is 1.
    """

    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    sharpness: Tensor

    @classmethod
    def create(cls, batch: int, device: torch.device | str = "cpu") -> Sampling:
        """Greedy parameters for ``batch`` rows on ``device``."""

        def rows(fill: float, dtype: torch.dtype) -> Tensor:
            return torch.full((batch,), fill, dtype=dtype, device=device)

        whole, real = torch.int64, torch.float32
        return cls(rows(0, whole), rows(0, real), rows(0, whole), rows(1, real), rows(0, real), rows(1, real))

    def set_(
        self,
        rows: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | Sequence[int] | None = None,
        draft_sharpness: float | Literal["auto"] = 1.0,
    ) -> None:
        """Write the first ``rows`` rows in place; nothing is written when an argument is wrong.

        Args:
            rows: 1 to batch.
            temperature: finite, 0 or more; 0 is greedy, and so is anything below 1e-30.
            top_k: keep the ``top_k`` best tokens and those equal to the last of them; 0 is off.
            top_p: in (0, 1]: keep a token while those strictly more probable weigh less than this; 1 is off.
            min_p: in [0, 1]: keep tokens at least ``min_p`` times as probable as the best; 0 is off.
            seed: an integer, of which row r gets ``fold(seed, r)``, or one per row; None draws one from torch's
                default generator.
            draft_sharpness: 0 or more, infinity included: the drafter proposes
                ``argmax(draft_sharpness * logits / temperature + gumbel)``. 1 couples it to the target's own
                noise (Daliri et al.), infinity is its plain argmax. "auto" writes infinity, where the automatic
                choice (:mod:`dflash.sharpness`) begins. Changes the speed, never the text.

        Raises:
            ValueError: a value is out of range, or as many seeds as rows were wanted. TypeError: of the wrong type.
        """
        rows = integer("rows", rows)
        if not 1 <= rows <= len(self.seeds):
            raise ValueError(f"rows must lie in 1 .. {len(self.seeds)}, got {rows}")
        temperature = _number("temperature", temperature, "a finite number of at least 0")
        if not 0 <= temperature <= _LARGEST_FLOAT32:
            raise ValueError(f"temperature must be a finite number of at least 0, got {temperature}")
        top_k = integer("top_k", top_k)
        if top_k < 0:
            raise ValueError(f"top_k must be an integer of at least 0 (0 is off), got {top_k}")
        top_p = _number("top_p", top_p, "a number in (0, 1]")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1] (1 is off), got {top_p}")
        min_p = _number("min_p", min_p, "a number in [0, 1]")
        if not 0 <= min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1] (0 is off), got {min_p}")
        if isinstance(draft_sharpness, str) and draft_sharpness == "auto":
            draft_sharpness = math.inf
        sharpness = _number("draft_sharpness", draft_sharpness, 'a number of at least 0 or "auto"')
        if math.isnan(sharpness) or sharpness < 0:
            raise ValueError(f"draft_sharpness must be at least 0 (infinity is allowed), got {sharpness}")
        if seed is None and temperature < _SMALLEST_TEMPERATURE:
            seed = 0  # greedy: leave torch's generator as it is
        seeds = _seeds(seed, rows)
        self.seeds[:rows] = torch.tensor(seeds, dtype=torch.int64)
        self.temperature[:rows] = temperature if temperature >= _SMALLEST_TEMPERATURE else 0.0
        self.top_k[:rows] = min(top_k, 2**63 - 1)
        self.top_p[:rows] = top_p
        self.min_p[:rows] = min_p
        self.sharpness[:rows] = sharpness if sharpness <= _LARGEST_FLOAT32 else math.inf
