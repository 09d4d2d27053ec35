"""The CUDA kernels of ``block_attention`` with ancestors, emulated: bits of chains, and nothing unseen is noticed."""

import pytest
import torch
from op_checks import Emulated, assert_as_exact_as_torch
from test_block_attention import NAN, draw
from test_tree_attention import as_chain, assert_rows_are_their_chains, options
from trees import random_shapes, tree_of

from dflash.ops import reference

pytestmark = pytest.mark.op

HALF = [torch.bfloat16, torch.float16]
# Heads, kv heads, dims of k and v: one to eight query heads per kv head, every tile of the tensor cores, other dims.
HEADS = {
    torch.bfloat16: [(2, 2, 64, 64), (4, 1, 128, 96), (5, 1, 40, 64), (8, 1, 64, 64), (2, 1, 8, 256)],
    torch.float16: [(4, 1, 64, 40), (3, 1, 136, 256)],
    torch.float32: [(1, 1, 16, 16), (4, 1, 20, 12), (8, 1, 7, 3)],
}
LENGTHS = [0, 5, 27, 31, 32, 112, 127, 241, 255]  # around tiles of 16, 32 and 128 positions and a chunk of 256


@pytest.fixture
def gpu(emulation):
    return Emulated(emulation)


@pytest.mark.parametrize(("dtype", "heads"), [(dtype, heads) for dtype in HEADS for heads in HEADS[dtype]])
def test_a_row_has_the_bits_of_its_chain(heads, dtype, gpu):
    case, tree = draw(heads, LENGTHS, 17, dtype), random_shapes(17, len(LENGTHS))
    assert_rows_are_their_chains(gpu.block_attention, case, tree, options("causal", heads[0]))


def test_a_row_whose_heads_fill_several_warps_has_the_bits_of_its_chain(gpu):
    case, tree = draw((24, 1, 64, 64), [5, 27], 7, torch.bfloat16), random_shapes(7, 2)
    assert_rows_are_their_chains(gpu.block_attention, case, tree, options("all", 24))


