import itertools
from functools import partial

import pytest
import torch
from op_checks import assert_as_exact_as_torch, skip_float32_on_cuda

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op
SHAPES = [(1, 1, 2), (1, 2, 30), (2, 3, 32), (2, 5, 226), (1, 16, 2046), (3, 16, 24576)]


GATES = {"silu": torch.nn.functional.silu, "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh")}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, gate, dtype, kernels):
    gate_up = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
    exact = reference.silu_mul(gate_up.double(), gate)
    assert_as_exact_as_torch(kernels.silu_mul(gate_up, gate), reference.silu_mul(gate_up, gate), exact)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("width", [1, 40])
def test_large_gates_do_not_overflow(width, gate, kernels):
    gates = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 1e4]).repeat_interleave(width).view(6, 1, width)
    out = kernels.silu_mul(torch.cat([gates, torch.full_like(gates, 3.0)], -1), gate)
    torch.testing.assert_close(out, GATES[gate](gates) * 3, rtol=1e-5, atol=1e-30)


def test_a_gate_of_experts_alone_is_refused():
    with pytest.raises(ValueError, match="clamped_silu is of experts only"):
        ops.silu_mul(torch.ones(2, 4), "clamped_silu")


def gated_operands(rows, out, width, dtype):
    """Rows, and the weights of gate and up."""
    g = torch.Generator().manual_seed(rows + out)
    return [torch.randn(shape, generator=g).to(dtype) for shape in ((rows, width), (out, width), (out, width))]


SWIGLUS = [*itertools.product((1, 17, 65), [(1, 8), (63, 72), (65, 33), (130, 520), (128, 1032)]), (64, (130, 520))]


@pytest.mark.parametrize(("rows", "shape"), SWIGLUS)
def test_swiglu_against_float64(rows, shape, dtype, kernels):
    out, width = shape
    x, gate, up = gated_operands(rows, out, width, dtype)
    gate /= width**0.5
    exact = reference.swiglu(x.double(), gate.double(), up.double())
    many = reference.swiglu(torch.cat([x, x.new_zeros(16, width)]), gate, up)[:rows]  # see test_linear.py
    assert_as_exact_as_torch(kernels.swiglu(x, gate, up), many, exact, factor=3.0)


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize(("out", "width"), [(128, 96), (256, 520)])
def test_swiglu_has_the_bits_of_its_parts(rows, out, width, dtype, kernels):
    """Where the weights are whole tiles, whose products are then cut into the same slices."""
    x, gate, up = gated_operands(rows, out, width, dtype)
    assert torch.equal(kernels.swiglu(x, gate, up), kernels.silu_mul(kernels.linears(x, [gate, up])))


def test_a_row_of_swiglu_has_the_same_bits_among_others(dtype, kernels):
    skip_float32_on_cuda(kernels, dtype)
    counts = (1, 17, 40, 64) if kernels is ops else (1, 40, 64, 140)
    x, gate, up = gated_operands(counts[-1], 150, 1040, dtype)
    whole = kernels.swiglu(x, gate, up)
    x[1::2] = float("nan")
    for rows in counts[:-1]:
        assert torch.equal(kernels.swiglu(x[:rows], gate, up)[::2], whole[:rows:2])
    assert torch.equal(kernels.swiglu(x[62:63], gate, up), whole[62:63])


def gates_of(x, dtype, head_dim):
    """What attention with an output gate projects for ``x``: each q head, then its gate, which is the result."""
    rows, heads, _ = x.shape
    projected = torch.randn(rows, heads * 2 * head_dim + 5, generator=torch.Generator().manual_seed(1)) * 4
    return projected.to(dtype)[:, : heads * 2 * head_dim].unflatten(-1, (heads, 2, head_dim))[:, :, 1]


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 30), (16, 4, 64), (3, 8, 113)])
def test_sigmoid_mul_against_float64(shape, dtype, kernels):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    gate = gates_of(x, dtype, shape[-1])
    exact = x.double() * torch.sigmoid(gate.double())
    assert_as_exact_as_torch(kernels.sigmoid_mul(x, gate), reference.sigmoid_mul(x, gate), exact)
    alone = kernels.sigmoid_mul(x[:1], gate[:1])
    assert torch.equal(kernels.sigmoid_mul(x, gate)[:1], alone), "a row's bits depend on its neighbours"


def test_sigmoid_mul_takes_large_gates(kernels):
    gate = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])[:, None, None].expand(-1, 1, 40)
    out = kernels.sigmoid_mul(torch.full((5, 1, 40), 3.0), gate)
    torch.testing.assert_close(out, 3 * torch.sigmoid(gate), rtol=1e-5, atol=1e-30)
