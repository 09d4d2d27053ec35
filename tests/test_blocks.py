"""Products with weights in the blocks of GGUF files, which stay as the file has them."""

import gguf
import numpy as np
import pytest
import torch

from dflash import ops
from dflash.ops import PackedWeight, reference

pytestmark = pytest.mark.op

HALVES = {"Q4_K": 2, "Q5_K": 2, "Q4_1": 2, "Q5_1": 2}  # half-precision numbers at the beginning of a block; else one
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def blocks(kind, *shape, seed=0):
    """Return random blocks ``[..., out, bytes]`` of a tensor ``[..., out, in]``, and what gguf reads there."""
    g = np.random.default_rng(seed)
    *outer, width = shape
    columns, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    made = g.integers(0, 256, (*outer, width // columns, size), dtype=np.uint8)
    scales = (g.standard_normal((*outer, width // columns, HALVES.get(kind, 1))) * 0.01).astype(np.float16)
    scales[..., 0, 0] = np.float16(3e-7)  # subnormal
    first = size - 2 if kind == "Q6_K" else 0
    made[..., first : first + 2 * scales.shape[-1]] = scales.view(np.uint8)
    made = made.reshape(*outer, -1)
    return torch.from_numpy(made), torch.from_numpy(gguf.quants.dequantize(made, gguf.GGMLQuantizationType[kind]))


def packed(kind, *shape, seed=0):
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


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_an_odd_number_of_blocks_is_padded(kind):
    given, want = blocks(kind, 20, 96)
    assert torch.equal(PackedWeight.of_blocks(given, kind.lower(), 96).dense(), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 15, 16, 17, 33, 64, 70])
def test_every_instruction_set_has_the_bits_of_plain_torch(count, kind, bias, dtype):
    weight, x = packed(kind, 40, 768), rows(count, 768, dtype)
    offset = torch.randn(40).to(dtype) if bias else None
    assert torch.equal(multiply(ops, x, weight, offset), multiply(reference, x, weight, offset))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_bits_that_it_has_alone(kind):
    weight, x = packed(kind, 100, 1280), rows(64, 1280, torch.float32)
    every = multiply(ops, x, weight)
    for count in (1, 3, 6, 16):
        assert torch.equal(every[:count], multiply(ops, x[:count], weight))


@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q8_0", "Q8_0"), ("Q4_0", "Q5_1")], ids=str)
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


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_as_embeddings(kind):
    weight, ids = packed(kind, 40, 512), torch.tensor([[3, 39], [-5, 77]])
    got = ops.unpack_rows(weight.packed, ids, 512, weight.format)
    assert torch.equal(got, weight.dense()[ids.clamp(0, 39)])


def test_chosen_features_keep_their_values():
    weight, channels = packed("Q5_K", 40, 512), torch.tensor([3, 39, 0, 17])
    assert torch.equal(weight.select(channels).dense(), weight.dense()[channels])