@pytest.mark.parametrize("mode", ["window", "narrow window", "softcap", "sinks", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_bits_of_its_chain_in_every_mode(dtype, mode, gpu):
    case, tree = draw((4, 1, 64, 64), [3, 62, 250], 16, dtype), random_shapes(16, 3, seed=5)
    assert_rows_are_their_chains(gpu.block_attention, case, tree, options(mode, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [32, 64, 65, 128])
def test_a_row_of_a_large_tree_has_the_bits_of_its_chain(rows, dtype, gpu):
    """The longest path, one from the middle and the last: the chains of all rows would take minutes here."""
    case, tree = draw((4, 1, 16, 16), [20, 249], rows, dtype), random_shapes(rows, 2, seed=rows)
    out = gpu.block_attention(*case, **options("all", 4), ancestors=tree.ancestors)
    for b in range(2):
        for row in (int(tree.depth[b].argmax()), rows // 2, rows - 1):
            bits = sum((int(word) & (1 << 64) - 1) << 64 * i for i, word in enumerate(tree.ancestors[b, row]))
            path = [i for i in range(rows) if bits >> i & 1]
            want = gpu.block_attention(*as_chain(case, b, path), **options("all", 4))[0]
            assert torch.equal(out[b, path], want), (b, row)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trees_of_extreme_shape_have_the_bits_of_chains(dtype, gpu):
    """All rows next to the root, a comb, and a chain of more positions than two tiles hold."""
    star, comb, chain = [-1, *[0] * 69], [-1, *((i - 1) // 2 * 2 for i in range(1, 70))], list(range(-1, 69))
    case, tree = draw((4, 1, 16, 16), [15, 31, 30], 70, dtype), tree_of([star, comb, chain])
    out = gpu.block_attention(*case, **options("causal", 4), ancestors=tree.ancestors)
    for b, path in ((0, [0, 1]), (0, [0, 69]), (1, [*range(0, 70, 2), 69]), (2, list(range(70)))):
        want = gpu.block_attention(*as_chain(case, b, path), **options("causal", 4))[0]
        assert torch.equal(out[b, path], want), (b, path)


@pytest.mark.parametrize("mode", ["causal", "window", "all"])
@pytest.mark.parametrize(
    ("dtype", "heads"),
    [(torch.bfloat16, (4, 1, 64, 64)), (torch.float16, (2, 1, 128, 128)), (torch.float32, (2, 1, 16, 16))],
)
def test_a_tree_is_as_exact_as_torch(heads, dtype, mode, gpu):
    case, tree, chosen = draw(heads, [0, 61, 250], 33, dtype), random_shapes(33, 3), options(mode, heads[0])
    exact = reference.block_attention(*(x.double() for x in case[:3]), case[3], **chosen, ancestors=tree.ancestors)
    twin = reference.block_attention(*case, **chosen, ancestors=tree.ancestors)
    out = gpu.block_attention(*case, **chosen, ancestors=tree.ancestors)
    assert_as_exact_as_torch(out, twin, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_row_does_not_notice_what_it_does_not_see(bad, dtype, gpu):
    """A bad row reaches the rows that continue it and no other; what a window excludes reaches none."""
    q, k_cache, v_cache, lengths = draw((4, 1, 64, 48), [50, 250], 24, dtype)
    tree, chosen = random_shapes(24, 2), {**options("all", 4), "window": 20}
    clean = gpu.block_attention(q, k_cache, v_cache, lengths, **chosen, ancestors=tree.ancestors)
    for row, spoilt_k in ((1, True), (1, False), (7, False), (23, True)):
        spoilt = [k_cache.clone(), v_cache.clone()]
        for b, length in enumerate(lengths.tolist()):
            spoilt[0 if spoilt_k else 1][b, :, length + row] = bad
            spoilt[0][b, :, : length - 19] = spoilt[1][b, :, : length - 19] = bad
        out = gpu.block_attention(q, *spoilt, lengths, **chosen, ancestors=tree.ancestors)
        sees = (tree.ancestors[..., 0] >> row & 1).bool()
        assert torch.equal(out[~sees], clean[~sees])
        if not spoilt_k:
            assert not out[sees].isfinite().all(-1).any()


@pytest.mark.parametrize("dtype", HALF)
def test_the_bits_of_a_tree_do_not_depend_on_the_number_of_splits(dtype, gpu, emulation, monkeypatch):
    case, tree, chosen = draw((4, 1, 64, 64), [250, 1020, 0], 24, dtype), random_shapes(24, 3), options("sinks", 4)
    want = gpu.block_attention(*case, **chosen, ancestors=tree.ancestors)
    emulation.seed(3)  # blocks arrive in another order
    assert torch.equal(gpu.block_attention(*case, **chosen, ancestors=tree.ancestors), want)
    workspace = gpu.workspace
    monkeypatch.setattr(gpu, "workspace", lambda *shapes: (1, *workspace(*shapes)[1:]))
    assert torch.equal(gpu.block_attention(*case, **chosen, ancestors=tree.ancestors), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_outside_the_cache_are_no_keys(dtype, gpu):
    """Lengths that do not fit, as of rows that are done: nothing outside of the cache is read, and the twin agrees."""
    lengths = [-9, -2, -40, -100, 20, 33, 39, 1000]
    q, k_cache, v_cache, _ = draw((2, 1, 64, 48), [0] * len(lengths), 37, dtype)
    chosen, tree = options("narrow window", 2), random_shapes(37, len(lengths))
    case = (q, *(torch.where(x.isnan(), 0.5, x) for x in (k_cache, v_cache)), torch.tensor(lengths))
    exact = reference.block_attention(*(x.double() for x in case[:3]), case[3], **chosen, ancestors=tree.ancestors)
    twin = reference.block_attention(*case, **chosen, ancestors=tree.ancestors)
    out = gpu.block_attention(*case, **chosen, ancestors=tree.ancestors)
    assert_as_exact_as_torch(out, twin, exact)
    assert torch.equal(out.eq(0).all(-1), exact.eq(0).all(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_bits_are_safe(dtype, gpu):
    """Bits of later rows, of rows that do not exist, or none at all."""
    q, k_cache, v_cache, lengths = draw((2, 1, 64, 48), [0, 60], 70, dtype, capacity=60 + 256)
    full = torch.full((2, 70, 2), -1)
    assert gpu.block_attention(q, k_cache, v_cache, lengths, 0.1, True, ancestors=full).isfinite().all()
    none = gpu.block_attention(q, k_cache, v_cache, lengths, 0.1, True, ancestors=torch.zeros_like(full))
    assert none[0].eq(0).all()
    assert none[1].ne(0).any(-1).all()
    assert none[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tree_waits_for_the_kernels_ahead(dtype, gpu):
    q, k_cache, v_cache, lengths = draw((2, 1, 64, 64), [300], 16, dtype)
    ancestors = random_shapes(16).ancestors
    want = gpu.block_attention(q, k_cache, v_cache, lengths, 0.125, True, ancestors=ancestors)
    positions = lengths[:, None] + torch.arange(16)
    key, value = k_cache[:, :, 300:316].clone(), v_cache[:, :, 300:316].clone()
    k_cache[:, :, 300:316] = v_cache[:, :, 300:316] = NAN
    with gpu.overlapping():
        gpu.append_kv_(key, value, positions, k_cache, v_cache)
        out = gpu.block_attention(q, k_cache, v_cache, lengths, 0.125, True, ancestors=ancestors)
        again = gpu.block_attention(q, k_cache, v_cache, lengths, 0.125, True, ancestors=ancestors)
    assert torch.equal(out, want)
    assert torch.equal(again, want)
