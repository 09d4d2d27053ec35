"""Products with weights in 8 bits: on CPUs those of rows in 8 bits too (w8a8), on GPUs of rows as they are (w8a16)."""

import pytest
import torch
from op_checks import DTYPES, Emulated, assert_as_exact_as_torch, skip_float32_on_cuda

from dflash import ops
from dflash.decoder import split_weights
from dflash.ops import FORMATS, NotFiniteError, PackedWeight, reference

pytestmark = pytest.mark.op


def operands(rows, out, width, dtype, bias=True):
    g = torch.Generator().manual_seed(rows * 1000 + out)
    x, weight, offset = (torch.randn(shape, generator=g).to(dtype) for shape in ((rows, width), (out, width), (out,)))
    return x, PackedWeight.of(weight, "w8a8"), offset if bias else None


def multiply(place, x, weight, bias=None):
    """Return the product with a packed weight, by the ops or by their twins."""
    return place.linear(x, weight.packed, bias, scales=weight.scales, format=weight.format)


def test_each_channels_largest_magnitude_becomes_127():
    weight = torch.tensor([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0], [3e-3, 1e-3, -1.5e-3]])
    got = PackedWeight.of(weight, "w8a8")
    assert got.values().tolist() == [[32, -127, 64], [0, 0, 0], [127, 42, -64]]
    torch.testing.assert_close(got.scales, torch.tensor([2.0, 0.0, 3e-3]) / 127)
    assert (got.dense() - weight).abs().max() <= got.scales.max() / 2


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (5, 2**22 + 1)], ids=str)
def test_weights_of_any_size_are_stored_in_8_bits(shape):
    weight = torch.ones(shape, dtype=torch.bfloat16)
    got = PackedWeight.of(weight, "w8a8")
    assert got.shape == shape
    assert (got.values() == 127).all()


@pytest.mark.parametrize("name", [name for name, row in FORMATS.items() if row.storage])
@pytest.mark.parametrize("shape", [(16, 64), (48, 12), (37, 66), (5, 3), (16, 1), (0, 8), (8, 0)], ids=str)
def test_packed_values_are_read_back(shape, name):
    made = FORMATS[name]
    values = torch.arange(shape[0] * shape[1]).remainder(256).sub(128).to(torch.int8).view(shape)
    packed = made.order.pack(values, made.size(shape[1]))
    assert packed.shape == (shape[0], -(-shape[1] // 64) * 64)
    assert torch.equal(made.order.unpack(packed).view(torch.int8)[:, : shape[1]], values)


def test_a_tile_has_four_elements_of_each_channel_in_turn():
    values = torch.arange(-128, 128).to(torch.int8).view(16, 16)
    in_memory = FORMATS["w8a8"].order.pack(values, 64).flatten()
    assert in_memory[:12].tolist() == [0, 1, 2, 3, 16, 17, 18, 19, 32, 33, 34, 35]
    assert in_memory[64:68].tolist() == [4, 5, 6, 7]


def test_selected_channels_keep_their_values_and_scales():
    weight, channels = PackedWeight.of(torch.randn(40, 70), "w8a8"), torch.tensor([3, 39, 0, 17])
    assert torch.equal(weight.select(channels).dense(), weight.dense()[channels])


@pytest.mark.parametrize(("value", "name"), [(float("-inf"), "infinity"), (float("nan"), "NaN")])
def test_a_weight_that_is_not_finite_is_refused(value, name):
    weight = torch.ones(4, 6)
    weight[2, 3] = value
    with pytest.raises(NotFiniteError, match=f"must be finite, got {name}: use the weight as it is") as raised:
        PackedWeight.of(weight, "w8a8")
    assert raised.value.weight is weight


def test_rows_are_rounded_with_scales_of_their_own():
    x = torch.randn(3, 700, generator=torch.Generator().manual_seed(0))
    x[1, :256] *= 1e-3
    x[2, 5], x[2, 300:] = float("inf"), 0
    integers, scales = reference.round_rows(x, 64)
    assert integers.shape == (3, 11, 64)
    assert integers.abs().amax(-1)[:2].eq(127).all()
    assert scales[2, 0].isnan()
    assert scales[2, 5:].eq(0).all()
    error = (integers * scales[..., None]).flatten(1)[:2, :700] - x[:2]
    assert (error.abs() <= scales[:2].repeat_interleave(64, 1)[:, :700] * 0.501).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("out", "width"), [(1, 1), (7, 33), (24, 64), (25, 257), (32, 128), (40, 600), (65, 1023), (131, 1032), (9, 0)]
)
def test_every_instruction_set_has_the_bits_of_plain_torch(out, width, bias, dtype):
    for rows in (1, 2, 5, 8, 9, 16, 17, 33, 49, 64, 65, 70, 300):
        x, weight, offset = operands(rows, out, width, dtype, bias)
        got = multiply(ops, x, weight, offset)
        assert torch.equal(got, multiply(reference, x, weight, offset)), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_magnitudes_far_apart_keep_the_bits_of_plain_torch(dtype):
    x, weight, offset = operands(20, 30, 900, dtype)
    x *= torch.logspace(-38, 38, 900, dtype=torch.float64).to(dtype)
    x[3], x[4, ::7] = 0, 1e-31
    got = multiply(ops, x, weight, offset)
    want = multiply(reference, x, weight, offset)
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 20, 70])
def test_groups_too_small_to_divide_by_count_as_zero(rows, dtype):
    x, weight, _ = operands(rows, 30, 600, dtype)
    threshold = torch.tensor(1e-30).to(dtype)
    above = threshold.view(torch.int32 if dtype == torch.float32 else torch.int16).add(1).view(dtype)
    assert threshold.float() <= torch.tensor(1e-30) < above.float()
    x[0] = 1e-31
    x[1, 256:512] = 1e-31
    x[2], x[3], x[4] = threshold, above, 1e-40
    got = multiply(ops, x, weight)
    assert torch.equal(got, multiply(reference, x, weight))
    assert got[[0, 2, 4]].eq(0).all()
    assert got[3].ne(0).any()
    without = x.clone()
    without[1, 256:512] = 0
    assert torch.equal(got, multiply(ops, without, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 16, 70])
