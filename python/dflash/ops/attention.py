"""The K/V cache and attention over it."""

from __future__ import annotations

from torch import Tensor

from .. import _C
from . import switches
from .contract import Scope
from .registry import Launcher, op


def _plan_attention(launch: Launcher, s: Scope) -> None:
    """See how the kernel splits the keys, and whether it may read them early: not if one was copied just now."""
    s.splits, s.workspace = launch.workspace(
        "block_attention", s.q.device, s.dtype, s.k_cache, s.v_cache, s.batch, s.rows, s.num_heads, s.num_kv_heads,
        s.head_dim, s.v_head_dim, s.capacity,
    )  # fmt: skip
    if s.workspace is not None:
        s.q = launch.aligned(s.q, 3)
        s.q_stride_batch, s.q_stride_row, s.q_stride_head = s.q.stride()[:3]
    may_read_early = switches.PREFETCH and all(x.is_contiguous() for x in s.arguments[1:4])
    s.fresh = s.fresh if may_read_early else -1


@op(
    "q[batch, rows, num_heads, head_dim]~ k_cache[batch, num_kv_heads, capacity, head_dim] "
    "v_cache[batch, num_kv_heads, capacity, v_head_dim] lengths[batch]:i64 sinks[num_heads]:float "
    "ancestors[batch, rows, (rows + 63) // 64]:i64",
    "out[batch, rows, num_heads, v_head_dim]",
    where="num_kv_heads >= 1 and num_heads % num_kv_heads == 0; capacity >= 1; head_dim >= 1; window >= 0; "
    "at_least(softcap, 0): softcap must be positive, or 0 for none; "
    f"not has(ancestors) or rows <= {_C.MAX_TREE_ROWS}: a tree has at most {_C.MAX_TREE_ROWS} rows; "
    "causal or not has(ancestors): causal must be True with ancestors",
    derived="window = min(window, capacity + rows); q_stride_batch = stride(q, 0); q_stride_row = stride(q, 1); "
    "q_stride_head = stride(q, 2)",
    prepare=_plan_attention,
)
def block_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, scale: float, causal: bool, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None, ancestors: Tensor | None = None, fresh: int = -1,
) -> Tensor:  # fmt: skip
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
        q: ``[batch, rows, num_heads, head_dim]``, any strides.
        k_cache: ``[batch, num_kv_heads, capacity, head_dim]``. Query head h uses head
            ``h // (num_heads // num_kv_heads)``.
        v_cache: ``[batch, num_kv_heads, capacity, v_head_dim]``.
        lengths: ``[batch]``, the position of each sequence's first query. They are on the device and not checked; one
            outside ``-rows .. 2 * capacity + rows`` counts as the nearest of these.
        scale: the factor on the scores.
        causal: True: a query sees the keys up to its own position. False: all of them.
        window: a query sees keys less than ``window`` positions back and, unless causal, ahead; 0 for no window. One of
            more than ``capacity + rows`` counts as that. A tree's rows count by position too.
        softcap: the scores become ``softcap * tanh(scores / softcap)`` after scaling; 0 for none.
        sinks: ``[num_heads]``, one more logit per head in the softmax's denominator, not scaled; or None.
        ancestors: ``[batch, rows, ceil(rows / 64)]``, or None for a chain: query i sees every key before the block, and
            row j of the block where bit ``j % 64`` of ``ancestors[b, i, j // 64]`` is set. The bits are set for the row
            itself and its ancestors, all in rows before it; its depth is their number. They are on the device and not
            checked.
        fresh: for CUDA, where a chain's older keys are then read before the kernel ahead has ended. 0 or more: the call
            just before this one is `qkv_norm_rope_append_`, which appends no slot before ``lengths[b] - fresh``.
            Otherwise keys may be read too early, and nothing would say so. -1: nothing is known of the kernel ahead.
            ``DFLASH_PREFETCH=0`` in the environment turns it off.

    Returns:
        ``[batch, rows, num_heads, v_head_dim]``; zeros for a query that sees no key.
    """


def _plan_append(launch: Launcher, s: Scope) -> None:
    """Read early only where nothing was copied: the copy would be what the kernel ahead writes."""
    early = [x for x in s.arguments[1:8] if x is not None]
    s.prefetch = bool(s.prefetch) and switches.PREFETCH and all(x.is_contiguous() for x in early)


@op(
    "qkv[batch, rows, (num_heads * (2 if gated else 1) + 2 * num_kv_heads) * head_dim] lengths[batch]:i64 "
    "num_context[batch]:i64 depth[batch, q_rows]:i64 cos[positions, half]:f32 sin[positions, half]:f32 "
    "q_norm_weight[head_dim] k_norm_weight[head_dim] q_out[batch, q_rows, num_heads, head_dim]! "
    "k_cache[batch, num_kv_heads, capacity, head_dim]! v_cache[batch, num_kv_heads, capacity, head_dim]!",
    where="capacity >= 1; positions >= 1; 2 * half <= head_dim; q_rows <= rows; q_rows == rows or has(num_context)",
    prepare=_plan_append,
)
def qkv_norm_rope_append_(
    qkv: Tensor, lengths: Tensor, num_context: Tensor | None, depth: Tensor | None, cos: Tensor, sin: Tensor,
    q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, eps: float, q_out: Tensor, k_cache: Tensor,
    v_cache: Tensor, zero_centered: bool = False, gated: bool = False, prefetch: bool = False,
) -> None:  # fmt: skip
    """Split packed QKV rows; norm and rotate q and k; write q of the last rows; append k and v to the cache.

    The last ``q_rows`` rows are a block: row i of sequence b is appended to slot ``lengths[b] + i``. The rows in front
    are context: row i is appended to slot ``lengths[b] - num_context[b] + i``, and one at or past ``num_context[b]`` is
    off. A slot outside the cache appends nothing.

    The norm is RMSNorm over each head. RoPE is the half-split kind ("rotate_half") over the first ``rotary``
    dimensions of a head, in fp32 on the fp32 normed value, rounded once.

    Args:
        qkv: ``[batch, rows, (num_heads + 2 * num_kv_heads) * head_dim]``: the q heads, the k heads, the v heads.
        lengths: ``[batch]``, the position of each block's first row, as in `block_attention`.
        num_context: ``[batch]``, clamped to 0 .. ``rows - q_rows``; None if ``q_rows`` is ``rows``.
        depth: ``[batch, q_rows]``, or None for a chain: row i of a block rotates by position
            ``lengths[b] + depth[b, i]``, clamped to 0 .. ``q_rows``.
        cos: ``[positions, rotary / 2]``, one row per position; positions past the end take the last.
        sin: like ``cos``.
        q_norm_weight: ``[head_dim]``, or None for no norm.
        k_norm_weight: like ``q_norm_weight``.
        eps: added to the mean square.
        q_out: ``[batch, q_rows, num_heads, head_dim]``; written. Row j comes from row ``rows - q_rows + j`` of ``qkv``.
        k_cache: ``[batch, num_kv_heads, capacity, head_dim]``; written.
        v_cache: like ``k_cache``.
        zero_centered: the norms multiply by ``1 + weight``.
        gated: each q head is followed by a gate of its size, which is not read: ``qkv`` is
            ``[batch, rows, (2 * num_heads + 2 * num_kv_heads) * head_dim]``. See `sigmoid_mul`.
        prefetch: for CUDA, read everything but ``qkv`` before the kernel ahead has ended. No kernel that may still run
            then may write it: all that do must be followed by one that does not overlap, such as any of torch, before
            the kernel ahead. ``DFLASH_PREFETCH=0`` in the environment turns it off.
    """


def _has_layers(_: Launcher, s: Scope) -> bool:
    return s.num_layers > 0


@op(
    "kv[num_layers, batch, rows, columns] positions[batch, rows]:i64 cos[batch, rows, half]:f32 "
    "sin[batch, rows, half]:f32 k_norm_weight[num_layers, head_dim] "
    "k_caches{num_layers}[batch, num_kv_heads, capacity, head_dim]! "
    "v_caches{num_layers}[batch, num_kv_heads, capacity, head_dim]!",
    where="num_layers == 0 or columns == 2 * num_kv_heads * head_dim; num_layers == 0 or capacity >= 1; "
    "num_layers == 0 or 2 * half <= head_dim",
    prepare=_has_layers,
)
def append_context_kv_(
    kv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_norm_weight: Tensor | None, eps: float,
    k_caches: list[Tensor], v_caches: list[Tensor],
) -> None:  # fmt: skip
    """Norm and rotate context K and append K and V, for all draft layers at once (prefill).

    Args:
        kv: ``[num_layers, batch, rows, 2 * num_kv_heads * head_dim]``: the k heads, the v heads.
        positions: ``[batch, rows]``, the cache slot of each row, all different within a sequence. A row whose position
            is negative or not below the capacity appends nothing.
        cos: ``[batch, rows, rotary / 2]``; those of rows that are off may hold anything.
        sin: like ``cos``.
        k_norm_weight: ``[num_layers, head_dim]``, or None for no norm.
        eps: added to the mean square.
        k_caches: per layer ``[batch, num_kv_heads, capacity, head_dim]``; written.
        v_caches: like ``k_caches``.
    """


@op(
    "key[batch, num_kv_heads, rows, head_dim]~ value[batch, num_kv_heads, rows, v_head_dim]~ "
    "positions[batch, rows]:i64 k_cache[batch, num_kv_heads, capacity, head_dim]! "
    "v_cache[batch, num_kv_heads, capacity, v_head_dim]!",
    where="capacity >= 1",
    derived="k_stride_batch = stride(key, 0); k_stride_head = stride(key, 1); k_stride_row = stride(key, 2); "
    "v_stride_batch = stride(value, 0); v_stride_head = stride(value, 1); v_stride_row = stride(value, 2)",
)
def append_kv_(key: Tensor, value: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Write ``cache[b, :, positions[b, r]] = new[b, :, r]`` for keys and values.

    Args:
        key: ``[batch, num_kv_heads, rows, head_dim]``, any strides.
        value: ``[batch, num_kv_heads, rows, v_head_dim]``, any strides.
        positions: ``[batch, rows]``, as in `append_context_kv_`.
        k_cache: ``[batch, num_kv_heads, capacity, head_dim]``; written.
        v_cache: ``[batch, num_kv_heads, capacity, v_head_dim]``; written.
    """


def _compact(launch: Launcher, s: Scope) -> None:
    s.caches = [*s.k_caches, *s.v_caches]
    s.num_caches, s.heads = len(s.caches), [cache.shape[1] for cache in s.caches]
    s.row_bytes = [cache.shape[3] * cache.element_size() for cache in s.caches]
    if s.caches:
        launch("compact_kv", s)


@op(
    "path[batch, path_rows]:i64 counts[batch]:i64 first[batch]:i64 k_caches{layers}[batch, *, capacity, *]:any! "
    "v_caches{layers}[batch, *, capacity, *]:any!",
    where="layers == 0 or capacity >= 1",
    body=_compact,
)
def compact_kv_(path: Tensor, counts: Tensor, first: Tensor, k_caches: list[Tensor], v_caches: list[Tensor]) -> None:
    """Move the keys and values of an accepted path together: slot ``first + path[j]`` to slot ``first + j``.

    This happens for ``1 <= j < counts``, as if all slots were read before the first is written. A path ascends, so
    ``path[j] >= j``; nothing moves where ``path[j] <= j``, and nothing from or to slots outside the cache. One launch
    serves all layers.

    Args:
        path: ``[batch, path_rows]``, as `accept_path_` writes it.
        counts: ``[batch]``: how many rows of the path were accepted, ``num_context`` of `accept_path_`.
        first: ``[batch]``: the slot of row 0.
        k_caches: per layer ``[batch, num_kv_heads, capacity, head_dim]``, any dtype; written. Heads and dimensions may
            differ between layers.
        v_caches: per layer ``[batch, num_kv_heads, capacity, v_head_dim]``; written.
    """


@op(
    "x[batch, rows, width] path[batch, path_rows]:i64 out[batch, out_rows, width]!",
    where="rows >= 1; path_rows <= out_rows",
    derived="row_bytes = width * itemsize(x)",
)
def gather_rows_(x: Tensor, path: Tensor, out: Tensor) -> None:
    """Write ``out[b, j] = x[b, path[b, j]]``; an index outside the rows of ``x`` counts as the nearest.

    Args:
        x: ``[batch, rows, width]``, any dtype.
        path: ``[batch, path_rows]``.
        out: ``[batch, at least path_rows, width]``; its first ``path_rows`` rows are written, the others stay.
    """
