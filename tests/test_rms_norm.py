import pytest
import torch
from op_checks import DTYPES, assert_as_exact_as_torch

from dflash import ops, reference

pytestmark = pytest.mark.op

EPS = 1e-6
SHAPES = [(1, 1, 1), (1, 2, 15), (2, 3, 16), (2, 5, 113), (1, 16, 1023), (3, 16, 4096)]


def draw(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 3
    residual = torch.randn(shape, generator=generator)
    weight = torch.randn(shape[-1], generator=generator) + 1
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_against_float64(shape, dtype):
    x, _, weight = draw(shape, dtype)
    exact = reference.rms_norm(x.double(), weight.double(), EPS)
    assert_as_exact_as_torch(ops.rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS), exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_against_float64(shape, dtype):
    x, residual, weight = draw(shape, dtype)
    out, total = ops.add_rms_norm(x, residual, weight, EPS)
    twin, twin_total = reference.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, twin_total)
    exact = reference.rms_norm(twin_total.double(), weight.double(), EPS)
    assert_as_exact_as_torch(out, twin, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_past_the_count_are_zero_and_never_read(dtype):
    x, _, weight = draw((3, 16, 113), dtype)
    counts = torch.tensor([0, 7, 16])
    clean = ops.rms_norm(x, weight, EPS)
    for row, count in enumerate(counts.tolist()):
        x[row, count:] = float("nan")
    for op in (ops.rms_norm, reference.rms_norm):
        out = op(x, weight, EPS, counts)
        for row, count in enumerate(counts.tolist()):
            assert torch.allclose(out[row, :count].float(), clean[row, :count].float(), rtol=2e-2)
            assert out[row, count:].eq(0).all()


def test_a_row_does_not_depend_on_its_neighbours():
    x, residual, weight = draw((2, 16, 384), torch.bfloat16)
    out, _ = ops.add_rms_norm(x, residual, weight, EPS)
    alone, _ = ops.add_rms_norm(x[:, 5:6], residual[:, 5:6], weight, EPS)
    assert torch.equal(out[:, 5:6], alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    x, residual, weight = draw((2, 3, 40), dtype)
    torch.library.opcheck(torch.ops.dflash.rms_norm.default, (x, weight, EPS, None))
    torch.library.opcheck(torch.ops.dflash.rms_norm.default, (x, weight, EPS, torch.tensor([1, 3])))
    torch.library.opcheck(torch.ops.dflash.add_rms_norm.default, (x, residual, weight, EPS))


def test_bad_input_is_named():
    x, residual, weight = draw((2, 3, 40), torch.float32)
    with pytest.raises(ValueError, match=r"weight must be \[hidden\].*\[39\] for \[2, 3, 40\]"):
        ops.rms_norm(x, weight[:39], EPS)
    with pytest.raises(TypeError, match=r"rms_norm: x must be float32 or bfloat16 on CPU, got torch.float16"):
        ops.rms_norm(x.half(), weight.half(), EPS)
    with pytest.raises(ValueError, match=r"counts must be \[batch\] = \[2\], got \[3\]"):
        ops.rms_norm(x, weight, EPS, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"residual must be"):
        ops.add_rms_norm(x, residual[:1], weight, EPS)
