"""Attention of a block over the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from . import switches
from .checks import dense, expect, expect_cache, unit_stride
from .registry import Launcher, op


@op()
def block_attention(
    launch: Launcher,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    scale: float,
    causal: bool,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    ancestors: Tensor | None = None,
    fresh: int = -1,
) -> Tensor:
    """Attend from a block of queries to a cache that already holds the block's own K/V.

    Query i of sequence b is at position ``lengths[b] + i``. The keys are slots ``0 .. lengths[b] + rows - 1``;
    nothing past them is read. Key tiles are aligned to absolute positions and reduced in a fixed order, so a row's
    bits depend on its query and the keys it sees, not on its place in the block, on ``rows`` or on the batch.

    With ``ancestors`` the block is a tree: row i is at position ``lengths[b]`` plus its depth, its K/V still in slot
    ``lengths[b] + i``. Its keys take part in the sums as if they stood in the slots of their positions, so its bits are
    those of a chain that consists of its ancestors.

    On CUDA, tensor cores do the work in bfloat16 and float16 where both head dimensions are multiples of 8 up to 256;
    elsewhere a plain kernel does.

    Args:
        q: ``[batch, rows, num_heads, head_dim]``, float32 or bfloat16 (on CUDA float16 too), any strides.
        k_cache: ``[batch, num_kv_heads, capacity, head_dim]``, the dtype of ``q``. Query head h uses
            head ``h // (num_heads // num_kv_heads)``.
        v_cache: ``[batch, num_kv_heads, capacity, v_head_dim]``, the dtype of ``q``.
        lengths: ``[batch]`` int64, the position of each sequence's first query. They are on the device and not
            checked; one outside ``-rows .. 2 * capacity + rows`` counts as the nearest of these.
        scale: the factor on the scores.
        causal: True: a query sees the keys up to its own position. False: all of them.
        window: a query sees keys less than ``window`` positions back and, unless causal, ahead; 0 for no window. One of
            more than ``capacity + rows`` counts as that. A tree's rows count by position too.
        softcap: the scores become ``softcap * tanh(scores / softcap)`` after scaling; 0 for none.
        sinks: ``[num_heads]``, one more logit per head in the softmax's denominator, not scaled; or None.
        ancestors: ``[batch, rows, ceil(rows / 64)]`` int64, or None for a chain: query i sees every key before the
            block, and row j of the block where bit ``j % 64`` of ``ancestors[b, i, j // 64]`` is set. The bits are set
            for the row itself and its ancestors, all in rows before it; its depth is their number. They are on the
            device and not checked.
        fresh: for CUDA, where a chain's older keys are then read before the kernel ahead has ended. 0 or more: the call
            just before this one is `qkv_norm_rope_append_`, which appends no slot before ``lengths[b] - fresh``.
            Otherwise keys may be read too early, and nothing would say so. -1: nothing is known of the kernel ahead.
            ``DFLASH_PREFETCH=0`` in the environment turns it off.

    Returns:
        ``[batch, rows, num_heads, v_head_dim]``, the dtype of ``q``; zeros for a query that sees no key.

    Raises:
        ValueError: a shape or a value does not fit. TypeError: a dtype does not fit.
    """
    # 1. Check
    if sinks is not None or ancestors is not None or not _plain_arguments_fit(
        q, k_cache, v_cache, lengths, window, softcap
    ):  # fmt: skip
        _check(q, k_cache, v_cache, lengths, causal, window, softcap, sinks, ancestors)
    dtype = launch.dtype("block_attention", "q", q)
    # 2. Make what the kernel reads dense
    fresh = fresh if _may_read_early(k_cache, v_cache, lengths) else -1
    q, k_cache, v_cache, lengths = unit_stride(q), k_cache.contiguous(), v_cache.contiguous(), lengths.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    batch, rows, num_heads, head_dim = q.shape
    _, num_kv_heads, capacity, v_head_dim = v_cache.shape
    splits, workspace = launch.workspace(
        "block_attention", q.device, dtype, k_cache, v_cache, batch, rows, num_heads, num_kv_heads, head_dim,
        v_head_dim, capacity,
    )  # fmt: skip
    if workspace is not None:
        q = launch.aligned(q, 3)
    # 3. Allocate and run
    if v_head_dim == head_dim:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)  # half the time of new_empty
    else:
        out = q.new_empty(batch, rows, num_heads, v_head_dim)
    launch(
        "block_attention", q, k_cache, v_cache, lengths, sinks, dense(ancestors), out, *q.stride()[:3], batch, rows,
        num_heads, num_kv_heads, head_dim, v_head_dim, capacity, min(window, capacity + rows), scale, softcap, causal,
        workspace, splits, fresh, dtype,
    )  # fmt: skip
    return out


def _may_read_early(*tensors: Tensor) -> bool:
    """Return False if one of these is copied first: the copy would be what the kernel ahead writes."""
    return switches.PREFETCH and all(x.is_contiguous() for x in tensors)


def _plain_arguments_fit(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, window: int, softcap: float
) -> bool:
    """Return True if a call without sinks and ancestors is right: the short way past `_check`."""
    if not (q.dim() == v_cache.dim() == 4 and window >= 0 and softcap >= 0):
        return False
    (batch, _, num_heads, head_dim), (_, num_kv_heads, capacity, v_head_dim) = q.shape, v_cache.shape
    return (
        num_kv_heads > 0
        and num_heads % num_kv_heads == 0
        and capacity > 0
        and head_dim > 0
        and _C.fits(
            False,
            k_cache,
            (batch, num_kv_heads, capacity, head_dim),
            q.dtype,
            v_cache,
            (batch, num_kv_heads, capacity, v_head_dim),
            q.dtype,
            lengths,
            (batch,),
            torch.int64,
        )
    )


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, causal: bool, window: int, softcap: float,
    sinks: Tensor | None, ancestors: Tensor | None,
) -> None:  # fmt: skip
    op = "block_attention"
    expect(op, "q", q, (None, None, None, None), q.dtype, "batch, rows, num_heads, head_dim")
    batch, rows, num_heads, head_dim = q.shape
    expect_cache(op, ("k_cache", "v_cache"), k_cache, v_cache, batch, None, (head_dim, None), q.dtype, mutated=False)
    num_kv_heads = k_cache.shape[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"{op}: num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
    expect(op, "lengths", lengths, (batch,), torch.int64, "batch")
    if head_dim == 0:
        raise ValueError(f"{op}: head_dim must be at least 1, got q {list(q.shape)}")
    if window < 0:
        raise ValueError(f"{op}: window must be positive, or 0 for none, got {window}")
    if softcap < 0:
        raise ValueError(f"{op}: softcap must be positive, or 0 for none, got {softcap}")
    if sinks is not None:
        expect(op, "sinks", sinks, (num_heads,), sinks.dtype, "num_heads")
    if ancestors is not None:
        words = -(-rows // 64)
        expect(op, "ancestors", ancestors, (batch, rows, words), torch.int64, "batch, rows, ceil(rows / 64)")
        if rows > _C.MAX_TREE_ROWS:
            raise ValueError(f"{op}: a tree has at most {_C.MAX_TREE_ROWS} rows, got {rows}")
        if not causal:
            raise ValueError(f"{op}: causal must be True with ancestors, got False")
