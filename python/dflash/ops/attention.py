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

    Query i of sequence b is at position ``lengths[b] + i`` and sees slots up to ``lengths[b] + rows - 1``; nothing past
    them is read. Key tiles are aligned to absolute positions and reduced in a fixed order: a row's bits depend on its
    query and its keys, not on its place in the block, ``rows`` or the batch.

    With ``ancestors`` the block is a tree: row i is in slot ``lengths[b] + i``, at position ``lengths[b]`` plus its
    depth. Its bits are those of a chain of its ancestors.

    Args:
        q: ``[batch, rows, num_heads, head_dim]``, any strides.
        k_cache: ``[batch, num_kv_heads, capacity, head_dim]``; ``v_cache`` may have another ``v_head_dim``.
        lengths: ``[batch]``, clamped to ``-rows .. 2 * capacity + rows``.
        scale: the factor on the scores.
        causal: True if a query sees no key after its own position.
        window: a query sees keys less than this many positions back and, unless causal, ahead; 0 for no window.
        softcap: the scaled scores become ``softcap * tanh(scores / softcap)``; 0 for none.
        sinks: ``[num_heads]``, one more unscaled logit per head in the softmax's denominator; or None.
        ancestors: ``[batch, rows, ceil(rows / 64)]``: row i of the block sees row j where bit ``j % 64`` of word
            ``j // 64`` is set, which it is for itself and its ancestors. Not checked. None for a chain.
        fresh: for CUDA. 0 or more says that the call just before is `qkv_norm_rope_append_`, which appends no slot
            before ``lengths[b] - fresh``; older keys are then read early. -1 if nothing is known.

    Returns:
        ``[batch, rows, num_heads, v_head_dim]``; zeros for a query that sees no key.
    """


def _plan_append(launch: Launcher, s: Scope) -> None:
    """Read early only where nothing was copied: the copy would be what the kernel ahead writes."""
    early = [x for x in (*s.arguments[1:8], s.arguments[-1]) if x is not None]
    s.prefetch = bool(s.prefetch) and switches.PREFETCH and all(x.is_contiguous() for x in early)


@op(
    "qkv[batch, rows, (num_heads * (2 if gated else 1) + 2 * num_kv_heads) * head_dim] lengths[batch]:i64 "
    "num_context[batch]:i64 depth[batch, q_rows]:i64 cos[positions, half]:f32 sin[positions, half]:f32 "
    "q_norm_weight[head_dim] k_norm_weight[head_dim] q_out[batch, q_rows, num_heads, head_dim]! "
    "k_cache[batch, num_kv_heads, capacity, head_dim]! v_cache[batch, num_kv_heads, capacity, head_dim]! "
    "origin[batch]:i64",
    where="capacity >= 1; positions >= 1; 2 * half <= head_dim; q_rows <= rows; q_rows == rows or has(num_context)",
    prepare=_plan_append,
)
def qkv_norm_rope_append_(
    qkv: Tensor, lengths: Tensor, num_context: Tensor | None, depth: Tensor | None, cos: Tensor, sin: Tensor,
    q_norm_weight: Tensor | None, k_norm_weight: Tensor | None, eps: float, q_out: Tensor, k_cache: Tensor,
    v_cache: Tensor, zero_centered: bool = False, gated: bool = False, prefetch: bool = False,
    origin: Tensor | None = None,
) -> None:  # fmt: skip
    """Split packed QKV rows; norm and rotate q and k; write q of the last rows; append k and v to the cache.

    The last ``q_rows`` rows are a block: row i is appended to slot ``lengths[b] + i``. The rows before are context: row
    i is appended to slot ``lengths[b] - num_context[b] + i``, and those at or past ``num_context[b]`` are off. A slot
    outside the cache appends nothing. RoPE rotates halves ("rotate_half") of the first ``rotary`` dimensions of a head,
    in fp32, rounded once.

    Args:
        qkv: ``[batch, rows, (num_heads + 2 * num_kv_heads) * head_dim]``: the q heads, the k heads, the v heads.
        lengths: ``[batch]``, as in `block_attention`.
        num_context: ``[batch]``, clamped to 0 .. ``rows - q_rows``; None if ``q_rows`` is ``rows``.
        depth: ``[batch, q_rows]``: row i of a block rotates by position ``lengths[b] + depth[b, i]``, clamped to
            0 .. ``q_rows``. None for a chain.
        cos, sin: ``[positions, rotary / 2]``; positions past the end take the last.
        q_norm_weight, k_norm_weight: ``[head_dim]``, or None for no norm. See `rms_norm` for the rest.
        q_out: ``[batch, q_rows, num_heads, head_dim]``; written.
        k_cache, v_cache: ``[batch, num_kv_heads, capacity, head_dim]``; written.
        gated: each q head in ``qkv`` is followed by a gate of its size, which is not read. See `sigmoid_mul`.
        prefetch: for CUDA: everything but ``qkv`` may be read before the kernel ahead has ended. Nothing that may still
            run then may write it.
        origin: ``[batch]``, the position of slot 0, clamped to 0 .. ``positions``: RoPE counts from it. None for 0.
    """


@op(
    "kv[num_layers, batch, rows, columns] positions[batch, rows]:i64 cos[batch, rows, half]:f32 "
    "sin[batch, rows, half]:f32 k_norm_weight[num_layers, head_dim] "
    "k_caches{num_layers}[batch, num_kv_heads, capacity, head_dim]! "
    "v_caches{num_layers}[batch, num_kv_heads, capacity, head_dim]!",
    where="num_layers >= 1 and capacity >= 1; columns == 2 * num_kv_heads * head_dim; 2 * half <= head_dim",
)
def append_context_kv_(
    kv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_norm_weight: Tensor | None, eps: float,
    k_caches: list[Tensor], v_caches: list[Tensor],
) -> None:  # fmt: skip
    """Norm and rotate context K and append K and V, for all draft layers at once (prefill).

    Args:
        kv: ``[num_layers, batch, rows, 2 * num_kv_heads * head_dim]``: the k heads, the v heads.
        positions: ``[batch, rows]``, all different within a sequence. One outside the cache appends nothing.
        cos, sin: ``[batch, rows, rotary / 2]``.
        k_norm_weight: ``[num_layers, head_dim]``, or None for no norm; ``eps`` is added to the mean square.
        k_caches, v_caches: per layer ``[batch, num_kv_heads, capacity, head_dim]``; written.
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
        key: ``[batch, num_kv_heads, rows, head_dim]``, any strides; ``value`` may have another ``v_head_dim``.
        positions: ``[batch, rows]``, as in `append_context_kv_`.
        k_cache, v_cache: ``[batch, num_kv_heads, capacity, head_dim or v_head_dim]``; written.
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

    This happens for ``1 <= j < counts`` where ``path[j] > j``, in all layers. Nothing moves from or to slots outside
    the cache.

    Args:
        path: ``[batch, path_rows]``, ascending, as `accept_path_` writes it.
        counts: ``[batch]``: how many rows of the path were accepted; ``first [batch]`` is the slot of row 0.
        k_caches, v_caches: per layer ``[batch, num_kv_heads, capacity, head_dim]``, any dtype; written. Heads and
            dimensions may differ between layers.
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
        out: ``[batch, at least path_rows, width]``; its first ``path_rows`` rows are written.
    """
