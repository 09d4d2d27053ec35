import pytest
import torch
from op_checks import assert_as_exact_as_torch, let_rows_meet

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op

EPS = 1e-6


def draw(batch, rows, width, hidden, dtype):
    generator = torch.Generator().manual_seed(0)
    context = torch.randn(batch, rows, width, generator=generator)
    fc_weight = torch.randn(hidden, width, generator=generator) * width**-0.5
    norm_weight = torch.randn(hidden, generator=generator) + 1
    return context.to(dtype), fc_weight.to(dtype), norm_weight.to(dtype)


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 113])
def test_against_float64_with_nan_past_the_count(rows, dtype, kernels):
    context, fc_weight, norm_weight = draw(3, rows, 200, 40, dtype)
    counts = torch.tensor([0, rows, rows // 2])
    exact = reference.fuse_features(context.double(), counts, fc_weight.double(), norm_weight.double(), EPS)
    for b, count in enumerate(counts.tolist()):
        context[b, count:] = float("nan")
    out = kernels.fuse_features(context, counts, fc_weight, norm_weight, EPS)
    twin = reference.fuse_features(context, counts, fc_weight, norm_weight, EPS)
    assert_as_exact_as_torch(out, twin, exact)
    for b, count in enumerate(counts.tolist()):
        assert out[b, count:].eq(0).all()
        assert twin[b, count:].eq(0).all()


@pytest.mark.parametrize("rows", [16, 113])
@pytest.mark.parametrize("op", [ops.fuse_features, reference.fuse_features], ids=["op", "twin"])
def test_dead_rows_spoil_no_live_row_where_torchs_product_lets_rows_meet(op, rows, monkeypatch):
    context, fc_weight, norm_weight = draw(3, rows, 200, 40, torch.bfloat16)
    counts = torch.tensor([0, rows, rows // 2])
    want = op(context, counts, fc_weight, norm_weight, EPS)
    for b, count in enumerate(counts.tolist()):
        context[b, count:] = float("nan")
    let_rows_meet(monkeypatch)
    torch.testing.assert_close(op(context, counts, fc_weight, norm_weight, EPS), want)


def test_it_is_the_projection_and_then_the_norm():
    context, fc_weight, norm_weight = draw(2, 5, 30, 10, torch.float64)
    projected = context @ fc_weight.T
    want = projected / (projected.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_weight
    out = reference.fuse_features(context, torch.tensor([5, 5]), fc_weight, norm_weight, EPS)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


def test_no_rows():
    context, fc_weight, norm_weight = draw(2, 0, 30, 10, torch.float32)
    for op in (ops.fuse_features, reference.fuse_features):
        assert op(context, torch.tensor([0, 0]), fc_weight, norm_weight, EPS).shape == (2, 0, 10)
