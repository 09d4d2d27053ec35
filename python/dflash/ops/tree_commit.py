"""Keeping the accepted path of a tree: its tokens, its keys and values, its features."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _C
from .checks import emission_fits, expect, expect_cache, expect_contiguous, expect_emission
from .registry import Launcher, op
from .tree import MAX_TREE_ROWS


@op(mutates=("tokens", "length", "num_context", "done", "path", "chain_choices", "chain_ids"))
def accept_path_(
    launch: Launcher,
    ids: Tensor,
    parents: Tensor,
    choices: Tensor,
    stop_token_ids: Tensor,
    limits: Tensor,
    tokens: Tensor,
    length: Tensor,
    num_context: Tensor,
    done: Tensor,
    path: Tensor,
    chain_choices: Tensor,
    chain_ids: Tensor,
) -> None:
    """Emit the path of a tree that the target's choices follow, and advance every running row.

    The walk starts at row 0. It emits the choice of the row where it stands and continues at that row's child of this
    id; without one it ends, and so it does after ``path_rows`` tokens. As in `accept_prefix_`, nothing is emitted past
    the first stop token or past the room that ``limits`` and the capacity of ``tokens`` leave. A chain is a tree with
    ``parents[b, j] = j - 1``; here it gives what `accept_prefix_` gives. What was kept is also told as a chain.

    Args:
        ids: ``[batch, rows]`` int64, at most `MAX_TREE_ROWS`: the anchor, then the nodes; a negative one is never a
            child.
        parents: ``[batch, rows]`` int64: the row of each node's parent, which comes before it. A row with any other
            value is nobody's child, as row 0 is. Of several siblings with one id the first counts.
        choices: ``[batch, rows]`` int64: the target's choice for the position after each row; -1: its logits held NaN.
            Such a choice is never emitted; the walk is done where it would have been.
        stop_token_ids: ``[batch, n]`` int64, as in `accept_prefix_`.
        limits: ``[batch]`` int64, as in `accept_prefix_`.
        tokens: ``[batch, capacity]`` int64, written, contiguous.
        length: ``[batch]`` int64, advanced in place, contiguous.
        num_context: ``[batch]`` int64, written, contiguous: how many tokens were emitted.
        done: ``[batch]`` int64, written, contiguous, as in `accept_prefix_`.
        path: ``[batch, path_rows]`` int64, written, contiguous, with at least one column: the rows whose choices were
            emitted, in ascending order; from ``num_context`` on ``path[b, j] = j``.
        chain_choices: like ``path``: the choices of these rows, which were emitted; -1 from ``num_context`` on.
        chain_ids: like ``path``: the anchor, then the drafts among the emitted tokens, each one column after the choice
            that it equals; -1 elsewhere. All but the last emitted token were drafted; the last may have been, where a
            stop token or the limit ended the walk.

    Raises:
        ValueError: a shape or device does not fit, or a written tensor is not contiguous. TypeError: not int64.
        RuntimeError: the CUDA kernel could not be launched.
    """
    if ids.dim() == 2 and ids.shape[1] > MAX_TREE_ROWS:
        raise ValueError(f"accept_path_: a tree has at most {MAX_TREE_ROWS} rows, got {ids.shape[1]}")
    if path.dim() != 2 or path.shape[1] == 0:
        raise ValueError(f"accept_path_: path must be [batch, path_rows] with path_rows >= 1, got {list(path.shape)}")
    block, counters, paths = (ids, parents, choices), (length, num_context, done), (path, chain_choices, chain_ids)
    if not emission_fits(block, stop_token_ids, limits, tokens, counters, paths):
        named_block = dict(zip(("ids", "parents", "choices"), block, strict=True))
        named_paths = dict(zip(("path", "chain_choices", "chain_ids"), paths, strict=True))
        expect_emission("accept_path_", named_block, stop_token_ids, limits, tokens, counters, named_paths)
    launch(
        "accept_path", *[x.contiguous() for x in (*block, stop_token_ids, limits)], tokens, *counters, *paths,
        *ids.shape, path.shape[1], stop_token_ids.shape[1], tokens.shape[1],
    )  # fmt: skip


@op(mutates=("k_caches", "v_caches"))
def compact_kv_(
    launch: Launcher, path: Tensor, counts: Tensor, first: Tensor, k_caches: list[Tensor], v_caches: list[Tensor]
) -> None:
    """Move the keys and values of an accepted path together: slot ``first + path[j]`` to slot ``first + j``.

    This happens for ``1 <= j < counts``, as if all slots were read before the first is written. A path ascends, so
    ``path[j] >= j``; nothing moves where ``path[j] <= j``, and nothing from or to slots outside the cache. One launch
    serves all layers.

    Args:
        path: ``[batch, path_rows]`` int64, as `accept_path_` writes it.
        counts: ``[batch]`` int64: how many rows of the path were accepted, ``num_context`` of `accept_path_`.
        first: ``[batch]`` int64: the slot of row 0.
        k_caches: per layer ``[batch, num_kv_heads, capacity, head_dim]``, any dtype, contiguous; written. Heads and
            dimensions may differ between layers.
        v_caches: per layer ``[batch, num_kv_heads, capacity, v_head_dim]``, the dtype of the keys, contiguous; written.

    Raises:
        ValueError: a shape does not fit, or a cache is not contiguous. TypeError: a dtype does not fit.
    """
    _check_rows(path, counts, first)
    heads, row_bytes, capacity = _cache_sizes(path.shape[0], k_caches, v_caches)
    launch(
        "compact_kv", path.contiguous(), counts.contiguous(), first.contiguous(), [*k_caches, *v_caches], heads,
        row_bytes, len(heads), *path.shape, capacity,
    )  # fmt: skip


def _check_rows(path: Tensor, counts: Tensor, first: Tensor) -> None:
    op, shape, integer = "compact_kv_", path.shape, torch.int64
    if len(shape) == 2 and _C.fits(False, path, shape, integer, (counts, first), shape[:1], integer):
        return
    expect(op, "path", path, (None, None), integer, "batch, path_rows")
    for name, tensor in (("counts", counts), ("first", first)):
        expect(op, name, tensor, shape[:1], integer, "batch")


def _cache_sizes(batch: int, k_caches: list[Tensor], v_caches: list[Tensor]) -> tuple[list[int], list[int], int]:
    """Check the caches; return the heads and the bytes of a head's slot of each, keys first, and their capacity."""
    op, layers = "compact_kv_", len(k_caches)
    if layers != len(v_caches):
        raise ValueError(f"{op}: every layer must have both caches, got {layers} k_caches, {len(v_caches)} v_caches")
    if not layers:
        return [], [], 0
    shape, v_shape, dtype = k_caches[0].shape, v_caches[0].shape, k_caches[0].dtype
    # 1. All layers alike: the short way, since this is called within every step
    if len(shape) == 4 and shape[0] == batch and shape[2] > 0 and v_shape[:3] == shape[:3] and len(v_shape) == 4 and (
        _C.fits(True, k_caches, shape, dtype, v_caches, v_shape, dtype)
    ):  # fmt: skip
        return 2 * layers * [shape[1]], [x[3] * dtype.itemsize for x in (shape, v_shape) for _ in k_caches], shape[2]
    # 2. Layer by layer
    for layer, (k_cache, v_cache) in enumerate(zip(k_caches, v_caches, strict=True)):
        names = (f"k_caches[{layer}]", f"v_caches[{layer}]")
        expect_cache(op, names, k_cache, v_cache, batch, None, (None, None), k_cache.dtype)
        if k_cache.shape[2] != shape[2]:
            raise ValueError(
                f"{op}: {names[0]} must have the capacity of the first, {shape[2]}, got {k_cache.shape[2]}"
            )
    caches = (*k_caches, *v_caches)
    return [x.shape[1] for x in caches], [x.shape[3] * x.element_size() for x in caches], shape[2]


