import pytest
import torch
from op_checks import DTYPES, assert_as_exact_as_torch

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op
SHAPES = [(1, 1, 2), (1, 2, 30), (2, 3, 32), (2, 5, 226), (1, 16, 2046), (3, 16, 24576)]


@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, dtype, kernels):
    gate_up = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    exact = reference.silu_mul(gate_up.double())
    assert_as_exact_as_torch(kernels.silu_mul(gate_up), reference.silu_mul(gate_up), exact)


@pytest.mark.parametrize("width", [1, 40])
def test_large_gates_do_not_overflow(width, kernels):
    gate = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 1e4]).repeat_interleave(width).view(6, 1, width)
    out = kernels.silu_mul(torch.cat([gate, torch.full_like(gate, 3.0)], -1))
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * 3, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    torch.library.opcheck(torch.ops.dflash.silu_mul.default, (torch.randn(2, 3, 40).to(dtype),))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"gate_up must be \[\.\.\., 2 \* width\], got \[2, 3\]"):
        ops.silu_mul(torch.randn(2, 3))
    with pytest.raises(TypeError, match=r"gate_up must be float32 or bfloat16 on CPU, got torch\.float64"):
        ops.silu_mul(torch.randn(2, 4).double())
