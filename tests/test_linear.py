import pytest
import torch
from op_checks import DTYPES, Emulated, assert_as_exact_as_torch, let_rows_meet, skip_float32_on_cuda
from process import python

from dflash import _C, ops
from dflash.ops import reference, switches

pytestmark = pytest.mark.op


def operands(rows, out, width, dtype, bias=True):
    g = torch.Generator().manual_seed(rows * 1000 + out)
    x, weight, offset = (torch.randn(shape, generator=g).to(dtype) for shape in ((rows, width), (out, width), (out,)))
    return x, weight, offset if bias else None


# The CUDA kernel takes widths that are multiples of 8: every number of rows meets these three, and two of the others.
CASES = [
    (rows, *shape, (i + j // 2) % 2 == 1)
    for i, rows in enumerate([1, 15, 16, 17, 33, 49, 64, 65, 520])
    for j, shape in enumerate([(1, 1), (7, 33), (24, 64), (25, 257), (40, 600), (65, 1023), (131, 1032)])
    if shape[1] % 8 == 0 or (i + j) % 2 == 0
]


@pytest.mark.parametrize(("rows", "out", "width", "bias"), CASES)
def test_against_float64(rows, out, width, bias, dtype, kernels):
    x, weight, offset = operands(rows, out, width, dtype, bias)
    exact = reference.linear(x.double(), weight.double(), None if offset is None else offset.double())
    # Torch sums one row in more lanes than many rows: the error to compare with is that of many.
    many = reference.linear(torch.cat([x, x.new_zeros(16, width)]), weight, offset)[:rows]
    assert_as_exact_as_torch(kernels.linear(x, weight, offset), many, exact, factor=3.0)


@pytest.mark.parametrize("place", [ops, reference], ids=["op", "twin"])
@pytest.mark.parametrize("rows", [5, 520])
def test_a_row_of_nan_spoils_no_other_where_torchs_product_lets_rows_meet(place, rows, monkeypatch):
    x, weight, bias = operands(rows, 24, 40, torch.bfloat16)
    want = place.linear(x, weight, bias), place.linears(x, [weight, weight[:7]])
    x[1::3] = float("nan")
    let_rows_meet(monkeypatch)
    for have, whole in zip((place.linear(x, weight, bias), place.linears(x, [weight, weight[:7]])), want, strict=True):
        assert have[1::3].isnan().all()
        for first in (0, 2):
            torch.testing.assert_close(have[first::3], whole[first::3])


@pytest.mark.parametrize(("out", "width"), [(50, 304), (130, 1040)])
def test_a_rows_bits_depend_neither_on_its_place_nor_on_the_others(out, width, dtype, kernels):
    skip_float32_on_cuda(kernels, dtype)
    few = [rows for rows in (1, 16, 17, 40, 64, 65, 128) if ops.skinny(rows, dtype)]
    counts = few if kernels is ops else (1, 17, 40, 64, 65, 180)
    x, weight, bias = operands(counts[-1], out, width, dtype)
    whole = kernels.linear(x, weight, bias)
    x[1::2] = float("nan")
    for rows in counts:
        assert torch.equal(kernels.linear(x[:rows], weight, bias)[::2], whole[:rows:2])
    for row in (62, counts[-1] - 2):
        assert torch.equal(kernels.linear(x[row : row + 1], weight, bias), whole[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(1, 2), (7, 66), (25, 514), (5, 40), (24, 126), (9, 384), (16, 3072)])
@pytest.mark.parametrize("cut", [0, 1])
def test_however_many_rows_there_are_they_are_summed_in_one_order(out, width, cut, dtype):
    """Half of each row takes the other half away, so that rounding errors are all that is left of the sums."""
    x, weight, _ = operands(64, out, width // 2, dtype)
    order = torch.randperm(width // 2, generator=torch.Generator().manual_seed(0))
    x, weight = torch.cat([x, x[:, order]], 1), torch.cat([weight, -weight[:, order]], 1)
    x, weight = x[:, cut:].contiguous(), weight[:, cut:].contiguous()  # odd widths too
    alone = torch.cat([ops.linear(row[None], weight) for row in x])
    for rows in range(2, 65):
        assert torch.equal(ops.linear(x[:rows], weight), alone[:rows])


def test_nothing_past_the_end_of_an_operand_is_read():
    """Each ends where a page ends that may not be followed: a read past it is a crash."""
    done = python("""
        import ctypes, mmap
        import torch
        from dflash import ops
        from dflash.ops import PackedWeight

        PAGE, ROOM = mmap.PAGESIZE, 2**20
        libc = ctypes.CDLL(None, use_errno=True)

        def guarded(tensor):
            memory = mmap.mmap(-1, ROOM + PAGE)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            assert libc.mprotect(ctypes.c_void_p(address + ROOM), PAGE, 0) == 0
            size = tensor.numel() * tensor.element_size()
            return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=ROOM - size).view(
                tensor.shape).copy_(tensor)

        for out, width in ((1, 1), (7, 33), (17, 63), (25, 257), (70, 601), (64, 1024)):
            for dtype in (torch.float32, torch.bfloat16):
                weight, bias = torch.randn(out, width).to(dtype), guarded(torch.randn(out).to(dtype))
                eight = PackedWeight.of(weight, "w8a8")
                weight, values, scales = guarded(weight), guarded(eight.packed), guarded(eight.scales)
                for rows in (1, 5, 16, 21, 40, 64):
                    x = torch.randn(rows, width).to(dtype)
                    for operands in ((weight, bias), (values, bias, False, scales, "w8a8")):
                        want = ops.linear(x, *operands)
                        assert torch.equal(ops.linear(guarded(x), *operands), want)
        print("done")
    """)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_products_wait_for_the_kernels_ahead(dtype, emulation):
    """The second asks for its weights before the first has begun, and for its rows after it has ended."""
    kernels = Emulated(emulation)
    x, first, bias = operands(16, 264, 520, dtype)
    _, second, _ = operands(16, 136, 264, dtype)

    def run():
        hidden = kernels.linear(x, first, bias)
        return hidden, kernels.linear(hidden, second, prefetch=True)

    for seed in range(4):
        kernels.check_overlapping(run, seed)


def test_emulated_weights_may_come_from_the_kernel_ahead(emulation):
    kernels = Emulated(emulation)
    x, weight, _ = operands(16, 136, 520, torch.bfloat16)
    rows, _, _ = operands(16, 1, 136, torch.bfloat16)
    want = kernels.linear(rows, kernels.linear(x, weight))
    wrong = 0
    for seed in range(4):
        for prefetch in (False, True):
            emulation.seed(seed)
            factor = 2.0 ** (2 * seed + prefetch)  # so that no round finds the right values in old memory
            scaled = x * factor
            kernels = Emulated(emulation)  # what fails leaves its counters where they are
            try:
                with kernels.overlapping():
                    made = kernels.linear(scaled, weight)
                    out = kernels.linear(rows, made, prefetch=prefetch)
                right = torch.equal(out, want * factor)
            except RuntimeError as error:
                assert "has read before its wait" in str(error)  # noqa: PT017
                right = False
            assert right or prefetch
            wrong += not right
    assert wrong, "weights that were read too early were not noticed"


def test_emulated_weights_are_never_read_early_when_prefetch_is_off(emulation, monkeypatch):
    monkeypatch.setattr(switches, "PREFETCH", False)
    kernels = Emulated(emulation)
    x, weight, _ = operands(16, 136, 520, torch.bfloat16)
    rows, _, _ = operands(16, 1, 136, torch.bfloat16)
    want = kernels.linear(rows, kernels.linear(x, weight))
    for seed in range(4):
        emulation.seed(seed)
        scaled = x * 2.0**seed
        with kernels.overlapping():
            made = kernels.linear(scaled, weight)
            out = kernels.linear(rows, made, prefetch=True)
        assert torch.equal(out, want * 2.0**seed)


def test_emulated_slices_are_never_empty(emulation):
    for tiles in (1, 8, 32, 48, 192, 1187):
        for width in (8, 64, 72, 520, 2880, 4096, 12288, 20480):
            steps = -(-width // 64)
            for weights, gated in (([128 * tiles], False), ([64 * tiles] * 2, True)):
                shapes = (_C.DTYPES["bfloat16"], 16, width, [None] * len(weights), weights, gated, 0)
                slices, _ = emulation.linear_workspace(*shapes)
                assert 1 <= slices <= max(1, steps // 4)
                assert (slices - 1) * -(-steps // slices) < steps
                assert slices == 1 or slices * tiles <= 384


@pytest.mark.parametrize(("width", "bias"), [(64, True), (1040, False), (1040, True), (33, False)])
@pytest.mark.parametrize("rows", [1, 16, 40, 65])
def test_several_weights_side_by_side(rows, width, bias, dtype, kernels):
    parts = [operands(rows, out, width, dtype) for out in (130, 0, 128, 24)]
    x, weights, biases = parts[0][0], [part[1] for part in parts], [part[2] for part in parts] if bias else []
    if bias:  # in one storage: torch multiplies them at once
        weights = torch.cat(weights).split([len(weight) for weight in weights])
    for count in (1, 3, 4):
        few = weights[:count], biases[:count]
        many = reference.linears(torch.cat([x, x.new_zeros(16, width)]), *few)[:rows]
        exact = reference.linears(x.double(), *([tensor.double() for tensor in part] for part in few))
        assert_as_exact_as_torch(kernels.linears(x, *few), many, exact, factor=3.0)


def test_a_row_has_the_same_bits_before_several_weights(dtype, kernels):
    skip_float32_on_cuda(kernels, dtype)
    counts = (1, 17, 40, 64) if kernels is ops else (1, 17, 64, 140)
    x, first, _ = operands(counts[-1], 300, 1040, dtype)
    second = operands(counts[-1], 50, 1040, dtype)[1]
    whole = kernels.linears(x, [first, second])
    for rows in counts[:-1]:
        assert torch.equal(kernels.linears(x[-rows:], [first, second]), whole[-rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(1, 1), (7, 33), (64, 63), (65, 257), (130, 600), (200, 191)])
def test_a_row_alone_has_the_bits_it_has_among_others(out, width, dtype):
    x, weight, bias = operands(5, out, width, dtype)
    # not aligned, nor followed by anything finite
    weight = torch.cat([weight.flatten(), weight.new_full((512,), float("nan"))])[: out * width].view(out, width)
    x = torch.cat([x.new_zeros(1), x.flatten(), x.new_full((512,), float("nan"))])[1 : 1 + 5 * width].view(5, width)
    for offset in (bias, None):
        whole = ops.linear(x, weight, offset)
        for row in range(5):
            assert torch.equal(ops.linear(x[row : row + 1], weight, offset)[0], whole[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_width_of_zero_gives_the_bias(dtype):
    x, weight, bias = operands(3, 5, 0, dtype)
    assert torch.equal(ops.linear(x, weight, bias), bias.expand(3, 5))
    assert torch.equal(ops.linear(x, weight), torch.zeros(3, 5, dtype=dtype))
