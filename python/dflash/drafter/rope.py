"""Rotary position embedding: its settings and inverse frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, half-split kind, over the whole head; ``type`` says which of the numbers count."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scaling: float = 1.0

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """``[head_dim / 2]`` float32 on the CPU; the same bits as transformers computes for this type."""
        powers = self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.type == "yarn":
            return self._yarn(powers, head_dim)
        frequencies = 1.0 / powers
        if self.type == "linear":
            return frequencies / self.factor
        if self.type == "llama3":
            return self._llama3(frequencies)
        return frequencies

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Short waves stay, long ones are slowed by ``factor``, those between are blended."""
        length = self.original_max_position_embeddings
        waves = 2 * math.pi / frequencies
        long, short = waves > length / self.low_freq_factor, waves < length / self.high_freq_factor
        blend = (length / waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - blend) * frequencies / self.factor + blend * frequencies
        return torch.where(long, frequencies / self.factor, torch.where(short, frequencies, blended))

    def _yarn(self, powers: Tensor, head_dim: int) -> Tensor:
        """From ``beta_fast`` rotations over the original length on frequencies stay, below ``beta_slow`` they slow."""

        def dimension(rotations: float) -> float:
            turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else high + 0.001 - low
        slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        kept = 1 - slowed
        return 1.0 / (self.factor * powers) * (1 - kept) + 1.0 / powers * kept
