"""Rotary position embedding of a drafter: its settings, their reading, and the inverse frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..limits import MAX_POSITIONS
from ..terminal import listed, shortened
from .keys import REFUSED, Keys, expect_names

__all__ = ["ROPE_TYPES", "Rope", "read_rope"]

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Half-split rotary position embedding over the whole head. ``type`` decides which of the numbers apply."""

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
        """Return ``[head_dim / 2]`` float32 on the CPU, with the bits that transformers computes for this type."""
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
        """Keep short wavelengths, slow long ones down by ``factor`` and blend those in between."""
        length = self.original_max_position_embeddings
        wavelengths = 2 * math.pi / frequencies
        is_long, is_short = wavelengths > length / self.low_freq_factor, wavelengths < length / self.high_freq_factor
        blend = (length / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - blend) * frequencies / self.factor + blend * frequencies
        return torch.where(is_long, frequencies / self.factor, torch.where(is_short, frequencies, blended))

    def _yarn(self, powers: Tensor, head_dim: int) -> Tensor:
        """Keep frequencies above ``beta_fast`` rotations over the original length, slow those below ``beta_slow``."""

        def dimension(rotations: float) -> float:
            turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return head_dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else high + 0.001 - low
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        unscaled = 1 - ramp
        # 1 - unscaled is not ramp in float32: the sums are those of transformers.
        return 1.0 / (self.factor * powers) * (1 - unscaled) + 1.0 / powers * unscaled


def read_rope(keys: Keys, max_positions: int | None) -> Rope:
    """Read ``rope_scaling``, else ``rope_parameters``. ``rope_theta`` may be inside or at the top level."""
    return _RopeReader(keys).rope(max_positions)


# Settings that are checked whether or not the RoPE type uses them: True if they must be above 0. With these bounds
# (`limits.MAX_NUMBER`) no frequency and no scaling overflows.
_NUMBERS = {
    "attention_factor": False,
    "beta_fast": True,
    "beta_slow": True,
    "factor": True,
    "high_freq_factor": True,
    "low_freq_factor": True,
    "mscale": False,
    "mscale_all_dim": False,
    "rope_theta": True,
}


class _RopeReader:
    """The RoPE settings of one config."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.name = "rope_scaling" if keys.top.get("rope_scaling") else "rope_parameters"
        for name in ("rope_scaling", "rope_parameters"):
            self._check(name, keys.top.get(name))
        self.settings: Mapping[str, Any] = keys.top.get(self.name) or {}

    def _check(self, name: str, settings: Any) -> None:
        if settings is None:
            return
        if not isinstance(settings, Mapping):
            raise self.keys.error(f"{name} must be an object, got {shortened(settings)}")
        expect_names(settings, f"{self.keys.source}: {name}")
        if any(isinstance(value, Mapping) for value in settings.values()):
            raise self.keys.error(f"{name} per layer type is not supported: {listed(settings)}")
        for key, positive in _NUMBERS.items():
            if settings.get(key) is not None:
                self.keys.number(f"{name}.{key}", settings[key], positive=positive)
        for key in ("mscale", "mscale_all_dim"):  # 0 leaves the rule out
            if (settings.get(key) or 0) < 0:
                raise self.keys.error(f"{name}.{key} must be >= 0, got {settings[key]}")

    def rope(self, max_positions: int | None) -> Rope:
        """Return the settings as a `Rope`."""
        kind, theta = self.kind(), self.theta()
        if kind == "default":
            return Rope(theta=theta)
        if kind == "linear":
            return Rope("linear", theta, self.required("factor"))
        original = self.original_length(max_positions)
        if kind == "llama3":
            low, high = self.required("low_freq_factor"), self.required("high_freq_factor")
            if high <= low:
                raise self.keys.error(
                    f"{self.name}: high_freq_factor must be above low_freq_factor, got {high} and {low}"
                )
            return Rope("llama3", theta, self.required("factor"), original, low, high)
        if theta <= 1:
            raise self.keys.error(f"rope_theta must be > 1 for {kind}, got {theta}")
        return self.yarn(theta, original, max_positions)

    def kind(self) -> str:
        kind = self.settings.get("rope_type") or self.settings.get("type") or "default"
        if kind not in ROPE_TYPES:
            raise self.keys.error(
                f"{self.name}: RoPE type {shortened(kind)} is not supported: {', '.join(ROPE_TYPES)} are"
            )
        neutral, reason = REFUSED["partial_rotary_factor"]
        partial = self.settings.get("partial_rotary_factor")
        if partial not in neutral:
            raise self.keys.error(f"partial_rotary_factor = {shortened(partial)} is not supported: {reason}")
        return kind

    def theta(self) -> float:
        theta = self.settings.get("rope_theta")
        theta = self.keys.top.get("rope_theta") if theta is None else theta
        return 10000.0 if theta is None else float(theta)

    def required(self, key: str) -> float:
        if self.settings.get(key) is None:
            raise self.keys.error(f"{self.name} of type {self.kind()} needs {key}")
        return float(self.settings[key])

    def optional(self, key: str) -> float | None:
        return None if self.settings.get(key) is None else float(self.settings[key])

    def original_length(self, max_positions: int | None) -> int:
        key = "original_max_position_embeddings"
        length = self.keys.top.get(key) or self.settings.get(key)
        length = max_positions if length is None else length
        if length is None:
            raise self.keys.error(f"{self.name} of type {self.kind()} needs {key}")
        return self.keys.integer(f"{self.name}.{key}", length, 1, MAX_POSITIONS)

    def yarn(self, theta: float, original: int, max_positions: int | None) -> Rope:
        if self.settings.get("factor") is None and max_positions:
            factor = max_positions / original
        else:
            factor = self.required("factor")
        return Rope(
            "yarn",
            theta,
            factor,
            original,
            beta_fast=self.optional("beta_fast") or 32.0,
            beta_slow=self.optional("beta_slow") or 1.0,
            truncate=self.keys.boolean(f"{self.name}.truncate", self.settings.get("truncate", True)),
            attention_scaling=self._yarn_scaling(factor),
        )

    def _yarn_scaling(self, factor: float) -> float:
        given = self.optional("attention_factor")
        if given is not None:
            return given
        mscale, mscale_all_dim = self.optional("mscale"), self.optional("mscale_all_dim")
        if mscale and mscale_all_dim:
            return _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, mscale_all_dim)
        return _yarn_magnitude(factor, 1.0)


def _yarn_magnitude(factor: float, scale: float) -> float:
    """Return how much YaRN scales attention up for a context ``factor`` times as long."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
