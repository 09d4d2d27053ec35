"""Products with weights that stay as a file has them: blocks of GGUF files, integers with zero points, MXFP4."""

import gguf
import numpy as np
import pytest
import torch

from dflash import ops
from dflash.ops import PackedWeight, reference

pytestmark = pytest.mark.op

HALVES = {"Q4_K": 2, "Q5_K": 2, "Q4_1": 2, "Q5_1": 2}  # half-precision numbers at the beginning of a block; else one
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
INTEGERS = ("w4g32", "w4g128", "w8g32", "w8g128", "w4g32m", "w4g64m", "w8g32m", "w8g64m")


def blocks(kind, *shape, seed=0):
    """Return random blocks ``[..., out, bytes]`` of a tensor ``[..., out, in]``, and what gguf reads there."""
    g = np.random.default_rng(seed)
    *outer, width = shape
    columns, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    made = g.integers(0, 256, (*outer, width // columns, size), dtype=np.uint8)
    if kind == "MXFP4":
        made[..., 0] = g.integers(110, 125, made.shape[:-1])
        made[..., :2, 0] = [0, 1]  # 2 ** -128 and 2 ** -127, subnormal
        made = made.reshape(*outer, -1)
        return torch.from_numpy(made), torch.from_numpy(gguf.quants.dequantize(made, gguf.GGMLQuantizationType[kind]))
    scales = (g.standard_normal((*outer, width // columns, HALVES.get(kind, 1))) * 0.01).astype(np.float16)
    scales[..., 0, 0] = np.float16(3e-7)  # subnormal
    first = size - 2 if kind == "Q6_K" else 0
    made[..., first : first + 2 * scales.shape[-1]] = scales.view(np.uint8)
    made = made.reshape(*outer, -1)
    return torch.from_numpy(made), torch.from_numpy(gguf.quants.dequantize(made, gguf.GGMLQuantizationType[kind]))


def integers(bits, group, *shape, dtype=torch.float32, seed=0):
    """Return random codes, scales and zero points of a weight ``[..., out, in]``, and the weight."""
    g, groups = torch.Generator().manual_seed(seed), -(-shape[-1] // group)
    codes = torch.randint(0, 2**bits, shape, generator=g, dtype=torch.uint8)
    scales = (torch.randn(*shape[:-1], groups, generator=g) * 0.01).to(dtype)
    zeros = torch.randint(0, 2**bits + 1 if bits == 4 else 256, scales.shape, generator=g, dtype=torch.uint8)
    every = [x.repeat_interleave(group, -1)[..., : shape[-1]] for x in (scales.float(), zeros.float())]
    return codes, scales, zeros, (codes.float() - every[1]) * every[0]


def minima_of(scales, zeros):
    return (-scales.float() * (zeros + 0.3)).to(scales.dtype)


def packed(kind, *shape, seed=0):
    if kind in INTEGERS:
        bits, group = map(int, kind[1:].removesuffix("m").split("g"))
        codes, scales, zeros, _ = integers(bits, group, *shape, seed=seed)
        has_minima = kind.endswith("m")
        given = {"minima": minima_of(scales, zeros)} if has_minima else {"zeros": zeros}
        return PackedWeight.of_integers(codes, scales, **given, group=group, bits=bits)
    return PackedWeight.of_blocks(blocks(kind, *shape, seed=seed)[0], kind.lower(), shape[-1])


def rows(count, width, dtype, seed=1):
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    x[:, ::50] *= 20
    return x.to(dtype)


def multiply(place, x, weight, bias=None):
    return place.linear(x, weight.packed, bias, format=weight.format)


@pytest.mark.parametrize("shape", [(16, 256), (1, 512), (40, 768), (33, 2304), (3, 18, 256)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_file(kind, shape):
    given, want = blocks(kind, *shape)
    got = PackedWeight.of_blocks(given, kind.lower(), shape[-1])
    assert got.shape == shape
    assert torch.equal(got.dense(), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [32, 64, 96, 128, 384, 360, 1000])
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_are_what_a_checkpoint_says(bits, group, dtype):
    codes, scales, zeros, want = integers(bits, group, 3, 20, 360, dtype=dtype)  # 360: the last group is ragged
    weight = PackedWeight.of_integers(codes, scales, zeros, group=group, bits=bits)
    assert weight.shape == (3, 20, 360)
    assert torch.equal(weight.dense(), want)
    assert torch.equal(weight.dense(torch.bfloat16), want.bfloat16())
    middle = torch.full_like(zeros, 2 ** (bits - 1))
    want = PackedWeight.of_integers(codes, scales, middle, group=group, bits=bits).dense()
    assert torch.equal(PackedWeight.of_integers(codes, scales, group=group, bits=bits).dense(), want)
    minima = minima_of(scales, zeros)
    every = [x.float().repeat_interleave(group, -1)[..., :360] for x in (scales, minima)]
    weight = PackedWeight.of_integers(codes, scales, minima=minima, group=group, bits=bits)
    assert torch.equal(weight.dense(), codes.float() * every[0] + every[1])


@pytest.mark.parametrize(
    ("bits", "group", "dtype", "is_symmetric"),
    [(4, 128, torch.float16, False), (4, 128, torch.bfloat16, True), (4, 128, torch.float32, False),
     (4, 32, torch.float16, True), (8, 128, torch.bfloat16, False), (8, 512, torch.float32, True)],
)  # fmt: skip
def test_integers_take_little_more_memory_than_in_their_file(bits, group, dtype, is_symmetric):
    codes, scales, zeros, _ = integers(bits, group, 64, 512, dtype=dtype)
    weight = PackedWeight.of_integers(codes, scales, None if is_symmetric else zeros, group=group, bits=bits)
    in_file = codes.numel() * bits // 8 + scales.nbytes + (0 if is_symmetric else zeros.numel() * bits // 8)
    assert weight.packed.numel() <= 1.1 * in_file


def test_mxfp4_is_exact_up_to_its_extremes():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).repeat(255, 1)
    exponents = torch.arange(255, dtype=torch.uint8)[:, None]
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    want = (torch.cat([values, -values]).double().repeat(2) * 2.0 ** (exponents.double() - 127)).float()
    weight = PackedWeight.of_mxfp4(codes, exponents)
    assert torch.equal(weight.dense(), want)
    blocks = torch.cat([exponents, codes[:, :16] | codes[:, :16] << 4], 1)
    assert torch.equal(PackedWeight.of_blocks(blocks, "mxfp4", 32).dense(), want)
    assert torch.equal(ops.unpack_rows(weight.packed, torch.arange(255), 32, "mxfp4"), want)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"bits": 3}, "bits must be 4 or 8, got 3"), ({"group": 48}, "group must be a multiple of 32"),
     ({"scales": torch.ones(4, 3)}, r"scales must be \[4, 2\], one per 64 columns"),
     ({"scales": torch.ones(4, 2).double()}, "scales must be float16, bfloat16 or float32"),
     ({"zeros": torch.ones(4, 2)}, "zeros must be uint8"),
     ({"minima": torch.ones(4, 3), "zeros": None}, r"minima must be \[4, 2\], one per 64 columns"),
     ({"minima": torch.ones(4, 2)}, "zeros or minima, got both"),
     ({"codes": torch.full((4, 128), 16, dtype=torch.uint8)}, "less than 16, got 16"),
     ({"codes": torch.ones(4, 128)}, "codes must be uint8")],
)  # fmt: skip
def test_wrong_integers_are_refused(wrong, message):
    codes, scales, zeros, _ = integers(4, 64, 4, 128)
    with pytest.raises(ValueError, match=message):
        PackedWeight.of_integers(**{"codes": codes, "scales": scales, "zeros": zeros, "group": 64, "bits": 4, **wrong})


ONES = torch.ones(4, 2, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("code", "exponents", "message"),
    [(1, torch.ones(4, 2), "exponents must be uint8, got torch.float32"), (16, ONES, "less than 16, got 16"),
     (1, 255 * ONES, "must be below 255"), (1, ONES[:, :1], r"exponents must be \[4, 2\]")],
)  # fmt: skip
def test_wrong_mxfp4_is_refused(code, exponents, message):
    with pytest.raises(ValueError, match=message):
        PackedWeight.of_mxfp4(torch.full((4, 64), code, dtype=torch.uint8), exponents)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"])
def test_an_odd_number_of_blocks_is_padded(kind):
    given, want = blocks(kind, 20, 96)
    assert torch.equal(PackedWeight.of_blocks(given, kind.lower(), 96).dense(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*KINDS, *INTEGERS])
def test_every_instruction_set_has_the_bits_of_plain_torch(kind, dtype):
    weight = packed(kind, 40, 768)
    for count in (1, 2, 3, 5, 8, 9, 15, 16, 17, 33, 64, 70):
        x, offset = rows(count, 768, dtype), torch.randn(40).to(dtype) if count % 2 else None
        assert torch.equal(multiply(ops, x, weight, offset), multiply(reference, x, weight, offset)), count


@pytest.mark.parametrize("group", [64, 96, 256, 1000])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_groups_of_any_size_have_the_bits_of_plain_torch(count, bits, group):
    codes, scales, zeros, _ = integers(bits, group, 24, 360, dtype=torch.bfloat16)
    weight, x = PackedWeight.of_integers(codes, scales, zeros, group=group, bits=bits), rows(count, 360, torch.float32)
    assert torch.equal(multiply(ops, x, weight), multiply(reference, x, weight))
    ids = torch.tensor([23, 0])
    assert torch.equal(ops.unpack_rows(weight.packed, ids, 360, weight.format), weight.dense()[ids])


@pytest.mark.parametrize("kind", [*KINDS, *INTEGERS])
def test_a_row_has_the_bits_that_it_has_alone(kind):
    weight, x = packed(kind, 100, 1280), rows(64, 1280, torch.float32)
    every = multiply(ops, x, weight)
    for count in (1, 3, 6, 16):
        assert torch.equal(every[:count], multiply(ops, x[:count], weight))


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q8_0", "Q8_0"), ("Q4_0", "Q5_1"), ("w4g128", "MXFP4")], ids=str)
@pytest.mark.parametrize("count", [1, 9, 40])
def test_experts_are_multiplied_as_the_file_has_them(count, kinds):
    gate_up, down = packed(kinds[0], 6, 512, 256), packed(kinds[1], 6, 256, 256, seed=2)
    x, ids = (
        rows(count, 256, torch.float32),
        torch.randint(0, 6, (count, 2), generator=torch.Generator().manual_seed(3)),
    )
    call = (x, ids, torch.rand(count, 2), gate_up.packed, down.packed, None, None, "silu", 1.0, 1.0, False, None, None)
    got, want = (place.experts(*call, gate_up.format, down.format) for place in (ops, reference))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)  # the last bit of exp may round a row otherwise


@pytest.mark.parametrize("kind", [*KINDS, *INTEGERS])
def test_rows_are_read_as_embeddings(kind):
    weight, ids = packed(kind, 40, 512), torch.tensor([[3, 39], [-5, 77]])
    got = ops.unpack_rows(weight.packed, ids, 512, weight.format)
    assert torch.equal(got, weight.dense()[ids.clamp(0, 39)])
    # The same through torch's dispatcher, which compilers ask for shapes
    assert torch.equal(torch.ops.dflash.unpack_rows(weight.packed, ids.T, 512, weight.format), got.transpose(0, 1))


@pytest.mark.parametrize("kind", ["Q5_K", "MXFP4", "w4g128"])
def test_chosen_features_keep_their_values(kind):
    weight, channels = packed(kind, 40, 512), torch.tensor([3, 39, 0, 17])
    assert torch.equal(weight.select(channels).dense(), weight.dense()[channels])
