"""Convolutions over a block whose weights depend on the row, by themselves and in front of the residual norm."""

import pytest
import torch
from op_checks import CUDA_DTYPES, DTYPES, Emulated, assert_as_exact_as_torch

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op

EPS, NAN, INF = 1e-6, float("nan"), float("inf")
# batch, rows, hidden, width, groups: groups of 16, as published; of 1, 8, 3 and all channels; more weights than rows
SHAPES = [(2, 5, 64, 2, 4), (1, 4, 37, 3, 37), (3, 6, 72, 5, 9), (1, 3, 33, 7, 11), (2, 4, 144, 1, 1), (1, 1, 16, 2, 2)]

WIDE = [(1, 2, 3000, 2, 6), (1, 2, 5000, 2, 8), (1, 2, 9000, 2, 9)]  # a thread of a GPU holds some pieces of a row


def draw(shape, dtype=torch.float32, seed=0):
    """The arguments of `conv_add_rms_norm` by name."""
    (batch, rows, hidden, width, groups), g = shape, torch.Generator().manual_seed(seed)

    def floats(*sizes):
        return torch.randn(sizes, generator=g).to(dtype)

    return {
        "x": floats(batch, rows, hidden), "base": floats(width, hidden), "dynamic": floats(batch, rows, width, groups),
        "residual": floats(batch, rows, hidden), "weight": floats(hidden), "eps": EPS,
    }  # fmt: skip


def convolution(call):
    """The arguments of `dynamic_conv` among them."""
    return [call[name] for name in ("x", "base", "dynamic")]


def run(place, call):
    """The results of both ops."""
    return [place.dynamic_conv(*convolution(call)), *place.conv_add_rms_norm(**call)]


def some_of(call, sequences=slice(None), rows=slice(None)):
    """The call for some sequences and rows."""
    cut = {name: call[name][sequences, rows] for name in ("x", "dynamic", "residual")}
    return call | cut


def identity(call):
    """The call with a weight of one for the row itself and of zero for the rows before it."""
    base = torch.zeros_like(call["base"])
    base[0] = 1
    return call | {"base": base, "dynamic": torch.zeros_like(call["dynamic"])}


