"""A norm folded into the products around it: `linear_add_scale`, then `linears` or `swiglu` with its squares."""

import pytest
import torch
from op_checks import DTYPES, Emulated, assert_as_exact_as_torch

from dflash import _C, ops
from dflash.ops import reference

pytestmark = pytest.mark.op
EPS = 1e-2  # large enough to matter


def operands(rows, width, hidden, dtype=torch.bfloat16):
    """x, weight, residual, norm and bias of `linear_add_scale`."""
    g = torch.Generator().manual_seed(rows + hidden)
    shapes = (rows, width), (hidden, width), (rows, hidden), (hidden,), (hidden,)
    x, weight, residual, norm, bias = (torch.randn(shape, generator=g) for shape in shapes)
    return [tensor.to(dtype) for tensor in (x, weight / width**0.5, residual * 2, norm, bias)]


def next_products(hidden, dtype=torch.bfloat16):
    """Two weights that follow the norm, and their biases."""
    g = torch.Generator().manual_seed(hidden)
    weights = [torch.randn(130, hidden, generator=g) / hidden**0.5 for _ in range(2)]
    return [weight.to(dtype) for weight in weights], [torch.randn(130, generator=g).to(dtype) for _ in range(2)]


def folded(place, first, weights, biases, zero_centered=False):
    """Return the products after the norm, side by side and gated, and the sums of squares."""
    scaled, _, squares = place.linear_add_scale(*first, None, zero_centered)
    side_by_side = place.linears(scaled, weights, biases, False, squares, EPS)
    return side_by_side, place.swiglu(scaled, *weights, False, squares, EPS), squares


def apart(place, first, weights, biases, zero_centered=False):
    """Return the same products by `add_rms_norm`."""
    x, weight, residual, norm, bias = first
    normed, _ = place.add_rms_norm(place.linear(x, weight, bias), residual, norm, EPS, None, zero_centered)
    return place.linears(normed, weights, biases), place.swiglu(normed, *weights)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("width", "hidden"), [(40, 72), (1040, 264)])
@pytest.mark.parametrize("rows", [1, 17, 40, 65])
def test_products_are_as_exact_as_those_of_a_norm_of_its_own(rows, width, hidden, zero_centered, kernels):
    call = operands(rows, width, hidden), *next_products(hidden)
    exact = apart(reference, *[[tensor.double() for tensor in part] for part in call], zero_centered)
    twins = apart(reference, *call, zero_centered)
    for out, twin, right in zip(folded(kernels, *call, zero_centered)[:2], twins, exact, strict=True):
        assert_as_exact_as_torch(out, twin, right, factor=3.0)  # of a single row, the errors scatter


@pytest.mark.parametrize("rows", [1, 17, 65])
def test_the_twin_rounds_scaled_products_where_the_kernel_does(rows, kernels):
    weights, biases = next_products(264)
    scaled, _, squares = reference.linear_add_scale(*operands(rows, 520, 264))
    for call in (lambda place: place.linears(scaled, weights, biases, False, squares, EPS),
                 lambda place: place.swiglu(scaled, *weights, False, squares, EPS)):  # fmt: skip
        other = call(kernels) != call(reference)  # sums of another order that lie next to a middle
        assert other.float().mean() < 0.02


@pytest.mark.parametrize("offset", [None, 8, 3])  # a tap at any address
@pytest.mark.parametrize(("rows", "width"), [(16, 64), (65, 520)])
def test_the_sum_and_its_tap_have_the_bits_of_add_rms_norms(rows, width, offset, kernels):
    x, weight, residual, norm, bias = operands(rows, width, 264)
    taps = torch.zeros(rows, 3 * 264).bfloat16()
    tap = None if offset is None else taps[:, offset : offset + 264]
    _, total, squares = kernels.linear_add_scale(x, weight, residual, norm, bias, tap)
    place = reference if kernels is ops else kernels
    _, want = place.add_rms_norm(place.linear(x, weight, bias), residual, norm, EPS)
    assert torch.equal(total, want)
    if tap is not None:
        assert torch.equal(tap, want)
        assert taps.count_nonzero() == tap.count_nonzero()
    tiles = [part.float().square().sum(-1) for part in want.split(_C.SQUARES_COLUMNS, -1)]
    torch.testing.assert_close(squares, torch.stack(tiles, -1))


def test_a_rows_bits_depend_neither_on_its_place_nor_on_the_others(kernels):
    if kernels is ops:
        pytest.skip("goes through torch there")
    first, after = operands(256, 520, 264), next_products(264)
    whole = folded(kernels, first, *after)
    for tensor in (first[0], first[2]):
        tensor[1::2] = float("nan")
    for begin, end in ((0, 1), (0, 17), (0, 40), (0, 65), (254, 255), (128, 200)):
        x, weight, residual, *norm = first
        few = folded(kernels, (x[begin:end], weight, residual[begin:end], *norm), *after)
        for have, want in zip(few, whole, strict=True):
            assert torch.equal(have[::2], want[begin:end:2])


def test_emulated_products_wait_for_the_sums_of_squares_of_the_kernel_ahead(emulation):
    kernels, (weights, biases) = Emulated(emulation), next_products(264)
    first = operands(16, 520, 264)
    for seed in range(4):
        emulation.seed(seed)
        first[2] *= 2  # the residual: no round finds the right values in old memory
        with kernels.overlapping():
            made = kernels.linear_add_scale(*first)
            out = kernels.linears(made[0], weights, biases, True, made[2], EPS)
        assert torch.equal(out, kernels.linears(made[0], weights, biases, False, made[2], EPS))


@pytest.mark.parametrize(("width", "hidden"), [(33, 264), (72, 33)])
def test_what_the_kernel_does_not_take_goes_through_torch(width, hidden, kernels):
    first = operands(5, width, hidden)
    for have, want in zip(kernels.linear_add_scale(*first), reference.linear_add_scale(*first), strict=True):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    first, (weights, biases) = operands(3, 8, 136, dtype), next_products(136, dtype)
    for tap in (None, torch.zeros(3, 136, dtype=dtype)):
        torch.library.opcheck(torch.ops.dflash.linear_add_scale.default, (*first, tap))
    scaled, _, squares = ops.linear_add_scale(*first)
    torch.library.opcheck(torch.ops.dflash.linears.default, (scaled, weights, biases, False, squares, EPS))
    torch.library.opcheck(torch.ops.dflash.swiglu.default, (scaled, *weights, False, squares, EPS))


def test_bad_input_is_named():
    x, weight, residual, norm, bias = operands(3, 8, 136)
    with pytest.raises(ValueError, match=r"residual must be \[\.\.\., rows, hidden\] = \[3, 136\], got \[2, 136\]"):
        ops.linear_add_scale(x, weight, residual[:2], norm)
    with pytest.raises(ValueError, match=r"norm must be \[hidden\] = \[136\], got \[135\]"):
        ops.linear_add_scale(x, weight, residual, norm[1:])
    with pytest.raises(ValueError, match="the rows of tap must be dense and evenly spaced"):
        ops.linear_add_scale(x, weight, residual, norm, bias, torch.zeros(136, 3).bfloat16().t())
    with pytest.raises(ValueError, match=r"squares must be \[\.\.\., rows, tiles\] = \[3, 2\], got \[3, 1\]"):
        ops.linears(residual, [residual], [], False, torch.zeros(3, 1))
    with pytest.raises(TypeError, match=r"x must be float32 or bfloat16, got torch\.float16"):
        ops.linear_add_scale(*operands(3, 8, 136, torch.float16))
