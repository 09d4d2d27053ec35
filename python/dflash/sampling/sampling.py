"""Sampling parameters of a call, and as per-row tensors for `dflash.ops.select_tokens`.

Tokens are chosen by keyed noise, ``argmax(filter(logits / temperature) + gumbel(seed, position, token id))``. A choice
depends only on seed, position and prefix, so the text is the same whatever the drafter proposes. This is
drafter-invariant speculative decoding (Daliri et al., "Coupling without communication and drafter-invariant speculative
decoding"). The noise is counter-based, Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops

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
        seed: an int64 value.
        row: at least 0.
    """
    if row == 0:
        return seed
    folded = _mix((_mix(seed % 2**64) + row) % 2**64)
    return folded - 2**64 if folded >= 2**63 else folded


class SamplingArguments(NamedTuple):
    """Checked sampling settings of one call, see `dflash.settings.GenerateArguments`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | Sequence[int] | None = None
    draft_sharpness: float = 1.0

    @property
    def is_greedy(self) -> bool:
        """True if the temperature counts as 0."""
        return self.temperature < _SMALLEST_TEMPERATURE

    def seeds(self, rows: int) -> list[int]:
        """Return the seed of each row; None draws one from torch's generator, unless all is greedy.

        Raises:
            ValueError: the number of seeds is not ``rows``.
        """
        seed = self.seed
        if seed is None:
            seed = 0 if self.is_greedy else int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        if not isinstance(seed, Sequence):
            return [fold(seed, row) for row in range(rows)]
        if len(seed) != rows:
            raise ValueError(f"seed must be an integer or one per row, {rows} in all, got {len(seed)} of them")
        return list(seed)


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

    def set_(self, rows: int, arguments: SamplingArguments) -> None:
        """Write the first ``rows`` rows in place.

        Raises:
            ValueError: the number of seeds is not ``rows``.
        """
        sharpness = arguments.draft_sharpness
        self.seeds[:rows] = torch.tensor(arguments.seeds(rows), dtype=torch.int64, device="cpu")
        self.temperature[:rows] = 0.0 if arguments.is_greedy else arguments.temperature
        self.top_k[:rows] = min(arguments.top_k, 2**63 - 1)
        self.top_p[:rows] = arguments.top_p
        self.min_p[:rows] = arguments.min_p
        self.sharpness[:rows] = math.inf if sharpness > _LARGEST_FLOAT32 else sharpness

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
