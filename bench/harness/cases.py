"""Models' sizes, random operands, and the cases that a bench file yields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """The sizes of a model from which its ops' shapes follow."""

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
    """One line: an op at one shape, against what a user would write in plain torch instead.

    Attributes:
        shape: names the case; a shape that comes twice with the same dtype is measured once.
        make: returns the operands of a call, which ``ours`` and every peer take.
        ours: calls the op.
        peers: the same in plain torch, by name.
        moved: the least traffic of a call in bytes: each operand it needs read once, each result written once.
        dtype: where an op has no floating-point operand, the dtype to print instead of the run's.
    """

    shape: str
    make: Callable[[], tuple]
    ours: Callable
    peers: dict[str, Callable]
    moved: int
    dtype: str = ""


@dataclass(frozen=True)
class Options:
    """What a bench file lays out its cases from."""

    models: dict[str, Model]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    def random(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal random numbers of this run's dtype: up to a million drawn, then repeated."""
        count = torch.Size(shape).numel()
        drawn = torch.randn(min(count, 1 << 20), generator=torch.Generator().manual_seed(count)) * scale
        drawn = drawn.to(self.device, dtype or self.dtype)
        return drawn.repeat(-(-count // max(len(drawn), 1)))[:count].view(shape)

    def positions(self, first: int, rows: int) -> Tensor:
        """Return ``[1, rows]`` int64: first, first + 1, ..."""
        return torch.arange(first, first + rows, device=self.device)[None]

    def integers(self, *values: int) -> Tensor:
        """Return ``values`` as int64."""
        return torch.tensor(values, device=self.device)

    def rope(self, rows: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of random angles, ``[1, rows, head_dim / 2]`` float32."""
        angles = torch.rand(1, rows, head_dim // 2, device=self.device) * 6
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE as transformers writes it; cos and sin have full width and broadcast over heads."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def full_width(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin as `rotate` takes them: ``[batch, 1, rows, head_dim]``, in the heads' dtype."""
    return tuple(torch.cat((x, x), -1).to(dtype)[:, None] for x in (cos, sin))
