"""A tensor on another device is named: a kernel would read its address on the wrong one."""

import pytest
import torch

from dflash import ops

BATCH, ROWS, HEADS, KV_HEADS, DIM, CAPACITY = 2, 5, 4, 2, 16, 40


def floats(*shape):
    return torch.zeros(shape)


def integers(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def caches():
    return [floats(BATCH, KV_HEADS, CAPACITY, DIM) for _ in range(2)]


CALLS = {
    "rms_norm": lambda: [floats(BATCH, ROWS, DIM), floats(DIM), 1e-6, integers(BATCH)],
    "add_rms_norm": lambda: [floats(ROWS, DIM), floats(ROWS, DIM), floats(DIM), 1e-6, None],
    "dynamic_conv": lambda: [floats(BATCH, ROWS, DIM), floats(3, DIM), floats(BATCH, ROWS, 3, 2)],
    "conv_add_rms_norm": lambda: [
        floats(BATCH, ROWS, DIM), floats(3, DIM), floats(BATCH, ROWS, 3, 2), floats(BATCH, ROWS, DIM), floats(DIM),
        1e-6, floats(BATCH, ROWS, DIM),
    ],
    "fuse_features": lambda: [floats(BATCH, ROWS, 3 * DIM), integers(BATCH), floats(DIM, 3 * DIM), floats(DIM), 1e-6],
    "qkv_norm_rope_append_": lambda: [
        floats(BATCH, ROWS, (HEADS + 2 * KV_HEADS) * DIM), integers(BATCH), integers(BATCH), integers(BATCH, ROWS),
        floats(CAPACITY, 4), floats(CAPACITY, 4), floats(DIM), None, 1e-6, floats(BATCH, ROWS, HEADS, DIM), *caches(),
    ],
    "append_context_kv_": lambda: [
        floats(2, BATCH, ROWS, 2 * KV_HEADS * DIM), integers(BATCH, ROWS), floats(BATCH, ROWS, 8),
        floats(BATCH, ROWS, 8), floats(2, DIM), 1e-6, caches(), caches(),
    ],
    "append_kv_": lambda: [
        floats(BATCH, KV_HEADS, ROWS, DIM), floats(BATCH, KV_HEADS, ROWS, DIM), integers(BATCH, ROWS), *caches()
    ],
    "block_attention": lambda: [
        floats(BATCH, ROWS, HEADS, DIM), *caches(), integers(BATCH), 0.25, False, 9, 5.0, floats(HEADS), None
    ],
    "linear": lambda: [floats(ROWS, DIM), floats(8, DIM), floats(8), False],
    "swiglu": lambda: [floats(ROWS, DIM), floats(8, DIM), floats(8, DIM), False],
    "linears": lambda: [
        floats(ROWS, DIM), [floats(8, DIM), floats(4, DIM)], [floats(8), floats(4)], False
    ],
    "experts": lambda: [
        floats(ROWS, DIM), integers(ROWS, 2), floats(ROWS, 2), floats(3, 16, DIM), floats(3, DIM, 8), floats(3, 16),
        floats(3, DIM), "silu", 1.0, 1.0, False,
    ],
    "select_tokens": lambda: [
        floats(BATCH, ROWS, 50), integers(BATCH, ROWS), integers(BATCH), floats(BATCH), integers(BATCH), floats(BATCH),
        floats(BATCH), floats(BATCH),
    ],
    "tree_candidates": lambda: [
        floats(BATCH, ROWS, 50), integers(BATCH, ROWS), integers(BATCH), floats(BATCH), 4, 0.1
    ],
    "top_candidates": lambda: [
        floats(BATCH, ROWS, 50), integers(BATCH, ROWS), integers(BATCH), floats(BATCH), floats(BATCH), 4
    ],
    "walk_candidates": lambda: [
        floats(BATCH, ROWS, 8), floats(50, 8), floats(50, 8), integers(BATCH), integers(BATCH, ROWS, 4),
        floats(BATCH, ROWS, 4), integers(BATCH, ROWS), integers(BATCH), floats(BATCH), integers(BATCH),
        floats(BATCH), floats(BATCH), floats(BATCH), 0,
    ],
    "build_tree": lambda: [integers(BATCH), integers(BATCH, ROWS, 4), floats(BATCH, ROWS, 4), 8],
    "accept_prefix_": lambda: [
        integers(BATCH, ROWS), integers(BATCH, ROWS), integers(BATCH, 3), integers(BATCH), integers(BATCH, CAPACITY),
        integers(BATCH), integers(BATCH), torch.zeros(BATCH, dtype=torch.bool),
    ],
    "accept_path_": lambda: [
        *(integers(BATCH, ROWS) for _ in range(3)), integers(BATCH, 3), integers(BATCH), integers(BATCH, CAPACITY),
        *(integers(BATCH) for _ in range(3)), *(integers(BATCH, ROWS) for _ in range(3)),
    ],
    "compact_kv_": lambda: [integers(BATCH, ROWS), integers(BATCH), integers(BATCH), caches(), caches()],
    "draft_rows": lambda: [
        integers(BATCH, CAPACITY), integers(BATCH), integers(BATCH, ROWS), floats(9, DIM), 2, ROWS, ROWS, floats(DIM),
        2.0,
    ],
    "gather_rows_": lambda: [floats(BATCH, ROWS, DIM), integers(BATCH, 3), floats(BATCH, 3, DIM)],
    "gated_recurrence_": lambda: [
        floats(BATCH, ROWS, KV_HEADS, DIM), floats(BATCH, ROWS, KV_HEADS, DIM), floats(BATCH, ROWS, HEADS, 8),
        floats(BATCH, ROWS, HEADS), floats(BATCH, ROWS, HEADS), floats(BATCH, HEADS, DIM, 8),
        floats(BATCH, 4, KV_HEADS, DIM), floats(BATCH, 4, HEADS, 8), floats(BATCH, 4, HEADS), integers(BATCH),
        integers(BATCH),
    ],
    "causal_conv_": lambda: [
        floats(BATCH, ROWS, DIM), floats(DIM, 4), floats(DIM), True, floats(BATCH, 3 + 4, DIM), integers(BATCH),
        integers(BATCH),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_elsewhere_is_named(name):
    for place in range(1, len(CALLS[name]())):
        arguments = CALLS[name]()
        given = arguments[place]
        if isinstance(given, torch.Tensor):
            arguments[place] = given.to("meta")
        elif isinstance(given, list):
            given[-1] = given[-1].to("meta")
        else:
            continue
        with pytest.raises(ValueError, match=rf"^{name}: all tensors must be on cpu as the first is, got .* on meta"):
            getattr(ops, name)(*arguments)
