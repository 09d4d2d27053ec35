"""Appends to the K/V cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from . import switches
from .checks import dense, expect, expect_cache, expect_contiguous, expect_rope, expect_rope_table, unit_stride
from .registry import Launcher, op


@op(mutates=("q_out", "k_cache", "v_cache"))
def qkv_norm_rope_append_(
    launch: Launcher,
    qkv: Tensor,
    lengths: Tensor,
    num_context: Tensor | None,
    depth: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_norm_weight: Tensor | None,
    k_norm_weight: Tensor | None,
    eps: float,
    q_out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    zero_centered: bool = False,
    gated: bool = False,
    prefetch: bool = False,
) -> None:
    """Split packed QKV rows; norm and rotate q and k; write q of the last rows; append k and v to the cache.

    The last ``q_rows`` rows are a block: row i of sequence b is appended to slot ``lengths[b] + i``. The rows in front
    are context: row i is appended to slot ``lengths[b] - num_context[b] + i``, and one at or past ``num_context[b]`` is
    off. A slot outside the cache appends nothing.

    The norm is RMSNorm over each head. RoPE is the half-split kind ("rotate_half") over the first ``rotary``
    dimensions of a head, in fp32 on the fp32 normed value, rounded once.

    Args:
        qkv: ``[batch, rows, (num_heads + 2 * num_kv_heads) * head_dim]``, float32 or bfloat16: the q heads, the
            k heads, the v heads.
        lengths: ``[batch]`` int64, the position of each block's first row, as in `block_attention`.
        num_context: ``[batch]`` int64, clamped to 0 .. ``rows - q_rows``; None if ``q_rows`` is ``rows``.
        depth: ``[batch, q_rows]`` int64, or None for a chain: row i of a block rotates by position
            ``lengths[b] + depth[b, i]``, clamped to 0 .. ``q_rows``.
        cos: ``[positions, rotary / 2]`` float32, one row per position; positions past the end take the last.
        sin: like ``cos``.
        q_norm_weight: ``[head_dim]``, the dtype of ``qkv``, or None for no norm.
        k_norm_weight: like ``q_norm_weight``.
        eps: added to the mean square.
        q_out: ``[batch, q_rows, num_heads, head_dim]``, contiguous; written. Row j comes from row
            ``rows - q_rows + j`` of ``qkv``.
        k_cache: ``[batch, num_kv_heads, capacity, head_dim]``, contiguous; written.
        v_cache: like ``k_cache``.
        zero_centered: the norms multiply by ``1 + weight``.
        gated: each q head is followed by a gate of its size, which is not read: ``qkv`` is
            ``[batch, rows, (2 * num_heads + 2 * num_kv_heads) * head_dim]``. See `sigmoid_mul`.
        prefetch: for CUDA, read everything but ``qkv`` before the kernel ahead has ended. No kernel that may still run
            then may write it: all that do must be followed by one that does not overlap, such as any of torch, before
            the kernel ahead. ``DFLASH_PREFETCH=0`` in the environment turns it off.

    Raises:
        ValueError: a shape does not fit, or a written tensor is not contiguous. TypeError: a dtype does not fit.
    """
    _check_qkv(qkv, lengths, num_context, depth, cos, sin, q_norm_weight, k_norm_weight, q_out, k_cache, v_cache, gated)
    dtype = launch.dtype("qkv_norm_rope_append_", "qkv", qkv)
    batch, q_rows, num_heads, head_dim = q_out.shape
    early = (lengths, num_context, depth, cos, sin, q_norm_weight, k_norm_weight)
    read = [dense(x) for x in early]
    prefetch = prefetch and switches.PREFETCH and all(x is y for x, y in zip(early, read, strict=True))
    launch(
        "qkv_norm_rope_append", qkv.contiguous(), *read, q_out, k_cache, v_cache, batch, qkv.shape[1], q_rows,
        num_heads, k_cache.shape[1], head_dim, cos.shape[1], cos.shape[0], k_cache.shape[2], eps, zero_centered, gated,
        prefetch, dtype,
    )  # fmt: skip


def _check_qkv(
    qkv: Tensor, lengths: Tensor, num_context: Tensor | None, depth: Tensor | None, cos: Tensor, sin: Tensor,
    q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, q_out: Tensor, k_cache: Tensor, v_cache: Tensor,
    gated: bool,
) -> None:  # fmt: skip
    op = "qkv_norm_rope_append_"
    if qkv.dim() == 3 and cos.dim() == 2 and q_out.dim() == k_cache.dim() == 4 and _qkv_fits(
        qkv, lengths, num_context, depth, cos, sin, [x for x in (q_norm_weight, k_norm_weight) if x is not None],
        q_out, k_cache, v_cache, gated,
    ):  # fmt: skip
        return
    expect(op, "qkv", qkv, (None, None, None), qkv.dtype, "batch, rows, (num_heads + 2 * num_kv_heads) * head_dim")
    batch, rows, width = qkv.shape
    expect(op, "q_out", q_out, (batch, None, None, None), qkv.dtype, "batch, q_rows, num_heads, head_dim")
    _, q_rows, num_heads, head_dim = q_out.shape
    expect_cache(op, ("k_cache", "v_cache"), k_cache, v_cache, batch, None, (head_dim, head_dim), qkv.dtype)
    expect_contiguous(op, "q_out", q_out)
    num_kv_heads, gates = k_cache.shape[1], num_heads if gated else 0
    if width != (num_heads + gates + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"{op}: qkv must be [batch, rows, ({num_heads + gates} + 2 * {num_kv_heads}) * {head_dim}] "
            f"as q_out and k_cache say, got {list(qkv.shape)}"
        )
    if q_rows > rows:
        raise ValueError(f"{op}: q_out may have at most the {rows} rows of qkv, got {q_rows}")
    expect(op, "lengths", lengths, (batch,), torch.int64, "batch")
    if num_context is not None:
        expect(op, "num_context", num_context, (batch,), torch.int64, "batch")
    elif q_rows < rows:
        raise ValueError(f"{op}: num_context must be given for the {rows - q_rows} rows in front of q_out's, got None")
    if depth is not None:
        expect(op, "depth", depth, (batch, q_rows), torch.int64, "batch, q_rows")
    expect_rope_table(op, cos, sin, head_dim)
    for name, weight in (("q_norm_weight", q_norm_weight), ("k_norm_weight", k_norm_weight)):
        if weight is not None:
            expect(op, name, weight, (head_dim,), qkv.dtype, "head_dim")


def _qkv_fits(
    qkv: Tensor, lengths: Tensor, num_context: Tensor | None, depth: Tensor | None, cos: Tensor, sin: Tensor,
    norms: list[Tensor], q_out: Tensor, k_cache: Tensor, v_cache: Tensor, gated: bool,
) -> bool:  # fmt: skip
    """Return True if a call is right: the short way past `_check_qkv`."""
    (batch, rows, _), (_, q_rows, heads, head_dim) = qkv.shape, q_out.shape
    (_, kv_heads, capacity, _), (positions, half), dtype = k_cache.shape, cos.shape, qkv.dtype
    cache, width = (batch, kv_heads, capacity, head_dim), ((2 if gated else 1) * heads + 2 * kv_heads) * head_dim
    counts = (lengths,) if num_context is None else (lengths, num_context)
    return (
        capacity > 0
        and positions > 0
        and (q_rows == rows or (q_rows < rows and num_context is not None))
        and 2 * half <= head_dim
        and _C.fits(
            False, qkv, (batch, rows, width), dtype, counts, (batch,), torch.int64,
            () if depth is None else (depth,), (batch, q_rows), torch.int64,
            (cos, sin), (positions, half), torch.float32, norms, (head_dim,), dtype,
        )
        and _C.fits(True, q_out, (batch, q_rows, heads, head_dim), dtype, (k_cache, v_cache), cache, dtype)
    )  # fmt: skip


@op(mutates=("k_caches", "v_caches"))
def append_context_kv_(
    launch: Launcher,
    kv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_norm_weight: Tensor | None,
    eps: float,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
) -> None:
    """Norm and rotate context K and append K and V, for all draft layers at once (prefill).

    Args:
        kv: ``[num_layers, batch, rows, 2 * num_kv_heads * head_dim]``, float32 or bfloat16: the k heads, the v heads.
        positions: ``[batch, rows]`` int64, the cache slot of each row, all different within a sequence. A row whose
            position is negative or not below the capacity appends nothing.
        cos: ``[batch, rows, rotary / 2]`` float32; those of rows that are off may hold anything.
        sin: like ``cos``.
        k_norm_weight: ``[num_layers, head_dim]``, the dtype of ``kv``, or None for no norm.
        eps: added to the mean square.
        k_caches: per layer ``[batch, num_kv_heads, capacity, head_dim]``, contiguous; written.
        v_caches: like ``k_caches``.

    Raises:
        ValueError: a shape does not fit, or a cache is not contiguous. TypeError: a dtype does not fit.
    """
    _check_context_kv(kv, positions, cos, sin, k_norm_weight, k_caches, v_caches)
    dtype = launch.dtype("append_context_kv_", "kv", kv)
    if not k_caches:
        return
    num_layers, batch, rows, _ = kv.shape
    _, num_kv_heads, capacity, head_dim = k_caches[0].shape
    launch(
        "append_context_kv", kv.contiguous(), positions.contiguous(), cos.contiguous(), sin.contiguous(),
        dense(k_norm_weight), k_caches, v_caches, num_layers, batch, rows, num_kv_heads, head_dim, cos.shape[-1],
        capacity, eps, dtype,
    )  # fmt: skip


def _check_context_kv(
    kv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_norm_weight: Tensor | None, k_caches: list[Tensor],
    v_caches: list[Tensor],
) -> None:  # fmt: skip
    op, names = "append_context_kv_", "num_layers, batch, rows, 2 * num_kv_heads * head_dim"
    expect(op, "kv", kv, (None, None, None, None), kv.dtype, names)
    num_layers, batch, rows, width = kv.shape
    if len(k_caches) != num_layers or len(v_caches) != num_layers:
        raise ValueError(f"{op}: kv has {num_layers} layers, got {len(k_caches)} k_caches and {len(v_caches)} v_caches")
    if num_layers == 0:
        return
    expect_caches(op, k_caches, v_caches, batch, kv.dtype)
    _, heads, _, head_dim = k_caches[0].shape
    if width != 2 * heads * head_dim:
        raise ValueError(f"{op}: kv must be [{names}] with 2 * {heads} * {head_dim} columns, got {list(kv.shape)}")
    expect_rope(op, positions, cos, sin, batch, rows, head_dim)
    if k_norm_weight is not None:
        expect(op, "k_norm_weight", k_norm_weight, (num_layers, head_dim), kv.dtype, "num_layers, head_dim")


def expect_caches(op: str, k_caches: list[Tensor], v_caches: list[Tensor], batch: int, dtype: torch.dtype) -> None:
    """Raise unless all are contiguous caches of one shape ``[batch, num_kv_heads, capacity, head_dim]``."""
    heads = head_dim = None
    for layer, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
        at = (f"k_caches[{layer}]", f"v_caches[{layer}]")
        expect_cache(op, at, k_cache, v_cache, batch, heads, (head_dim, k_cache.shape[-1]), dtype)
        _, heads, _, head_dim = k_cache.shape
        if k_cache.shape != k_caches[0].shape:
            raise ValueError(f"{op}: {at[0]} must be {list(k_caches[0].shape)}, got {list(k_cache.shape)}")


@op(mutates=("k_cache", "v_cache"))
def append_kv_(
    launch: Launcher, key: Tensor, value: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor
) -> None:
    """Write ``cache[b, :, positions[b, r]] = new[b, :, r]`` for keys and values.

    Args:
        key: ``[batch, num_kv_heads, rows, head_dim]``, float32 or bfloat16, any strides.
        value: ``[batch, num_kv_heads, rows, v_head_dim]``, the dtype of ``key``, any strides.
        positions: ``[batch, rows]`` int64, as in `append_context_kv_`.
        k_cache: ``[batch, num_kv_heads, capacity, head_dim]``, contiguous; written.
        v_cache: ``[batch, num_kv_heads, capacity, v_head_dim]``, contiguous; written.

    Raises:
        ValueError: a shape does not fit, or a cache is not contiguous. TypeError: a dtype does not fit.
    """
    _check_kv(key, value, positions, k_cache, v_cache)
    dtype = launch.dtype("append_kv_", "key", key)
    key, value = unit_stride(key), unit_stride(value)
    batch, num_kv_heads, rows, head_dim = key.shape
    _, _, capacity, v_head_dim = v_cache.shape
    launch(
        "append_kv", key, value, positions.contiguous(), k_cache, v_cache, *key.stride()[:3], *value.stride()[:3],
        batch, rows, num_kv_heads, head_dim, v_head_dim, capacity, dtype,
    )  # fmt: skip


def _check_kv(key: Tensor, value: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    op, dtype = "append_kv_", key.dtype
    if key.dim() == v_cache.dim() == 4:
        (batch, heads, rows, head_dim), (_, _, capacity, v_head_dim) = key.shape, v_cache.shape
        if capacity > 0 and _C.fits(
            False, value, (batch, heads, rows, v_head_dim), dtype, positions, (batch, rows), torch.int64
        ) and _C.fits(
            True, k_cache, (batch, heads, capacity, head_dim), dtype, v_cache, (batch, heads, capacity, v_head_dim),
            dtype,
        ):  # fmt: skip
            return
    expect(op, "key", key, (None, None, None, None), key.dtype, "batch, num_kv_heads, rows, head_dim")
    batch, heads, rows, head_dim = key.shape
    expect(op, "value", value, (batch, heads, rows, None), key.dtype, "batch, num_kv_heads, rows, v_head_dim")
    expect(op, "positions", positions, (batch, rows), torch.int64, "batch, rows")
    expect_cache(op, ("k_cache", "v_cache"), k_cache, v_cache, batch, heads, (head_dim, value.shape[-1]), key.dtype)
