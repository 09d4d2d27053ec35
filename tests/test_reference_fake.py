"""No twin depends on data: each runs under FakeTensorMode, where reading a value is an error."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash.ops import reference

BATCH, ROWS, HEADS, KV_HEADS, DIM, CAPACITY = 2, 5, 4, 2, 16, 40


def floats(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


def integers(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def caches():
    return [floats(BATCH, KV_HEADS, CAPACITY, DIM) for _ in range(2)]


CALLS = {
    "rms_norm": lambda: reference.rms_norm(floats(BATCH, ROWS, DIM), floats(DIM), 1e-6, integers(BATCH)),
    "add_rms_norm": lambda: reference.add_rms_norm(floats(ROWS, DIM), floats(ROWS, DIM), floats(DIM), 1e-6)[0],
    "dynamic_conv": lambda: reference.dynamic_conv(
        floats(BATCH, ROWS, DIM), floats(3, DIM), floats(BATCH, ROWS, 3, 2)
    ),
    "conv_add_rms_norm": lambda: reference.conv_add_rms_norm(
        floats(BATCH, ROWS, DIM), floats(3, DIM), floats(BATCH, ROWS, 3, 2), floats(BATCH, ROWS, DIM), floats(DIM), 1e-6
    )[0],
    "silu_mul": lambda: reference.silu_mul(floats(ROWS, 2 * DIM)),
    "swiglu": lambda: reference.swiglu(floats(ROWS, DIM), floats(8, DIM), floats(8, DIM)),
    "linears": lambda: reference.linears(floats(ROWS, DIM), [floats(8, DIM)]),
    "sigmoid_mul": lambda: reference.sigmoid_mul(floats(ROWS, HEADS, DIM), floats(ROWS, HEADS, DIM)),
    "delta_net_inputs": lambda: reference.delta_net_inputs(
        floats(BATCH, ROWS, (2 * KV_HEADS + HEADS) * DIM), floats(BATCH, ROWS, HEADS), floats(BATCH, ROWS, HEADS),
        floats(HEADS), floats(HEADS), KV_HEADS, DIM,
    )[0],
    "gated_rms_norm": lambda: reference.gated_rms_norm(
        torch.zeros(BATCH, ROWS, HEADS, DIM), floats(BATCH, ROWS, HEADS * DIM), floats(DIM), 1e-6
    ),
    "experts": lambda: reference.experts(
        floats(ROWS, DIM), integers(ROWS, 2), floats(ROWS, 2), floats(3, 16, DIM), floats(3, DIM, 8), floats(3, 16),
        floats(3, DIM), "clamped_silu",
    ),
    "fuse_features": lambda: reference.fuse_features(
        floats(BATCH, ROWS, 3 * DIM), integers(BATCH), floats(DIM, 3 * DIM), floats(DIM), 1e-6
    ),
    "qkv_norm_rope_append_": lambda: reference.qkv_norm_rope_append_(
        floats(BATCH, ROWS, (HEADS + 2 * KV_HEADS) * DIM), integers(BATCH), integers(BATCH), integers(BATCH, 3),
        torch.zeros(CAPACITY, 4), torch.zeros(CAPACITY, 4), floats(DIM), None, 1e-6, floats(BATCH, 3, HEADS, DIM),
        *caches(),
    ),
    "append_context_kv_": lambda: reference.append_context_kv_(
        floats(2, BATCH, ROWS, 2 * KV_HEADS * DIM), integers(BATCH, ROWS), torch.zeros(BATCH, ROWS, 8),
        torch.zeros(BATCH, ROWS, 8), floats(2, DIM), 1e-6, caches(), caches(),
    ),
    "append_kv_": lambda: reference.append_kv_(
        floats(BATCH, KV_HEADS, ROWS, DIM), floats(BATCH, KV_HEADS, ROWS, DIM), integers(BATCH, ROWS), *caches()
    ),
    "block_attention": lambda: reference.block_attention(
        floats(BATCH, ROWS, HEADS, DIM), *caches(), integers(BATCH), 0.25, False, 9, 5.0, torch.zeros(HEADS)
    ),
    "block_attention, ancestors": lambda: reference.block_attention(
        floats(BATCH, ROWS, HEADS, DIM), *caches(), integers(BATCH), 0.25, True, ancestors=integers(BATCH, ROWS, 1)
    ),
    "accept_path_": lambda: reference.accept_path_(
        *(integers(BATCH, ROWS) for _ in range(3)), integers(BATCH, 3), integers(BATCH), integers(BATCH, CAPACITY),
        *(integers(BATCH) for _ in range(3)), *(integers(BATCH, 4) for _ in range(3)),
    ),
    "compact_kv_": lambda: reference.compact_kv_(
        integers(BATCH, ROWS), integers(BATCH), integers(BATCH), caches(), caches()
    ),
    "draft_rows": lambda: reference.draft_rows(
        integers(BATCH, CAPACITY), integers(BATCH), None, floats(9, DIM), 2, ROWS, ROWS + 1, floats(DIM), 2.0
    )[0],
    "gather_rows_": lambda: reference.gather_rows_(
        floats(BATCH, ROWS, DIM), integers(BATCH, 3), floats(BATCH, 3, DIM)
    ),
    "tree_candidates": lambda: reference.tree_candidates(
        floats(BATCH, ROWS, 50), integers(BATCH, ROWS), integers(BATCH), torch.zeros(BATCH), 60
    )[0],
    "top_candidates": lambda: reference.top_candidates(
        floats(BATCH, ROWS, 50), integers(BATCH, ROWS), integers(BATCH), torch.zeros(BATCH), torch.zeros(BATCH, 3), 60
    )[1],
    "walk_candidates": lambda: reference.walk_candidates(
        floats(BATCH, ROWS, 8), floats(50, 8), floats(50, 8), integers(BATCH), integers(BATCH, 1, ROWS, 4),
        torch.zeros(BATCH, 1, ROWS, 4), integers(BATCH, ROWS), integers(BATCH), torch.zeros(BATCH), integers(BATCH),
        torch.zeros(BATCH), torch.zeros(BATCH), torch.zeros(BATCH, 3),
    )[1],
    "build_tree": lambda: reference.build_tree(
        integers(BATCH), integers(BATCH, ROWS, 4), torch.zeros(BATCH, ROWS, 4), 6
    )[3],
    "gated_recurrence_": lambda: reference.gated_recurrence_(
        *(torch.zeros(BATCH, ROWS, KV_HEADS, DIM) for _ in range(2)), torch.zeros(BATCH, ROWS, HEADS, 8),
        torch.zeros(BATCH, ROWS, HEADS), torch.zeros(BATCH, ROWS, HEADS), torch.zeros(BATCH, HEADS, DIM, 8),
        torch.zeros(BATCH, 4, KV_HEADS, DIM), torch.zeros(BATCH, 4, HEADS, 8), torch.zeros(BATCH, 4, HEADS),
        integers(BATCH), integers(BATCH),
    ),
    "causal_conv_": lambda: reference.causal_conv_(
        floats(BATCH, ROWS, DIM), floats(DIM, 4), floats(DIM), True, floats(BATCH, 3 + 4, DIM), integers(BATCH),
        integers(BATCH),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_runs_without_data(name):
    real = CALLS[name]()
    with FakeTensorMode():
        fake = CALLS[name]()
    assert (fake is None) == (real is None)
    if real is not None:
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_fake_tensors_refuse_to_be_read():
    """The check above can fail: a twin that read a value would raise this."""
    with FakeTensorMode(), pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
        integers(1).item()
