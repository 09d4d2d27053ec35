import pytest
import torch
from op_checks import Emulated

pytestmark = pytest.mark.op

NAN = float("nan")


def draw(batch, rows, path_rows, width, dtype, out_rows=None):
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(batch, rows, width, generator=g).to(dtype)
    path = torch.randint(0, rows, (batch, path_rows), generator=g)
    return x, path, torch.full((batch, out_rows or path_rows, width), NAN, dtype=dtype)


@pytest.mark.parametrize("width", [1, 7, 8, 24, 100, 4104])
def test_rows_are_the_ones_the_path_names(width, dtype, implementation):
    for batch, rows, path_rows in ((1, 1, 1), (3, 33, 16), (2, 128, 8), (2, 4, 9)):
        x, path, out = draw(batch, rows, path_rows, width, dtype)
        assert implementation.gather_rows_(x, path, out) is None
        for b in range(batch):
            assert torch.equal(out[b], x[b][path[b]])


def test_rows_past_the_path_stay(implementation):
    x, path, out = draw(3, 20, 5, 24, torch.float32, out_rows=16)
    implementation.gather_rows_(x, path, out)
    assert torch.equal(out[:, :5], torch.stack([x[b][path[b]] for b in range(3)]))
    assert out[:, 5:].isnan().all()


def test_nan_stays_in_its_row(implementation):
    x, path, out = draw(2, 6, 4, 24, torch.float32)
    x[0, 3], path[0], path[1] = NAN, torch.tensor([0, 3, 3, 5]), 3
    implementation.gather_rows_(x, path, out)
    assert out.isnan().all(-1).tolist() == [[False, True, True, False], [False] * 4]


def test_an_index_outside_the_rows_is_the_nearest(implementation):
    x, _, out = draw(1, 6, 7, 24, torch.float32)
    path = torch.tensor([[-(2**63), -1, 0, 5, 6, 2**32, 2**63 - 1]])
    implementation.gather_rows_(x, path, out)
    assert torch.equal(out[0], x[0, [0, 0, 0, 5, 5, 5, 5]])


def test_nothing_to_copy(implementation):
    for batch, path_rows, width in ((0, 4, 8), (2, 0, 8), (2, 4, 0)):
        x, path, out = draw(batch, 3, path_rows, width, torch.float32, out_rows=4)
        implementation.gather_rows_(x, path, out)
        assert out.isnan().all()


@pytest.mark.parametrize("seed", range(3))
def test_emulated_kernels_behind_it_may_read_a_tree_early_that_was_built_before_it(seed, emulation):
    """It lets the next kernel start after its own wait, so a rotation behind it may read the depths early."""
    kernels, g = Emulated(emulation), torch.Generator().manual_seed(0)
    scores, qkv = torch.randn(2, 4, 8, generator=g).sort(descending=True).values, torch.randn(2, 12, 128, generator=g)
    ids, anchor, lengths = torch.arange(64).view(2, 4, 8), torch.tensor([8, 9]), torch.tensor([3, 0])
    table, norm, angles = torch.randn(1, 70, 64, generator=g), torch.ones(16), torch.rand(2, 30, 8, generator=g)

    def run():
        queries, *caches = qkv.new_zeros(2, 12, 2, 16), *qkv.new_zeros(2, 2, 1, 30, 16)
        rows, tree = table.new_zeros(1, 24, 64), kernels.build_tree(anchor, ids, scores, 12)
        kernels.gather_rows_(table, tree[0].view(1, -1), rows)
        x = kernels.silu_mul(qkv)
        places = (lengths, None, tree[2], *angles)
        kernels.qkv_norm_rope_append_(x, *places, norm, norm, 1e-6, queries, *caches, prefetch=True)
        return *tree, rows, x, queries, *caches

    assert kernels.check_overlapping(run, seed)[2].unique().numel() > 2