@op(mutates=("out",))
def gather_rows_(launch: Launcher, x: Tensor, path: Tensor, out: Tensor) -> None:
    """Write ``out[b, j] = x[b, path[b, j]]``; an index outside the rows of ``x`` counts as the nearest.

    Args:
        x: ``[batch, rows, width]``, any dtype, rows >= 1.
        path: ``[batch, path_rows]`` int64.
        out: ``[batch, at least path_rows, width]``, the dtype of ``x``, contiguous; its first ``path_rows`` rows are
            written, the others stay.

    Raises:
        ValueError: a shape does not fit, or ``out`` is not contiguous. TypeError: a dtype does not fit.
    """
    batch, rows, width, columns, out_rows = _gather_sizes(x, path, out)
    row_bytes = width * x.element_size()
    launch("gather_rows", x.contiguous(), path.contiguous(), out, batch, rows, columns, out_rows, row_bytes)


def _gather_sizes(x: Tensor, path: Tensor, out: Tensor) -> tuple[int, int, int, int, int]:
    """Check the arguments; return batch, rows, width, the columns of ``path`` and the rows of ``out``."""
    op, shape, path_shape, out_shape = "gather_rows_", x.shape, path.shape, out.shape
    if len(shape) != 3 or shape[1] == 0:
        raise ValueError(f"{op}: x must be [batch, rows, width] with rows >= 1, got {list(shape)}")
    batch, rows, width = shape
    if not (
        len(path_shape) == 2 and len(out_shape) == 3 and _C.fits(False, path, (batch, path_shape[1]), torch.int64)
        and _C.fits(True, out, (batch, out_shape[1], width), x.dtype)
    ):  # fmt: skip
        expect(op, "path", path, (batch, None), torch.int64, "batch, path_rows")
        expect(op, "out", out, (batch, None, width), x.dtype, "batch, path_rows, width")
        expect_contiguous(op, "out", out)
    if out_shape[1] < path_shape[1]:
        raise ValueError(f"{op}: out must have at least the {path_shape[1]} rows of path, got {out_shape[1]}")
    return batch, rows, width, path_shape[1], out_shape[1]
