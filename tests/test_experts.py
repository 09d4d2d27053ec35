import math

import pytest
import torch
from op_checks import Emulated, assert_as_exact_as_torch, relative_error
from torch.nn.functional import linear

from dflash import ops
from dflash.ops import PackedWeight, reference

pytestmark = pytest.mark.op
KINDS = ("silu", "gelu_tanh", "clamped_silu")
SHAPES = [  # rows, top_k, num_experts, hidden, width
    (2, 1, 1, 9, 7),
    (3, 2, 4, 24, 40),
    (16, 3, 6, 72, 33),
    (5, 3, 20, 136, 72),  # fewer pairs than experts
    (17, 2, 3, 40, 80),
    (70, 2, 2, 40, 16),  # experts with more rows than fit at once
]


def operands(shape, dtype, transposed=False, bias=False, kind="silu", score_dtype=None):
    """The arguments of `experts`; no row chooses an expert twice."""
    rows, top_k, num_experts, hidden, width = shape
    g = torch.Generator().manual_seed(rows)

    def normal(*size, scale=1.0):
        return (torch.randn(size, generator=g) * scale).to(dtype)

    ids = torch.stack([torch.randperm(num_experts, generator=g)[:top_k] for _ in range(rows)])
    scores = torch.rand(rows, top_k, generator=g).to(score_dtype or dtype)
    weights = normal(num_experts, 2 * width, hidden, scale=2 * hidden**-0.5), normal(num_experts, hidden, width)
    if transposed:
        weights = [weight.mT.contiguous() for weight in weights]
    biases = (normal(num_experts, 2 * width), normal(num_experts, hidden)) if bias else (None, None)
    return [normal(rows, hidden), ids, scores, *weights, *biases, kind, 1.5, 1.25, transposed]


def by_hand(x, ids, scores, gate_up, down, gate_up_bias, down_bias, kind, alpha, limit, transposed, rounded_to=None):
    """The same, one pair at a time, in the dtype of ``x``, as a module would compute it.

    ``rounded_to`` is a dtype that what goes into ``down`` is rounded to.
    """
    gate_up, down = (weight.mT if transposed else weight for weight in (gate_up, down))
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for row in range(x.shape[0]):
        for slot, expert in enumerate(ids[row].tolist()):
            both = linear(x[row], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
            gate, up = (both[::2], both[1::2]) if transposed else both.chunk(2)
            if kind == "silu":
                inner = gate * torch.sigmoid(gate) * up
            elif kind == "gelu_tanh":
                inner = gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
            else:
                gate, up = gate.clip(max=limit), up.clip(-limit, limit)
                inner = gate * torch.sigmoid(alpha * gate) * (up + 1)
            inner = inner.to(rounded_to or x.dtype).to(x.dtype)
            out[row] += scores[row, slot] * linear(
                inner, down[expert], None if down_bias is None else down_bias[expert]
            )
    return out.to(x.dtype)


def assert_right(ours, arguments):
    """The error against float64 is at most three times that of a module in the same dtype."""
    assert_as_exact_as_torch(ours, by_hand(*arguments), by_hand(*in_float64(arguments)), factor=3.0)


def in_float64(arguments):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, transposed, dtype, implementation):
    for kind, bias, score_dtype in zip(KINDS, (False, True, True), (dtype, torch.float32, dtype), strict=True):
        arguments = operands(shape, dtype, transposed, bias, kind, score_dtype)
        assert_right(implementation.experts(*arguments), arguments)


@pytest.mark.parametrize("transposed", [False, True])
def test_only_what_goes_into_down_and_the_result_are_rounded(transposed, dtype, implementation):
    if dtype == torch.float32:
        pytest.skip("sums are rounded to float32 too")
    for kind in KINDS:
        arguments = operands((16, 3, 6, 72, 40), dtype, transposed, True, kind, torch.float32)
        want = by_hand(*in_float64(arguments), rounded_to=dtype).to(dtype)
        same = (implementation.experts(*arguments) == want).double().mean()
        assert same > 0.97, "with the products rounded too, it is less than half"


@pytest.mark.parametrize("transposed", [False, True])
def test_a_rows_bits_depend_neither_on_its_place_nor_on_the_others(transposed, dtype, kernels):
    if dtype == torch.float32 and kernels is not ops:
        pytest.skip("float32 goes through torch there")
    x, ids, scores, *weights = operands((40, 3, 5, 136, 72), dtype, transposed)
    whole = kernels.experts(x, ids, scores, *weights)
    x[1::2] = float("nan")
    for rows in (1, 3, 16, 17, 40):
        assert torch.equal(kernels.experts(x[:rows], ids[:rows], scores[:rows], *weights)[::2], whole[:rows:2])
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0)) * 2
    assert torch.equal(kernels.experts(x[order], ids[order], scores[order], *weights), whole[order])


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_that_nobody_chose_are_not_read(transposed, dtype, implementation):
    arguments = operands((3, 2, 6, 40, 24), dtype, transposed, bias=True)
    arguments[1] = torch.tensor([[1, 4], [4, 1], [1, 3]])
    want = implementation.experts(*arguments)
    for at in (3, 4, 5, 6):
        arguments[at][[0, 2, 5]] = float("nan")
    assert torch.equal(implementation.experts(*arguments), want)


