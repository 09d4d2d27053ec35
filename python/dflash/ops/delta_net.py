"""What a Gated DeltaNet layer (Qwen3-Next, Qwen3.5) does around its recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import expect, unit_stride
from .registry import Launcher, op

L2_EPS = 1e-6
"""Added in the root of the L2 norm of q and k, as in flash-linear-attention and transformers."""


@op()
def delta_net_inputs(
    launch: Launcher,
    qkv: Tensor,
    b: Tensor,
    a: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    key_heads: int,
    key_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Make the arguments of `gated_recurrence_`, in fp32, from what a Gated DeltaNet layer projects.

    q and k are divided by ``sqrt(sum of squares + 1e-6)`` per head, and q by ``sqrt(key_dim)``.
    ``log_decay = -exp(a_log) * softplus(a + dt_bias)``, and ``beta = sigmoid(b)`` is rounded to the dtype of ``b``.

    Args:
        qkv: ``[batch, rows, 2 * key_heads * key_dim + heads * value_dim]``, float32 or bfloat16 (on CUDA float16 too),
            after the convolution: the q heads, the k heads, the v heads.
        b: ``[batch, rows, heads]``, the dtype of ``qkv``; its rows may be any one stride apart.
        a: like ``b``.
        a_log: ``[heads]``, the dtype of ``qkv``.
        dt_bias: like ``a_log``.
        key_heads: how many heads q and k have.
        key_dim: their width.

    Returns:
        ``(q, k, v, log_decay, beta)``, all float32: ``[batch, rows, key_heads, key_dim]`` twice,
        ``[batch, rows, heads, value_dim]``, ``[batch, rows, heads]`` twice.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    name, dtype = "delta_net_inputs", qkv.dtype
    expect(name, "qkv", qkv, (None, None, None), dtype, "batch, rows, 2 * key_heads * key_dim + heads * value_dim")
    expect(name, "a_log", a_log, (None,), dtype, "heads")
    (batch, rows, width), heads = qkv.shape, a_log.shape[0]
    values = width - 2 * key_heads * key_dim
    if min(key_heads, key_dim, heads) < 1 or values < heads or values % heads:
        raise ValueError(
            f"{name}: qkv must be [batch, rows, 2 * {key_heads} * {key_dim} + {heads} * value_dim] as key_heads, "
            f"key_dim and a_log say, got {list(qkv.shape)}"
        )
    for argument, tensor in (("b", b), ("a", a)):
        expect(name, argument, tensor, (batch, rows, heads), dtype, "batch, rows, heads")
    expect(name, "dt_bias", dt_bias, (heads,), dtype, "heads")
    code = launch.dtype(name, "qkv", qkv)
    b, a = (_even_rows(x) for x in (b, a))
    q, k = (qkv.new_empty(batch, rows, key_heads, key_dim, dtype=torch.float32) for _ in range(2))
    v = qkv.new_empty(batch, rows, heads, values // heads, dtype=torch.float32)
    log_decay, beta = (qkv.new_empty(batch, rows, heads, dtype=torch.float32) for _ in range(2))
    launch(
        "delta_net_inputs", qkv.contiguous(), b, a, a_log.contiguous(), dt_bias.contiguous(), q, k, v, log_decay, beta,
        b.stride(1), a.stride(1), batch * rows, key_heads, heads, key_dim, values // heads, L2_EPS, code,
    )  # fmt: skip
    return q, k, v, log_decay, beta


@op()
def gated_rms_norm(launch: Launcher, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``rms_norm(x) * weight * silu(z)`` per head, in fp32, rounded once.

    Args:
        x: ``[batch, rows, heads, width]`` float32, from `gated_recurrence_`.
        z: ``[batch, rows, heads * width]``, float32 or bfloat16 (on CUDA float16 too); its rows may be any one stride
            apart.
        weight: ``[width]``, the dtype of ``z``.
        eps: added to the mean square.

    Returns:
        ``[batch, rows, heads * width]``, the dtype of ``z``.

    Raises:
        ValueError: a shape does not fit. TypeError: a dtype does not fit.
    """
    name = "gated_rms_norm"
    expect(name, "x", x, (None, None, None, None), torch.float32, "batch, rows, heads, width")
    batch, rows, heads, width = x.shape
    if width == 0:
        raise ValueError(f"{name}: x must be [batch, rows, heads, width] with width >= 1, got {list(x.shape)}")
    expect(name, "z", z, (batch, rows, heads * width), z.dtype, "batch, rows, heads * width")
    expect(name, "weight", weight, (width,), z.dtype, "width")
    dtype = launch.dtype(name, "z", z)
    x, z = x.contiguous(), _even_rows(z)
    out = z.new_empty(batch, rows, heads * width)
    launch(
        "gated_rms_norm", x, z, weight.contiguous(), out, z.stride(1), batch * rows, heads, width, eps, dtype
    )  # fmt: skip
    return out


def _even_rows(x: Tensor) -> Tensor:
    """Return ``x [batch, rows, width]`` itself if all its rows lie equally far apart, else a dense copy."""
    x = unit_stride(x)
    return x if x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()
