"""The ops of :mod:`dflash.ops` in plain torch: the oracle of the tests, and what runs on a device without a kernel.

Same names, same arguments, any floating dtype; sums in at least fp32. Nothing here depends on data: no ``.item()``,
no tensor in Python control flow, so that each twin runs under ``FakeTensorMode`` and inside a CUDA graph.
Imports torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float, counts: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight``; rows at or past ``counts`` are zero."""
    wide = x.to(_compute_dtype(x))
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    if counts is not None:
        live = torch.arange(x.shape[1], device=x.device) < counts[:, None]
        out = torch.where(live[..., None], out, 0.0)
    return out.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``h = x + residual``; returns ``(rms_norm(h), h)``."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``gate_up = [gate, up]`` side by side."""
    gate, up = gate_up.to(_compute_dtype(gate_up)).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