def test_ids_that_are_no_experts_add_nothing(dtype, implementation):
    arguments = operands((5, 3, 4, 40, 24), dtype)
    ids, scores = arguments[1], arguments[2]
    scores[2, 1], scores[3] = 0, 0
    want = implementation.experts(*arguments)
    ids[2, 1], scores[2, 1] = 4, float("nan")
    ids[3] = torch.tensor([-1, 2**40, 7])
    out = implementation.experts(*arguments)
    assert torch.equal(out, want)
    assert torch.equal(out[3], torch.zeros_like(out[3]))


def test_a_row_may_choose_an_expert_twice(dtype, kernels):
    arguments = operands((20, 3, 4, 40, 24), dtype)
    arguments[1][:, 2] = arguments[1][:, 0]
    assert_right(kernels.experts(*arguments), arguments)
    arguments[1][:] = 1
    assert_right(kernels.experts(*arguments), arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_large_gates_do_not_overflow(kind, kernels):
    size = 16
    values = torch.tensor([-3e38, -1e20, -200.0, -88.0, 0.0, 88.0, 1e20, 3e38]).repeat(2)
    gate_up = torch.zeros(1, 2 * size, 8)
    gate_up[0, :size, 0], gate_up[0, size:, 1] = values, 1.0
    down = torch.eye(8, size)[None]
    x = torch.eye(8)[:2].sum(0)[None]
    arguments = (x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), gate_up, down, None, None, kind, 1.7, 7.0)
    ours, twin = kernels.experts(*arguments), reference.experts(*arguments)
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-30)


def test_no_rows_and_no_slots(dtype, kernels):
    arguments = operands((3, 2, 4, 40, 24), dtype)
    none = [tensor[:0] for tensor in arguments[:3]]
    assert kernels.experts(*none, *arguments[3:]).shape == (0, 40)
    no_slots = [arguments[0], *(tensor[:, :0] for tensor in arguments[1:3])]
    assert torch.equal(kernels.experts(*no_slots, *arguments[3:]), torch.zeros_like(arguments[0]))


@pytest.mark.parametrize("transposed", [False, True])
def test_emulated_experts_wait_for_the_kernels_ahead(transposed, emulation):
    """Each kernel of the second call may begin before the one ahead of it has run, whose rows it reads."""
    kernels = Emulated(emulation)
    x, ids, scores, *weights = operands((16, 2, 8, 72, 40), torch.bfloat16, transposed)
    want = kernels.experts(kernels.experts(x, ids, scores, *weights), ids, scores, *weights)
    for seed in range(3):
        emulation.seed(seed)
        with kernels.overlapping():
            first = kernels.experts(x, ids, scores, *weights)
            out = kernels.experts(first, ids, scores, *weights)
        assert torch.equal(out, want)


def test_an_expert_has_the_bits_of_its_products():
    x, ids, scores, gate_up, down, *_ = operands((20, 1, 3, 72, 48), torch.float32)
    inner = [ops.silu_mul(ops.linear(x[row : row + 1], gate_up[ids[row, 0]])) for row in range(20)]
    want = torch.cat([ops.linear(row, down[expert]) for row, expert in zip(inner, ids[:, 0], strict=True)])
    assert torch.equal(ops.experts(x, ids, torch.ones_like(scores), gate_up, down), want)


def packed(arguments, format):
    """The arguments with the weights of experts in a format, and those scales at the end."""
    gate_up, down = (PackedWeight.of(weight, format) for weight in arguments[3:5])
    return [*arguments[:3], gate_up.packed, down.packed, *arguments[5:], gate_up.scales, down.scales, format, format]


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_experts_are_as_exact_as_the_twin(shape, dtype, kernels):
    for kind, bias in zip(KINDS, (False, True, True), strict=True):
        given = packed(operands(shape, dtype, bias=bias, kind=kind), "w8a8" if kernels is ops else "w8a16")
        ours, twin = kernels.experts(*given), reference.experts(*given)
        if kernels is ops:  # sums in another order may round a row to another integer
            assert relative_error(ours, twin) < 0.005
        else:
            exact = reference.experts(*in_float64(given[:-3]), *given[-3:])
            assert_as_exact_as_torch(ours, twin, exact, factor=3.0)


def test_packed_experts_give_a_row_its_bits_wherever_it_is(dtype, kernels):
    if dtype == torch.float32 and kernels is not ops:
        pytest.skip("float32 goes through torch there")
    x, ids, scores, *weights = packed(operands((40, 3, 5, 136, 72), dtype), "w8a8" if kernels is ops else "w8a16")
    whole = kernels.experts(x, ids, scores, *weights)
    x[1::2] = float("nan")
    for rows in (1, 3, 16, 17, 40):
        assert torch.equal(kernels.experts(x[:rows], ids[:rows], scores[:rows], *weights)[::2], whole[:rows:2])


def test_transposed_experts_must_be_dense():
    arguments = packed(operands((3, 2, 4, 64, 64), torch.float32, transposed=True), "w8a8")
    arguments[-4:-2] = torch.ones(4, 128), torch.ones(4, 64)
    with pytest.raises(ValueError, match="transposed weights must be dense"):
        ops.experts(*arguments)
