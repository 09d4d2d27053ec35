import pytest
import torch
from op_checks import assert_as_exact_as_torch

from dflash.ops import reference

pytestmark = pytest.mark.op

EPS = 1e-6
SHAPES = [(1, 1, 1), (1, 2, 15), (2, 3, 16), (2, 5, 113), (1, 16, 1023), (3, 16, 4096)]
WIDE = [(1, 3, 5000), (1, 2, 9000)]  # a thread of a GPU holds two or more pieces of a row


def draw(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 3
    residual = torch.randn(shape, generator=generator)
    weight = torch.randn(shape[-1], generator=generator) + 1
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_against_float64(shape, dtype, kernels):
    x, _, weight = draw(shape, dtype)
    exact = reference.rms_norm(x.double(), weight.double(), EPS)
    assert_as_exact_as_torch(kernels.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), exact)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_against_float64(shape, dtype, kernels):
    x, residual, weight = draw(shape, dtype)
    out, total = kernels.add_rms_norm(x, residual, weight, EPS)
    twin, twin_total = reference.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, twin_total)
    exact = reference.rms_norm(twin_total.double(), weight.double(), EPS)
    assert_as_exact_as_torch(out, twin, exact)


@pytest.mark.parametrize("shape", WIDE)
def test_wide_rows_against_float64(shape, dtype, kernels):
    x, residual, weight = draw(shape, dtype)
    out, total = kernels.add_rms_norm(x, residual, weight, EPS)
    exact = reference.rms_norm(total.double(), weight.double(), EPS)
    assert_as_exact_as_torch(out, reference.rms_norm(total, weight, EPS), exact, factor=4)  # float32 sums on a CPU
    assert torch.equal(out, kernels.rms_norm(total, weight, EPS))


@pytest.mark.parametrize("shape", [SHAPES[2], SHAPES[3]])
def test_a_zero_centered_weight_lacks_one(shape, dtype, kernels):
    x, residual, weight = draw(shape, dtype)
    exact = reference.rms_norm(x.double(), weight.double() + 1, EPS)
    twin = reference.rms_norm(x, weight, EPS, None, True)
    assert_as_exact_as_torch(kernels.rms_norm(x, weight, EPS, None, True), twin, exact)
    out, total = kernels.add_rms_norm(x, residual, weight, EPS, None, True)
    exact = reference.rms_norm(total.double(), weight.double() + 1, EPS)
    assert_as_exact_as_torch(out, reference.add_rms_norm(x, residual, weight, EPS, None, True)[0], exact)


def test_rows_past_the_count_are_zero_and_never_read(dtype, kernels):
    x, _, weight = draw((3, 16, 113), dtype)
    counts = torch.tensor([0, 7, 16])
    clean = kernels.rms_norm(x, weight, EPS)
    for row, count in enumerate(counts.tolist()):
        x[row, count:] = float("nan")
    for op in (kernels.rms_norm, reference.rms_norm):
        out = op(x, weight, EPS, counts)
        for row, count in enumerate(counts.tolist()):
            assert torch.allclose(out[row, :count].float(), clean[row, :count].float(), rtol=2e-2)
            assert out[row, count:].eq(0).all()


def test_the_tap_gets_the_sum(dtype, kernels):
    x, residual, weight = draw((2, 16, 120), dtype)
    want, total = kernels.add_rms_norm(x, residual, weight, EPS)
    taps = torch.full((2, 16, 3 * 120), 9.0).to(dtype)
    out, _ = kernels.add_rms_norm(x, residual, weight, EPS, taps[..., 120:240])
    assert torch.equal(out, want)
    assert torch.equal(taps[..., 120:240], total)
    assert taps[..., :120].eq(9).all()
    assert taps[..., 240:].eq(9).all()
    one = torch.zeros(16, 2, 120).to(dtype)[:, 0]
    kernels.add_rms_norm(x[0], residual[0], weight, EPS, one)
    assert torch.equal(one, total[0])


@pytest.mark.parametrize("shape", [(2, 16, 113), (3, 5, 4096), (1, 1, 16), (2, 0, 24)])
def test_rows_may_be_put_in_front(shape, dtype, implementation):
    x, residual, weight = draw(shape, dtype)
    front = draw((shape[0], 7, shape[2]), dtype, seed=1)[0]
    front[-1, 3:] = float("nan")
    counts = torch.full((shape[0],), shape[1] // 2)
    for rows in (7, 1, 0):
        ahead = front[:, :rows]  # strided
        for given in (None, counts):
            out = implementation.rms_norm(x, weight, EPS, given, False, ahead)
            assert torch.equal(out[:, :rows].nan_to_num(9), ahead.nan_to_num(9))
            assert torch.equal(out[:, rows:], implementation.rms_norm(x, weight, EPS, given))
        tap = torch.zeros(*shape[:2], 3 * shape[2]).to(dtype)[..., shape[2] : 2 * shape[2]]
        out, total = implementation.add_rms_norm(x, residual, weight, EPS, tap, True, ahead)
        want, want_total = implementation.add_rms_norm(x, residual, weight, EPS, None, True)
        assert torch.equal(out[:, :rows].nan_to_num(9), ahead.nan_to_num(9))
        assert torch.equal(out[:, rows:], want)
        assert torch.equal(total, want_total)
        assert torch.equal(tap, total)


def test_a_row_does_not_depend_on_its_neighbours(kernels):
    x, residual, weight = draw((2, 16, 384), torch.bfloat16)
    out, _ = kernels.add_rms_norm(x, residual, weight, EPS)
    alone, _ = kernels.add_rms_norm(x[:, 5:6], residual[:, 5:6], weight, EPS)
    assert torch.equal(out[:, 5:6], alone)