def same_bits(a, b):
    """True if both hold the same bits; every NaN counts as the same one, as it is on a GPU after a rounding."""
    integer = {4: torch.int32, 2: torch.int16}[a.element_size()]
    ours, theirs = (torch.where(x.isnan(), NAN, x).view(integer) for x in (a, b))
    return torch.equal(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_twin_against_the_formula(shape):
    batch, rows, hidden, width, groups = shape
    x, base, dynamic = convolution(draw(shape, torch.float64))
    want = torch.zeros(batch, rows, hidden, dtype=torch.float64)
    for t in range(rows):
        for i in range(min(width, t + 1)):
            for c in range(hidden):
                want[:, t, c] += (base[i, c] + dynamic[:, t, i, c // (hidden // groups)]) * x[:, t - i, c]
    torch.testing.assert_close(reference.dynamic_conv(x, base, dynamic), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, dtype, kernels):
    call = draw(shape, dtype)
    double = [x.double() for x in convolution(call)]
    out, normed, total = run(kernels, call)
    assert_as_exact_as_torch(out, reference.dynamic_conv(*convolution(call)), reference.dynamic_conv(*double))
    assert torch.equal(total, out + call["residual"])
    exact = reference.rms_norm(total.double(), call["weight"].double(), EPS)
    assert_as_exact_as_torch(normed, reference.rms_norm(total, call["weight"], EPS), exact)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("shape", SHAPES + WIDE)
def test_both_in_one_have_the_bits_of_one_after_the_other(shape, zero_centered, dtype, kernels):
    call = draw(shape, dtype)
    batch, rows, hidden = call["x"].shape
    taps = torch.full((batch, rows, 3 * hidden), 9.0).to(dtype)
    ours = kernels.conv_add_rms_norm(**call, tap=taps[..., hidden : 2 * hidden], zero_centered=zero_centered)
    rest = [call[name] for name in ("residual", "weight", "eps")]
    theirs = kernels.add_rms_norm(kernels.dynamic_conv(*convolution(call)), *rest, None, zero_centered)
    assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(taps[..., hidden : 2 * hidden], ours[1])
    assert taps[..., :hidden].eq(9).all()
    assert taps[..., 2 * hidden :].eq(9).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_the_identity_gives_the_bits_of_the_plain_norm(shape, dtype, implementation):
    call = identity(draw(shape, dtype))
    call["x"].view(-1)[:4] = torch.tensor([0.0, -0.0, INF, NAN])  # a row before others
    call["residual"].view(-1)[:4] = torch.tensor([-0.0, -0.0, 1.0, 1.0])
    out, *ours = run(implementation, call)
    assert same_bits(out, call["x"])
    theirs = implementation.add_rms_norm(*(call[name] for name in ("x", "residual", "weight", "eps")))
    assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_a_row_has_its_bits_whatever_its_sequence_and_the_rows_after_it(shape, dtype, kernels):
    call = draw(shape, dtype)
    batch, rows = shape[:2]
    want = run(kernels, call)
    for b in range(batch):
        for count in range(1, rows + 1):
            few = run(kernels, some_of(call, slice(b, b + 1), slice(count)))
            assert all(same_bits(a, whole[b : b + 1, :count]) for a, whole in zip(few, want, strict=True))


@pytest.mark.parametrize(("name", "reached"), [("x", [2, 3, 4]), ("dynamic", [2]), ("residual", [2])])
def test_nan_spoils_no_row_that_does_not_reach_it(name, reached, dtype, implementation):
    call = draw((3, 6, 72, 3, 9), dtype)
    spoilt = call | {name: call[name].clone()}
    spoilt[name][1, 2] = NAN
    pairs = [*zip(run(implementation, spoilt), run(implementation, call), strict=True)]
    for ours, clean in pairs[name == "residual" :]:  # the convolution by itself has no residual
        bad = ours.isnan().any(-1)
        assert bad.nonzero().tolist() == [[1, row] for row in reached]
        assert same_bits(ours[~bad], clean[~bad])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(dtype, set_threads):
    call = draw((2, 16, 1040, 3, 65), dtype)
    set_threads(1)
    want = run(ops, call)
    for count in (2, 3, 7):
        set_threads(count)
        assert all(same_bits(a, b) for a, b in zip(run(ops, call), want, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_read_where_a_product_leaves_them(shape, dtype, kernels):
    """Both sides of a layer's convolution come side by side out of one product."""
    call = draw(shape, dtype)
    want, dynamic = run(kernels, call), call["dynamic"]
    sides = torch.stack([torch.full_like(dynamic, NAN), dynamic], 2)
    transposed = dynamic.transpose(2, 3).contiguous().transpose(2, 3)
    others = {"x": call["x"].mT.contiguous().mT, "base": call["base"].mT.contiguous().mT}
    for changed in ({"dynamic": sides[:, :, 1]}, {"dynamic": transposed}, others):
        ours = run(kernels, call | changed)
        assert all(same_bits(a, b) and a.is_contiguous() for a, b in zip(ours, want, strict=True))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", CUDA_DTYPES)
def test_kernels_may_start_before_the_one_ahead_has_run(emulation, seed, dtype):
    emulated, call = Emulated(emulation), draw((2, 5, 64, 2, 4), dtype)
    x, base, dynamic = convolution(call)

    def chain():
        normed = emulated.rms_norm(x, call["weight"], EPS)
        prepared = emulated.dynamic_conv(normed, base, dynamic)
        out, total = emulated.conv_add_rms_norm(prepared, base, dynamic, normed, call["weight"], EPS)
        return normed, prepared, out, total

    emulated.check_overlapping(chain, seed)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_may_be_put_in_front(shape, dtype, implementation):
    call = draw(shape, dtype)
    want, front = implementation.dynamic_conv(*convolution(call)), draw((shape[0], 9, *shape[2:]), dtype, seed=1)["x"]
    for rows in (9, 1, 0):
        out = implementation.dynamic_conv(*convolution(call), front[:, :rows])
        assert torch.equal(out, torch.cat([front[:, :rows], want], 1))
