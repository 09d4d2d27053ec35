"""Recurrent layers over a block of rows, of which only some will be kept, and what goes around a Gated DeltaNet."""

from __future__ import annotations

from torch import Tensor

from .. import _C
from .contract import Scope
from .registry import Launcher, op

L2_EPS = 1e-6
"""Added in the root of the L2 norm of q and k, as in flash-linear-attention and transformers; kL2Eps in params.h."""


def _refuse_long_keys(launch: Launcher, s: Scope) -> None:
    if s.key_dim > (most := _C.MAX_RECURRENT_KEYS) and not launch.is_cpu:
        raise ValueError(f"gated_recurrence_: key_dim must be at most {most} on a GPU, got {s.key_dim}. Use the CPU")
    s.counters = launch.counters(s.v.device)


@op(
    "q[batch, rows, key_heads, key_dim]:f32 k[batch, rows, key_heads, key_dim]:f32 "
    "v[batch, rows, heads, value_dim]:f32 log_decay[batch, rows, heads, key_dim?]:f32 beta[batch, rows, heads]:f32 "
    "state[batch, heads, key_dim, value_dim]:f32! saved_k[batch, block, key_heads, key_dim]:f32! "
    "saved_d[batch, block, heads, value_dim]:f32! saved_a[batch, block, heads, key_dim?]:f32! "
    "pending[batch]:i64 keep[batch]:i64",
    "out[batch, rows, heads, value_dim]:f32",
    where="key_heads >= 1 and key_dim >= 1 and heads >= 1 and value_dim >= 1; heads % key_heads == 0; "
    "ndim(log_decay) == ndim(saved_a)",
    derived="decay_dim = 1 if ndim(log_decay) == 3 else key_dim",
    prepare=_refuse_long_keys,
)
def gated_recurrence_(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, state: Tensor, saved_k: Tensor,
    saved_d: Tensor, saved_a: Tensor, pending: Tensor, keep: Tensor,
) -> Tensor:  # fmt: skip
    """Run a linear recurrence over rows and keep its state from before the rows that are still to be accepted.

    Per head and row, with ``a = exp(log_decay)``: ``S' = a S``, ``d = beta (v - S'^T k)`` (``d = v`` without beta),
    ``S = S' + k d^T``, ``out = S^T q``. That is the gated delta rule (arXiv 2412.06464, eq. 10; with a decay per
    channel KDA, arXiv 2510.26692), and without beta Mamba-2 (arXiv 2405.21060).

    First the ``pending`` accepted rows of the last pass are applied to the state from what was saved of them, with the
    bits of their first run. Then the rows run. The state takes up the first ``keep`` of them, and k, d and a of the
    first ``min(rows, block)`` are saved. A row's bits depend on the state and the rows before it, never on how these
    were divided into passes. Rows that are not kept may hold NaN.

    Args:
        q, k: ``[batch, rows, key_heads, key_dim]``, q scaled; head h uses key head ``h // (heads / key_heads)``.
        v: ``[batch, rows, heads, value_dim]``; ``beta [batch, rows, heads]`` or None.
        log_decay: ``[batch, rows, heads]`` or ``[batch, rows, heads, key_dim]``.
        state: ``[batch, heads, key_dim, value_dim]``; written, as are the next three.
        saved_k, saved_d, saved_a: like ``k``, ``v`` and ``log_decay`` with ``block`` rows.
        pending: ``[batch]``, clamped to ``0 .. block``; ``keep [batch]`` to ``0 .. rows``.

    Returns:
        ``[batch, rows, heads, value_dim]``.
    """


@op(
    "x[batch, rows, channels]~ weight[channels, width] bias[channels] window[batch, slots, channels]! "
    "pending[batch]:i64 keep[batch]:i64",
    "out[batch, rows, channels]",
    where="width >= 1; slots >= width - 1",
    derived="block = slots - width + 1; x_stride_batch = stride(x, 0); x_stride_row = stride(x, 1)",
)
def causal_conv_(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, window: Tensor, pending: Tensor, keep: Tensor
) -> Tensor:
    """Convolve rows with the inputs before them, channel by channel, and keep those inputs.

    ``y[t] = bias + sum_j weight[:, j] * input[t - width + 1 + j]``, in fp32 and in this order, rounded once. The window
    holds the ``width - 1`` inputs before the last pass' rows, then the first of these rows: the context of this pass
    starts at slot ``pending``. Afterwards it holds the context of row ``keep`` and then the first ``min(rows, block)``
    rows. Rows that are not kept may hold NaN.

    Args:
        x: ``[batch, rows, channels]``, any strides.
        weight: ``[channels, width]``; the last column meets the row itself. ``bias`` is ``[channels]`` or None.
        silu: True to apply ``y / (1 + exp(-y))``.
        window: ``[batch, width - 1 + block, channels]``; written.
        pending: ``[batch]``: rows of the last pass that were accepted since; it and ``keep`` as in `gated_recurrence_`.

    Returns:
        ``[batch, rows, channels]``.
    """


@op(
    "qkv[batch, length, columns] b[batch, length, heads]= a[batch, length, heads]= a_log[heads] dt_bias[heads]",
    "q[batch, length, key_heads, key_dim]:f32 k[batch, length, key_heads, key_dim]:f32 "
    "v[batch, length, heads, value_dim]:f32 log_decay[batch, length, heads]:f32 beta[batch, length, heads]:f32",
    where="key_heads >= 1 and key_dim >= 1 and heads >= 1 and value_dim >= 1; "
    "columns == 2 * key_heads * key_dim + heads * value_dim",
    derived="value_dim = (columns - 2 * key_heads * key_dim) // max(heads, 1); rows = batch * length; "
    "b_stride = row_stride(b); a_stride = row_stride(a)",
)
def delta_net_inputs(
    qkv: Tensor, b: Tensor, a: Tensor, a_log: Tensor, dt_bias: Tensor, key_heads: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Make the arguments of `gated_recurrence_`, in fp32, from what a Gated DeltaNet layer projects.

    q and k are divided by ``sqrt(sum of squares + 1e-6)`` per head, and q by ``sqrt(key_dim)``.
    ``log_decay = -exp(a_log) * softplus(a + dt_bias)``, and ``beta = sigmoid(b)`` is rounded to the dtype of ``b``.

    Args:
        qkv: ``[batch, rows, 2 * key_heads * key_dim + heads * value_dim]``, convolved: q heads, k heads, v heads.
        b, a: ``[batch, rows, heads]``; its rows may be any one stride apart.
        a_log, dt_bias: ``[heads]``.
        key_heads, key_dim: the number of heads that q and k have, and their width.

    Returns:
        ``(q, k, v, log_decay, beta)``, all float32: ``[batch, rows, key_heads, key_dim]`` twice,
        ``[batch, rows, heads, value_dim]``, ``[batch, rows, heads]`` twice.
    """


@op(
    "x[batch, length, heads, width]:f32 z[batch, length, heads * width]= weight[width]",
    "out[batch, length, heads * width]",
    where="width >= 1",
    derived="rows = batch * length; z_stride = row_stride(z)",
)
def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute ``rms_norm(x) * weight * silu(z)`` per head, in fp32, rounded once to the dtype of ``z``.

    Args:
        x: ``[batch, rows, heads, width]`` float32.
        z: ``[batch, rows, heads * width]``, like the result; its rows may be any one stride apart.
        weight: ``[width]``; ``eps`` is added to the mean square.
    """