@pytest.mark.parametrize("width", [33, 256, 600])
def test_weights_may_be_minus_128(width, rows, dtype):
    x, weight, bias = operands(rows, 25, width, dtype)
    values = weight.values()
    values[::2, ::3] = -128
    values[3] = -128
    weight = weight._replace(packed=FORMATS["w8a8"].order.pack(values, weight.packed.shape[1]))
    x[0] = x[0].abs().max()  # whole groups of 127
    got = multiply(ops, x, weight, bias)
    assert torch.equal(got, multiply(reference, x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_the_product_of_what_weights_and_rows_stand_for(dtype):
    x, weight, offset = operands(6, 50, 600, dtype)
    integers, scales = reference.round_rows(x, 64)
    rounded = (integers.double() * scales.double()[..., None]).flatten(1)[:, :600]
    exact = rounded @ (weight.values().double() * weight.scales.double()[:, None]).T + offset.double()
    got = multiply(reference, x, weight, offset)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got.double(), exact, atol=1e-4, rtol=tolerance)
    original = x.double() @ (weight.values().double() * weight.scales.double()[:, None]).T + offset.double()
    assert (got - original).norm() < 0.01 * original.norm()


def stored(kernels, weight):
    """Return a weight in the format that kernels read."""
    return PackedWeight.of(weight, "w8a8" if kernels is ops else "w8a16")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


# Widths of whole and of other stages, and features that fill no tile of 128, 16 or 8
SHAPES = [(1, 8), (7, 200), (24, 64), (130, 72), (140, 1040)]
CASES = [
    (rows, *shape, (i + j) % 2 == 1)
    for i, rows in enumerate([1, 15, 17, 33, 64, 65])
    for j, shape in enumerate([*SHAPES, (25, 33)])
]


@pytest.mark.parametrize(("rows", "out", "width", "bias"), CASES)
def test_kernels_are_as_exact_as_the_twins(rows, out, width, bias, dtype, kernels):
    x, weight = random(rows, width, dtype=dtype), stored(kernels, random(out, width, dtype=dtype))
    offset = random(out, dtype=dtype) if bias else None
    ours, twin = (multiply(place, x, weight, offset) for place in (kernels, reference))
    if kernels is ops:
        assert torch.equal(ours, twin)
    else:
        exact = multiply(reference, x.double(), weight, offset.double() if bias else None)
        assert_as_exact_as_torch(ours, twin, exact, factor=3.0)


@pytest.mark.parametrize("format", ["w8a8", "w8a16"])
def test_a_format_stands_for_the_same_on_every_device(format, dtype, kernels):
    """Where kernels do not read it, it goes through torch."""
    x, weight = random(9, 72, dtype=dtype), PackedWeight.of(random(20, 72), format)
    exact = multiply(reference, x.double(), weight)
    assert_as_exact_as_torch(multiply(kernels, x, weight), multiply(reference, x, weight), exact, factor=3.0)


@pytest.mark.parametrize(("out", "width"), SHAPES)
@pytest.mark.parametrize("rows", [5, 30, 64])
def test_integers_have_the_sums_of_dense_weights(rows, out, width, dtype, kernels):
    skip_float32_on_cuda(kernels, dtype)
    if kernels is ops:
        pytest.skip("rows are rounded there")
    x, weight, bias = random(rows, width, dtype=dtype), stored(kernels, random(out, width)), random(out, dtype=dtype)
    values = weight.values()
    values[:, ::5] = -128
    order = FORMATS[weight.format].order
    weight = weight._replace(packed=order.pack(values, weight.packed.shape[1]), scales=torch.ones(out))
    assert torch.equal(multiply(kernels, x, weight, bias), kernels.linear(x, values.to(dtype), bias))


@pytest.mark.parametrize(("out", "width"), [(50, 304), (131, 1040), (131, 1041)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_rows_bits_depend_neither_on_its_place_nor_on_the_others(out, width, has_bias, dtype, kernels):
    skip_float32_on_cuda(kernels, dtype)
    if kernels is not ops and width % 8:
        pytest.skip("it goes through torch")
    counts = (1, 2, 3, 4, 7, 8, 9, 16, 17, 24, 25, 40, 64, 65, 150) if kernels is ops else (1, 16, 17, 40, 64, 130)
    x, weight = random(counts[-1], width, dtype=dtype), stored(kernels, random(out, width))
    bias = random(out, dtype=dtype) if has_bias else None
    whole = multiply(kernels, x, weight, bias)
    x[1::2] = float("nan")
    for rows in counts:
        assert torch.equal(multiply(kernels, x[:rows], weight, bias)[::2], whole[:rows:2])
    assert torch.equal(multiply(kernels, x[62:63], weight, bias), whole[62:63])


@pytest.mark.parametrize("rows", [1, 16, 20, 40, 65, 300])
def test_kernels_take_several_weights_and_their_gates(rows, dtype, kernels):
    x, sizes = random(rows, 1040, dtype=dtype), (130, 0, 128, 20)
    weights = [stored(kernels, random(out, 1040, dtype=dtype, seed=out)) for out in sizes]
    biases = [random(out, dtype=dtype) for out in sizes]
    values, *stores = split_weights(*weights)
    ours = kernels.linears(x, values, biases, False, *stores)
    apart = [multiply(kernels, x, *part) for part in zip(weights, biases, strict=True)]
    assert torch.equal(ours, torch.cat(apart, -1))
    gate, up = weights[0], weights[0].select(torch.arange(130).flip(0))
    values, *stores = split_weights(gate, up)
    both = kernels.linears(x, values, (), False, *stores)
    assert torch.equal(kernels.swiglu(x, *values, False, *stores), kernels.silu_mul(both))


def test_emulated_products_wait_for_the_kernels_ahead(emulation):
    """The second asks for its weights before the first has begun, and for its rows after it has ended."""
    kernels, x = Emulated(emulation), random(16, 520, dtype=torch.bfloat16)
    first, second = (PackedWeight.of(random(*shape), "w8a16") for shape in ((264, 520), (140, 264)))

    def run():
        hidden = kernels.linear(x, first.packed, None, True, first.scales, first.format)
        return hidden, kernels.linear(hidden, second.packed, None, True, second.scales, second.format)

    for seed in range(4):
        kernels.check_overlapping(run, seed)


def test_weights_of_one_product_have_one_format():
    weight = random(8, 64)
    for others in (weight, PackedWeight.of(weight, "w8a16")):
        with pytest.raises(TypeError, match="weights of one product must have one format, got w8a8"):
            split_weights(PackedWeight.of(weight, "w8a8"), others)
