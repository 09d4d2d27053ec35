"""The ops of the engine: schema, checks, allocation, fake kernel and docstring, side by side per op.

Every op is registered in the ``dflash`` library of torch (``torch.ops.dflash.*``), so that ``torch.compile`` sees
it whole. On CPU it runs the C++ kernel of the ``_C`` extension (float32 and bfloat16 storage, fp32 accumulation).
On CUDA it runs its kernel where one exists and otherwise its plain-torch twin in :mod:`dflash.reference`.

Ops that end in an underscore write into their arguments and return nothing. None of them records gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _C, reference

__all__ = ["add_rms_norm", "isa", "rms_norm", "silu_mul"]

_LIBRARY = torch.library.Library("dflash", "DEF")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def _register(schema: str, cpu, fake, cuda) -> None:
    """Define ``dflash::schema`` with one Python function per dispatch key and a fake kernel."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"dflash::{name}", fake, lib=_LIBRARY)


def _dtype(op: str, name: str, tensor: Tensor) -> int:
    """The storage type's number for the kernels, or a TypeError naming what came."""
    code = _DTYPES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"{op}: {name} must be float32 or bfloat16 on CPU, got {tensor.dtype}")
    return code


def _expect(op: str, name: str, tensor: Tensor, shape: tuple, dtype: torch.dtype, names: str) -> None:
    """Raise unless ``tensor`` has this shape (None: any size) and dtype; ``names`` spells the shape for the message."""
    if tensor.dim() != len(shape):
        raise ValueError(f"{op}: {name} must be [{names}], got {tensor.dim()} dimensions")
    for have, want in zip(tensor.shape, shape, strict=True):
        if want is not None and have != want:
            wanted = ", ".join("*" if size is None else str(size) for size in shape)
            raise ValueError(f"{op}: {name} must be [{names}] = [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def isa() -> str:
    """The instruction set that the CPU kernels run on: ``scalar``, ``avx2`` or ``avx512``.

    Chosen at first use from what the processor has; the environment variable ``DFLASH_ISA`` names another.
    """
    return _C.isa()


# ---------------------------------------------------------------------------------------------- rms_norm


def _rms_norm_check(x: Tensor, weight: Tensor, counts: Tensor | None) -> None:
    if x.dim() < 2 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight must be [hidden] for x [..., hidden], got {list(weight.shape)} for {list(x.shape)}"
        )
    if weight.dtype != x.dtype:
        raise TypeError(f"rms_norm: weight must be {x.dtype} as x is, got {weight.dtype}")
    if counts is not None:
        if x.dim() != 3:
            raise ValueError(f"rms_norm: with counts x must be [batch, rows, hidden], got {x.dim()} dimensions")
        _expect("rms_norm", "counts", counts, (x.shape[0],), torch.int64, "batch")


def _rms_norm_cpu(x: Tensor, weight: Tensor, eps: float, counts: Tensor | None) -> Tensor:
    _rms_norm_check(x, weight, counts)
    dtype = _dtype("rms_norm", "x", x)
    x, weight = x.contiguous(), weight.contiguous()
    counts = counts if counts is None else counts.contiguous()
    out, hidden = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // hidden
    _C.rms_norm(
        x.data_ptr(), 0, weight.data_ptr(), _address(counts), out.data_ptr(), 0,
        rows, hidden, x.shape[-2], eps, dtype, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float, counts: Tensor | None) -> Tensor:
    _rms_norm_check(x, weight, counts)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_register(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? counts) -> Tensor",
    _rms_norm_cpu,
    _rms_norm_fake,
    reference.rms_norm,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, counts: Tensor | None = None) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in fp32, rounded once.

    Args:
        x: ``[..., hidden]``, float32 or bfloat16; ``[batch, rows, hidden]`` with ``counts``.
        weight: ``[hidden]``, the dtype of ``x``.
        eps: added to the mean square.
        counts: ``[batch]`` int64. Rows at or past the count are never read and come back as zeros.

    Returns:
        A tensor like ``x``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    return torch.ops.dflash.rms_norm(x, weight, eps, counts)


# ---------------------------------------------------------------------------------------------- add_rms_norm


def _add_rms_norm_check(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    _rms_norm_check(x, weight, None)
    _expect("add_rms_norm", "residual", residual, tuple(x.shape), x.dtype, "as x")


def _add_rms_norm_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _add_rms_norm_check(x, residual, weight)
    dtype = _dtype("add_rms_norm", "x", x)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total, hidden = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    rows = x.numel() // hidden
    _C.rms_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), 0, out.data_ptr(), total.data_ptr(),
        rows, hidden, rows, eps, dtype, torch.get_num_threads(),
    )  # fmt: skip
    return out, total


def _add_rms_norm_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    _add_rms_norm_check(x, residual, weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, torch.empty_like(out)


_register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    _add_rms_norm_cpu,
    _add_rms_norm_fake,
    reference.add_rms_norm,
)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``h = x + residual`` and its RMSNorm.

    Args:
        x: ``[..., hidden]``, float32 or bfloat16.
        residual: like ``x``.
        weight: ``[hidden]``, the dtype of ``x``.
        eps: added to the mean square.

    Returns:
        ``(rms_norm(h), h)``, both like ``x``; ``h`` is rounded to the dtype before it is normed.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    return torch.ops.dflash.add_rms_norm(x, residual, weight, eps)


# ---------------------------------------------------------------------------------------------- silu_mul


def _silu_mul_check(gate_up: Tensor) -> None:
    if gate_up.dim() < 2 or gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul: gate_up must be [..., 2 * width], got {list(gate_up.shape)}")


def _silu_mul_cpu(gate_up: Tensor) -> Tensor:
    _silu_mul_check(gate_up)
    dtype = _dtype("silu_mul", "gate_up", gate_up)
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    _C.silu_mul(
        gate_up.data_ptr(), out.data_ptr(), out.numel() // max(width, 1), width, dtype, torch.get_num_threads()
    )
    return out


def _silu_mul_fake(gate_up: Tensor) -> Tensor:
    _silu_mul_check(gate_up)
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


_register("silu_mul(Tensor gate_up) -> Tensor", _silu_mul_cpu, _silu_mul_fake, reference.silu_mul)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``gate_up = [gate, up]`` side by side, in fp32, rounded once.

    Args:
        gate_up: ``[..., 2 * width]``, float32 or bfloat16.

    Returns:
        ``[..., width]``, the dtype of ``gate_up``.

    Raises:
        ValueError: the last dimension is odd. TypeError: the dtype does not fit.
    """
    return torch.ops.dflash.silu_mul(gate_up)
