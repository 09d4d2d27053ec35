"""Sizes, operands, and what a bench file yields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """The sizes of a model that its ops' shapes follow from."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    layers: int  # of its drafter
    taps: int


MODELS = {
    "pair": Model(192, 3, 1, 64, 512, 512, 3, 3),
    "qwen3-0.6b": Model(1024, 16, 8, 128, 3072, 151936, 5, 5),
    "qwen3-8b": Model(4096, 32, 8, 128, 12288, 151936, 5, 5),
}
TINY = {"tiny": Model(64, 2, 1, 32, 96, 200, 2, 2)}


@dataclass(frozen=True)
class Case:
    """One line: an op at one shape, and what a user would write in plain torch instead.

    ``make`` returns the operands of a call; ``ours`` and every peer take them. ``moved`` is the least traffic of a call
    in bytes: every operand that it needs read once, every result written once. A shape that comes twice with the same
    dtype is measured once; ``dtype`` names another than the run's where an op has no floating operand.
    """

    shape: str
    make: Callable[[], tuple]
    ours: Callable
    peers: dict[str, Callable]
    moved: int
    dtype: str = ""


@dataclass(frozen=True)
class Options:
    """What a bench file reads when it lays out its cases."""

    models: dict[str, Model]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers of this run's dtype on its device: a million drawn, then repeated."""
        count = torch.Size(shape).numel()
        drawn = torch.randn(min(count, 1 << 20), generator=torch.Generator().manual_seed(count)) * scale
        drawn = drawn.to(self.device, dtype or self.dtype)
        return drawn.repeat(-(-count // max(len(drawn), 1)))[:count].view(shape)

    def positions(self, first: int, rows: int) -> Tensor:
        """``[1, rows]`` int64: first, first + 1, ..."""
        return torch.arange(first, first + rows, device=self.device)[None]

    def integers(self, *values: int) -> Tensor:
        return torch.tensor(values, device=self.device)

    def rope(self, rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin, ``[1, rows, head_dim / 2]`` float32."""
        angles = torch.rand(1, rows, head_dim // 2, device=self.device) * 6
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE as transformers writes it; cos and sin are full width and broadcast over heads."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def full_width(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin as :func:`rotate` takes them: ``[batch, 1, rows, head_dim]``, in the dtype of the heads."""
    return tuple(torch.cat((x, x), -1).to(dtype)[:, None] for x in (cos, sin))
