"""Products with weights in 4 or 8 bits as GPUs read them: a scale per group of columns, values rounded to 16 bits."""

import pytest
import torch
from op_checks import CUDA_DTYPES, Emulated
from test_blocks import blocks, integers, minima_of, packed

from dflash import ops
from dflash.decoder import split_weights
from dflash.ops import FORMATS, PackedWeight, reference

pytestmark = pytest.mark.op

NAMES = ("w4a16g32", "w4a16g128", "w8a16g32", "w8a16g128", "w4a16g32m", "w8a16g32m")
SUPER = {"w4a16g32k": "Q4_K", "w8a16g32k": "Q5_K", "w8a16g16k": "Q6_K"}  # of files
HALVES = [torch.bfloat16, torch.float16]


def made(name, *shape, dtype=torch.bfloat16, seed=0):
    """Return a random weight in a format."""
    if name in SUPER:
        weight = packed(SUPER[name], *shape[:-1], -(-shape[-1] // 256) * 256, seed=seed)._replace(columns=shape[-1])
    else:
        has_minima = name.endswith("m")
        bits, group = map(int, name[1:].removesuffix("m").split("a16g"))
        codes, scales, zeros, _ = integers(bits, group, *shape, dtype=torch.float16, seed=seed)
        given = {"minima": minima_of(scales, zeros)} if has_minima else {"zeros": zeros if bits == 4 else None}
        weight = PackedWeight.of_integers(codes, scales, **given, group=group, bits=bits)
    weight = weight.in_groups(dtype)
    assert weight.format == (name if name in SUPER or shape[-1] > 32 or has_minima else name.replace("g32", "g128"))
    return weight


def random(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def multiply(place, x, weight, bias=None):
    return place.linear(x, weight.packed, bias, format=weight.format)


# ---------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Q4_0", "w4a16g32"), ("Q4_1", "w4a16g32m"), ("Q5_0", "w8a16g32"), ("Q5_1", "w8a16g32m"), ("Q8_0", "w8a16g32"),
        ("IQ4_NL", "w8a16g32"), ("MXFP4", "w8a16g32"), ("IQ4_XS", "w8a16g16k"), *((x, y) for y, x in SUPER.items()),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", HALVES)
def test_a_files_values_stay_as_they_are(kind, name, dtype):
    width = 768 if "K" in kind or "XS" in kind else 416
    weight = packed(kind, 24, width)
    got = weight.in_groups(dtype)
    if kind == "MXFP4" and dtype == torch.float16:  # whose scales half precision does not hold
        assert got is None
        return
    assert (got.format, got.shape) == (name, weight.shape)
    assert torch.equal(got.dense(), blocks(kind, 24, width)[1])


@pytest.mark.parametrize("group", [32, 64, 96, 128, 256, 1000])
@pytest.mark.parametrize("dtype", HALVES)
def test_integers_and_zero_points_stay_as_they_are(dtype, group):
    codes, scales, zeros, want = integers(4, group, 2, 16, 416, dtype=dtype)
    assert zeros.max() == 16
    got = PackedWeight.of_integers(codes, scales, zeros, group=group, bits=4).in_groups(dtype)
    assert got.format == ("w4a16g128" if group % 128 == 0 or group > 416 else "w4a16g32")
    assert torch.equal(got.dense(), want)
    # The library's own: the difference and the product in its dtype
    groups = torch.arange(416) // group
    own = (codes.to(dtype) - zeros.to(dtype)[..., groups]) * scales[..., groups]
    assert torch.equal(got.dense(dtype), own)


def test_scales_of_8_bits_are_kept_per_channel():
    codes, scales, _, _ = integers(8, 1000, 16, 416, dtype=torch.bfloat16)
    got = PackedWeight.of_integers(codes, scales, group=1000, bits=8).in_groups(torch.bfloat16)
    assert got.format == "w8a16g128"
    assert torch.equal(got.dense(), (codes.float() - 128) * scales.float())


def test_a_lane_finds_what_it_multiplies_next_to_each_other():
    """As groups.cuh says: bits 4 i of both halves of a word are columns 2t and 2t + 1 of step i // 2."""
    codes = (torch.arange(8)[:, None] + torch.arange(64)).remainder(16).to(torch.uint8)
    weight = PackedWeight.of_integers(codes, torch.ones(8, 2), torch.zeros(8, 2, dtype=torch.uint8), group=32, bits=4)
    words = weight.in_groups(torch.bfloat16).packed.flatten()[:256].view(torch.int32).view(8, 4, 2)
    for feature, t, word, i, half in (
        (0, 0, 0, 0, 0),
        (3, 1, 0, 0, 1),
        (5, 2, 0, 3, 1),
        (7, 3, 1, 2, 0),
        (6, 1, 1, 3, 0),
    ):
        column = (2 * word + i // 2) * 16 + i % 2 * 8 + 2 * t + half
        assert int(words[feature, t, word]) >> (16 * half + 4 * i) & 15 == codes[feature, column]


@pytest.mark.parametrize(
    ("weight", "dtype"),
    [
        (lambda: packed("w4g32m", 16, 256), torch.bfloat16),
        (lambda: packed("Q4_0", 12, 256), torch.bfloat16),
        (lambda: packed("w8g32", 16, 256), torch.bfloat16),
        (lambda: PackedWeight.of_integers(*integers(4, 32, 8, 64, dtype=torch.bfloat16)[:2], group=32, bits=4)._replace(
            columns=63), torch.bfloat16),
    ],
    ids=["minima in float", "features", "zero points of 8 bits", "columns"],
)  # fmt: skip
def test_what_no_format_holds_is_not_packed(weight, dtype):
    assert weight().in_groups(dtype) is None


def test_a_group_of_zeros_may_have_any_scale():
    codes, scales, _, _ = integers(4, 32, 8, 96)
    codes[3, 32:64], scales, minima = 0, scales.half().float(), torch.full_like(scales, 0.25)
    scales[3, 1] = 1e-7
    weight = PackedWeight.of_integers(codes, scales, minima=minima, group=32, bits=4)
    got = weight.in_groups(torch.bfloat16)
    assert got.format == "w4a16g32m"
    assert torch.equal(got.dense(), weight.dense())
    codes[3, 40] = 1
    weight = PackedWeight.of_integers(codes, scales, minima=minima, group=32, bits=4)
    assert weight.in_groups(torch.bfloat16) is None


def test_scales_in_float_take_8_bits():
    codes, scales, zeros, want = integers(4, 32, 8, 64)
    got = PackedWeight.of_integers(codes, scales, zeros, group=32, bits=4).in_groups(torch.bfloat16)
    assert got.format == "w8a16g32"
    assert torch.equal(got.dense(), want)


def test_scales_that_half_precision_does_not_hold_are_for_bfloat16_only():
    codes, scales, zeros, _ = integers(4, 32, 8, 64, dtype=torch.bfloat16)
    scales[0, 0] = 2**-30
    weight = PackedWeight.of_integers(codes, scales, zeros, group=32, bits=4)
    assert weight.in_groups(torch.float16) is None
    assert torch.equal(weight.in_groups(torch.bfloat16).dense(), weight.dense())


@pytest.mark.parametrize("name", [*NAMES, *SUPER])
def test_chosen_features_keep_their_values(name):
    weight, channels = made(name, 40, 416), torch.tensor([3, 39, 0, 17])
    assert torch.equal(weight.select(channels).dense(), weight.dense()[channels])


# ---------------------------------------------------------------------------------------------- products

# Widths of whole and of other stages and groups, slices that begin within 128 columns, and tiles of 8, 16 and 128
SHAPES = [(8, 32), (24, 96), (136, 416), (16, 2080), (264, 1184)]


@pytest.mark.parametrize(("out", "width"), SHAPES)
@pytest.mark.parametrize("rows", [1, 15, 17, 33, 64])
@pytest.mark.parametrize("name", [*NAMES, *SUPER])
def test_products_have_the_bits_of_the_dense_weight(name, rows, out, width, dtype, kernels):
    if kernels is ops or dtype == torch.float32:
        pytest.skip("it goes through torch")
    weight, x = made(name, out, width, dtype=dtype), random(rows, width, dtype=dtype)
    bias = random(out, dtype=dtype) if rows % 2 else None
    assert torch.equal(multiply(kernels, x, weight, bias), kernels.linear(x, weight.dense(dtype), bias))


@pytest.mark.parametrize("name", [*NAMES, *SUPER])
def test_a_format_stands_for_the_same_on_every_device(name, dtype, kernels):
    """Where kernels do not read it, it goes through torch."""
    weight = made(name, 16, 96)
    for rows in (9, 70):
        x = random(rows, 96, dtype=dtype)
        exact = x.double() @ weight.dense(dtype).double().T
        torch.testing.assert_close(multiply(kernels, x, weight).double(), exact, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(multiply(reference, x, weight).double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_code_zero_point_and_kind_of_scale_is_right(dtype, emulation):
    """Rows of a unit matrix read the values out."""
    kernels, x = Emulated(emulation), torch.eye(64, dtype=dtype)
    scales = torch.tensor([0.0, 6e-8, 3e-7, 1.1e-5, -0.0123, 0.3333, 1.0, 2047.0, -4094.0, 4095.0]).half()
    assert (torch.equal(scales.to(dtype), scales)) == (dtype == torch.float16)
    codes = torch.arange(16, dtype=torch.uint8).repeat(170, 4)
    zeros = torch.arange(17, dtype=torch.uint8).repeat(10)[:, None].expand(-1, 2)
    every = scales.repeat_interleave(17)[:, None].expand(-1, 2)
    codes, zeros, every = codes[:168], zeros[:168].contiguous(), every[:168].contiguous()
    weight = PackedWeight.of_integers(codes, every, zeros, group=32, bits=4).in_groups(dtype)
    assert weight.format.startswith("w4")
    assert torch.equal(multiply(kernels, x, weight).T, weight.dense(dtype) + 0)
    codes = torch.arange(256, dtype=torch.uint8).repeat(16)[: 40 * 64].view(40, 64)
    weight = PackedWeight.of_integers(codes, scales.repeat(8).view(40, 2), group=32, bits=8).in_groups(dtype)
    assert weight.format == "w8a16g32"
    got, want = multiply(kernels, x, weight).T, weight.dense(dtype) + 0
    assert torch.equal(got.nan_to_num(7), (x @ want.T).T.nan_to_num(7))


@pytest.mark.parametrize("name", [*NAMES, *SUPER])
def test_a_rows_bits_depend_neither_on_its_place_nor_on_the_others(name, dtype, kernels):
    if kernels is ops or dtype == torch.float32:
        pytest.skip("it goes through torch")
    weight, x = made(name, 136, 1056, dtype=dtype), random(130, 1056, dtype=dtype)
    whole = multiply(kernels, x, weight)
    x[1::2] = float("nan")
    for rows in (1, 16, 17, 40, 64, 130):
        assert torch.equal(multiply(kernels, x[:rows], weight)[::2], whole[:rows:2])
    assert torch.equal(multiply(kernels, x[62:63], weight), whole[62:63])


@pytest.mark.parametrize("name", ["w4a16g128", "w8a16g16k"])
def test_many_rows_have_the_bits_of_few(name, dtype, kernels):
    if kernels is ops or dtype == torch.float32:
        pytest.skip("it goes through torch")
    weight, x = made(name, 40, 544, dtype=dtype), random(530, 544, dtype=dtype)
    values, *stores = split_weights(weight, weight.select(torch.arange(40).flip(0)))
    runs = [
        lambda x: multiply(kernels, x, weight),
        lambda x: kernels.linears(x, values, (), False, *stores),
        lambda x: kernels.swiglu(x, *values, False, *stores),
    ]
    for run in runs:
        assert torch.equal(run(x), torch.cat([run(part) for part in x.split([200, 70, 260])]))


@pytest.mark.parametrize("name", [*NAMES, *SUPER])
@pytest.mark.parametrize("rows", [16, 20, 40, 65])
def test_kernels_take_several_weights_and_their_gates(rows, name, dtype, kernels):
    x, sizes = random(rows, 1056, dtype=dtype), (136, 0, 128, 24)
    weights = [made(name, max(8, out), 1056, dtype=dtype, seed=out) for out in sizes]
    weights[1] = weights[1]._replace(packed=weights[1].packed[:0])
    biases = [random(out, dtype=dtype) for out in sizes]
    values, *stores = split_weights(*weights)
    apart = [multiply(kernels, x, *part) for part in zip(weights, biases, strict=True)]
    assert torch.equal(kernels.linears(x, values, biases, False, *stores), torch.cat(apart, -1))
    values, *stores = split_weights(weights[0], weights[0].select(torch.arange(136).flip(0)))
    both = kernels.linears(x, values, (), False, *stores)
    assert torch.equal(kernels.swiglu(x, *values, False, *stores), kernels.silu_mul(both))


@pytest.mark.parametrize(("name", "rows"), [("w4a16g32", 16), ("w8a16g128", 16), ("w4a16g32k", 260)])
def test_emulated_products_wait_for_the_kernels_ahead(name, rows, emulation):
    """The second asks for its weights before the first has begun, and for its rows after it has ended."""
    kernels, x = Emulated(emulation), random(rows, 544, dtype=torch.bfloat16)
    first, second = made(name, 288, 544), made(name, 136, 288)

    def run():
        hidden = kernels.linear(x, first.packed, None, True, None, name)
        return hidden, kernels.linear(hidden, second.packed, None, True, None, name)

    for seed in range(4):
        kernels.check_overlapping(run, seed)


@pytest.mark.parametrize(("rows", "sizes"), [(5, (20, 160, 96)), (17, (3, 64, 160)), (70, (2, 96, 64))])
@pytest.mark.parametrize(("first", "second"), [*zip([*NAMES, *SUPER], [*SUPER, *NAMES], strict=True)])
def test_experts_have_the_bits_of_dense_ones(first, second, rows, sizes, dtype, kernels):
    """Gate and up are in one format, down in another."""
    if kernels is ops or dtype == torch.float32:
        pytest.skip("it goes through torch")
    count, hidden, width = sizes
    both = made(first, count, 2 * width, hidden, dtype=dtype), made(second, count, hidden, width, dtype=dtype)
    ids = torch.stack([torch.arange(i, i + 2) % count for i in range(rows)])
    given = random(rows, hidden, dtype=dtype) / 8, ids, random(rows, 2, dtype=torch.float32)
    formats = {"format": both[0].format, "down_format": both[1].format}
    assert set(formats.values()) == {first, second}
    got = kernels.experts(*given, *(weight.packed for weight in both), **formats)
    assert torch.equal(got, kernels.experts(*given, *(weight.dense(dtype) for weight in both)))
    assert got.isfinite().all()


def test_features_that_fill_no_tile_go_through_torch(emulation):
    weight = made("w4a16g32", 40, 96).select(torch.arange(35))
    x = random(5, 96, dtype=torch.bfloat16)
    got = multiply(Emulated(emulation), x, weight)
    assert torch.equal(got, reference.linear(x, weight.dense(torch.bfloat16)))


def test_formats_of_gpus_are_not_for_embeddings():
    weight = made("w4a16g32", 40, 96)
    with pytest.raises(ValueError, match="reads weights in blocks"):
        ops.unpack_rows(weight.packed, torch.tensor([3]), 96, weight.format)
    assert {row.device for row in FORMATS.values() if row.name in (*NAMES, *SUPER)} == {"cuda"}
    assert CUDA_DTYPES[1:] == HALVES
