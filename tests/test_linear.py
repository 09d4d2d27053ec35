import pytest
import torch
from op_checks import DTYPES, assert_as_exact_as_torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash import ops, reference

pytestmark = pytest.mark.op


def operands(rows, out, width, dtype, bias=True):
    g = torch.Generator().manual_seed(rows * 1000 + out)
    x, weight, offset = (torch.randn(shape, generator=g).to(dtype) for shape in ((rows, width), (out, width), (out,)))
    return x, weight, offset if bias else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out", "width"), [(1, 1), (7, 33), (24, 64), (25, 257), (40, 600), (65, 1023)])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 49, 64, 65, 300])
def test_against_float64(rows, out, width, bias, dtype):
    x, weight, offset = operands(rows, out, width, dtype, bias)
    exact = reference.linear(x.double(), weight.double(), None if offset is None else offset.double())
    # Torch sums one row in more lanes than many rows: the error to compare with is that of many.
    many = reference.linear(torch.cat([x, x.new_zeros(16, width)]), weight, offset)[:rows]
    assert_as_exact_as_torch(ops.linear(x, weight, offset), many, exact, factor=3.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_neither_on_its_place_nor_on_the_others(dtype):
    x, weight, bias = operands(64, 50, 300, dtype)
    whole = ops.linear(x, weight, bias)
    x[1::2] = float("nan")
    for rows in (1, 16, 17, 40, 64):
        assert torch.equal(ops.linear(x[:rows], weight, bias)[::2], whole[:rows:2])
    assert torch.equal(ops.linear(x[62:63], weight, bias), whole[62:63])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(1, 1), (7, 33), (64, 63), (65, 257), (130, 600), (200, 191)])
def test_a_row_alone_has_the_bits_it_has_among_others(out, width, dtype):
    x, weight, bias = operands(5, out, width, dtype)
    # not aligned, nor followed by anything finite
    weight = torch.cat([weight.flatten(), weight.new_full((512,), float("nan"))])[: out * width].view(out, width)
    x = torch.cat([x.new_zeros(1), x.flatten(), x.new_full((512,), float("nan"))])[1 : 1 + 5 * width].view(5, width)
    for offset in (bias, None):
        whole = ops.linear(x, weight, offset)
        for row in range(5):
            assert torch.equal(ops.linear(x[row : row + 1], weight, offset)[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_width_of_zero_gives_the_bias(dtype):
    x, weight, bias = operands(3, 5, 0, dtype)
    assert torch.equal(ops.linear(x, weight, bias), bias.expand(3, 5))
    assert torch.equal(ops.linear(x, weight), torch.zeros(3, 5, dtype=dtype))


def test_the_twin_runs_without_data():
    with FakeTensorMode():
        out = reference.linear(torch.zeros(2, 3, 8), torch.zeros(5, 8), torch.zeros(5))
    assert out.shape == (2, 3, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    torch.library.opcheck(torch.ops.dflash.linear.default, operands(3, 5, 8, dtype))


def test_bad_input_is_named():
    x, weight, bias = operands(3, 5, 8, torch.float32)
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., rows, 8\] as weight says, got \[3, 7\]"):
        ops.linear(x[:, :7], weight)
    with pytest.raises(ValueError, match=r"bias must be \[out\] = \[5\], got \[4\]"):
        ops.linear(x, weight, bias[:4])
    with pytest.raises(TypeError, match=r"weight must be torch\.float32 as x is, got torch\.bfloat16"):
        ops.linear(x, weight.bfloat16())
