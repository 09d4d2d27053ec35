"""bf16 products on AMX tiles, of a processor or emulated (`linear_amx.h`): the bits that Intel's manual gives."""

import pytest
import torch

from dflash import ops

pytestmark = [
    pytest.mark.op,
    pytest.mark.skipif(ops.isa() != "amx", reason="`.ci/run isa` runs it with DFLASH_ISA=amx"),
]


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a + b`` in float32 with one rounding; float64 holds the sum."""
    return (a.double() + b.double()).float()


def tile_model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x [rows, width] by weight [out, width]^T, the even and the odd products of 32 columns summed apart."""
    products = x.double()[:, None] * weight.double()  # [rows, out, width]
    total = torch.zeros(products.shape[:2])
    for tile in products.split(32, -1):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for k in range(0, tile.shape[-1], 2):
            even = add(even, tile[..., k])
            odd = add(odd, tile[..., k + 1]) if k + 1 < tile.shape[-1] else odd
        total = add(total, add(even, odd))
    return total.bfloat16()


@pytest.mark.parametrize("rows", [1, 15, 16, 31, 48, 64])
@pytest.mark.parametrize(("out", "width"), [(5, 64), (40, 96), (100, 126), (65, 190)])
def test_every_rounding_is_that_of_the_instruction(rows, out, width):
    g = torch.Generator().manual_seed(rows + out)
    x, weight = (torch.randint(-255, 256, (n, width // 2), generator=g).double() for n in (rows, out))
    x = x * 2.0 ** torch.randint(0, 17, x.shape, generator=g)  # whole numbers of at most 38 bits, also their sums
    # The second half takes the first away, in another order: rounding errors are what is left.
    x, weight = torch.cat([x, x.flip(-1)], -1).bfloat16(), torch.cat([weight, -weight.flip(-1)], -1).bfloat16()
    want = tile_model(x, weight)
    assert want.any()
    assert torch.equal(ops.linear(x, weight), want)


def test_denormals_are_zero():
    tiny, one = torch.full((1, 32), 2.0**-130).bfloat16(), torch.full((3, 32), 2.0**120).bfloat16()
    small = torch.full((1, 32), 2.0**-66).bfloat16()
    assert torch.equal(ops.linear(tiny, one), torch.zeros(1, 3).bfloat16())
    assert torch.equal(ops.linear(small, small), torch.zeros(1, 1).bfloat16())
