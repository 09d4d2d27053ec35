"""``block_attention`` with ancestors: a row of a tree is that row of a chain which consists of its ancestors."""

import pytest
import torch
from op_checks import CUDA_DTYPES, DTYPES, Emulated, assert_as_exact_as_torch
from test_block_attention import NAN, draw
from trees import longest_paths, random_shapes, tree_of

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op

MODES = {
    "causal": {}, "window": {"window": 37}, "narrow window": {"window": 3}, "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True}, "all": {"window": 130, "softcap": 20.0, "sinks": True},
}  # fmt: skip


def options(mode, num_heads):
    chosen = {"scale": 0.25, "causal": True, **MODES[mode]}
    return {**chosen, "sinks": torch.linspace(-2, 4, num_heads)} if "sinks" in chosen else chosen


def as_chain(case, b, path):
    """The queries and caches of the chain of these rows of one sequence; what it does not see is NaN."""
    q, k_cache, v_cache, lengths = case
    length, caches = int(lengths[b]), [cache[b : b + 1].clone() for cache in (k_cache, v_cache)]
    for cache in caches:
        on_path = cache[:, :, [length + row for row in path]]
        cache[:, :, length:] = NAN
        cache[:, :, length : length + len(path)] = on_path
    return q[b : b + 1, path], *caches, lengths[b : b + 1]


def assert_rows_are_their_chains(op, case, tree, chosen, paths=None):
    """Every row of every tree equals, bit for bit, the row of the chain that leads to it. ``paths``: these alone."""
    out = op(*case, **chosen, ancestors=tree.ancestors)
    every = [(b, path) for b in range(len(case[3])) for path in longest_paths(tree, b)]
    for b, path in paths or every:
        assert torch.equal(out[b, path], op(*as_chain(case, b, path), **chosen)[0]), (b, path)


def attend(op, case, tree, chosen, dtype):
    """Run in a dtype; the lengths stay."""
    return op(*(x.to(dtype) for x in case[:3]), case[3], **chosen, ancestors=tree.ancestors)


def assert_exact(kernels, case, tree, chosen):
    """Assert that a tree is as exact as torch, and return what it and float64 give."""
    exact = attend(reference.block_attention, case, tree, chosen, torch.float64)
    twin, out = (attend(place.block_attention, case, tree, chosen, case[0].dtype) for place in (reference, kernels))
    assert_as_exact_as_torch(out, twin, exact)
    return out, exact


@pytest.fixture
def gpu(emulation):
    return Emulated(emulation)


@pytest.mark.parametrize("mode", ["causal", "narrow window", "all"])
@pytest.mark.parametrize("rows", [2, 17, 70])
def test_the_twin_gives_a_row_what_its_chain_gives(rows, mode):
    case, tree = draw((4, 2, 16, 12), [0, 33, 60], rows, torch.float64), random_shapes(rows, 3)
    chosen = options(mode, 4)
    out = reference.block_attention(*case, **chosen, ancestors=tree.ancestors)
    for b in range(3):
        for path in longest_paths(tree, b):
            want = reference.block_attention(*as_chain(case, b, path), **chosen)[0]
            torch.testing.assert_close(out[b, path], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [17, 70])
def test_a_chain_of_ancestors_is_the_causal_mode(rows, dtype, implementation):
    case = draw((4, 2, 64, 40), [0, 33, 250], rows, dtype, capacity=330)
    tree, chosen = tree_of([list(range(-1, rows - 1))] * 3), options("window", 4)
    out = implementation.block_attention(*case, **chosen, ancestors=tree.ancestors)
    assert torch.equal(out, implementation.block_attention(*case, **chosen))


# ---- bits of chains on CPU: around tiles of 64 positions and chunks of 256

LENGTHS = [0, 1, 47, 50, 63, 64, 65, 130, 191, 240, 255, 256, 257, 500, 511]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "mode", "heads"), [
    *((17, mode, (6, 2, 64, 48)) for mode in MODES),
    *((rows, mode, (6, 2, 64, 48)) for rows, mode in ((2, "all"), (64, "narrow window"), (128, "causal"))),
    *((33, "all", heads) for heads in ((3, 1, 20, 12), (2, 2, 7, 3), (80, 1, 8, 8), (1, 1, 128, 128))),
])  # fmt: skip
def test_a_row_has_the_bits_of_its_chain(rows, mode, heads, dtype):
    lengths = LENGTHS if rows == 17 else [3, 62, 300]
    case, tree = draw(heads, lengths, rows, dtype, seed=rows), random_shapes(rows, len(lengths), seed=rows)
    assert_rows_are_their_chains(ops.block_attention, case, tree, options(mode, heads[0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads_or_batch(dtype, set_threads):
    """With work enough for threads to share chunks."""
    case, tree = draw((6, 1, 64, 64), [1020, 700, 0], 40, dtype), random_shapes(40, 3)
    want = ops.block_attention(*case, **options("all", 6), ancestors=tree.ancestors)
    for threads in (1, 2, 3, 7):
        set_threads(threads)
        assert torch.equal(ops.block_attention(*case, **options("all", 6), ancestors=tree.ancestors), want)
        for b in range(3):
            alone = [x[b : b + 1] for x in (*case, tree.ancestors)]
            out = ops.block_attention(*alone[:4], **options("all", 6), ancestors=alone[4])
            assert torch.equal(out, want[b : b + 1])


# ---- bits of chains on GPUs: around tiles of 16, 32 and 128 positions and a chunk of 256. One to eight query heads per
# kv head, every tile of the tensor cores, other dims, heads that fill several warps.

GPU_LENGTHS = [0, 5, 27, 31, 32, 112, 127, 241, 255]
GPU_CASES = [
    *((torch.bfloat16, heads, "causal") for heads in [(2, 2, 64, 64), (4, 1, 128, 96), (5, 1, 40, 64), (2, 1, 8, 256)]),
    *((torch.float16, heads, "causal") for heads in [(4, 1, 64, 40), (3, 1, 136, 256)]),
    *((torch.float32, heads, "causal") for heads in [(4, 1, 20, 12), (8, 1, 7, 3)]),
    (torch.bfloat16, (8, 1, 64, 64), "window"), (torch.bfloat16, (4, 1, 64, 64), "softcap"),
    (torch.bfloat16, (4, 1, 64, 64), "narrow window"), (torch.bfloat16, (24, 1, 64, 64), "all"),
    (torch.float32, (1, 1, 16, 16), "narrow window"), (torch.float32, (4, 1, 64, 64), "all"),
    (torch.float16, (4, 1, 128, 128), "all"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "heads", "mode"), GPU_CASES)
def test_a_row_has_the_bits_of_its_chain_on_a_gpu(dtype, heads, mode, gpu):
    lengths, rows = (GPU_LENGTHS, 17) if mode == "causal" else ([5, 27], 7) if heads[0] == 24 else ([3, 62, 250], 16)
    case, tree = draw(heads, lengths, rows, dtype), random_shapes(rows, len(lengths))
    assert_rows_are_their_chains(gpu.block_attention, case, tree, options(mode, heads[0]))


@pytest.mark.parametrize(
    ("rows", "dtype"), [(32, torch.float32), (64, torch.bfloat16), (65, torch.float32), (128, torch.bfloat16)]
)
def test_a_row_of_a_large_tree_has_the_bits_of_its_chain(rows, dtype, gpu):
    """The longest path, one from the middle and the last: the chains of all rows would take minutes here."""
    case, tree = draw((4, 1, 16, 16), [20, 249], rows, dtype), random_shapes(rows, 2, seed=rows)
    paths = []
    for b in range(2):
        for row in (int(tree.depth[b].argmax()), rows // 2, rows - 1):
            bits = sum((int(word) & (1 << 64) - 1) << 64 * i for i, word in enumerate(tree.ancestors[b, row]))
            paths.append((b, [i for i in range(rows) if bits >> i & 1]))
    assert_rows_are_their_chains(gpu.block_attention, case, tree, options("all", 4), paths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trees_of_extreme_shape_have_the_bits_of_chains(dtype, gpu):
    """All rows next to the root, a comb, and a chain of more positions than two tiles hold."""
    star, comb, chain = [-1, *[0] * 69], [-1, *((i - 1) // 2 * 2 for i in range(1, 70))], list(range(-1, 69))
    case, tree = draw((4, 1, 16, 16), [15, 31, 30], 70, dtype), tree_of([star, comb, chain])
    paths = [(0, [0, 1]), (0, [0, 69]), (1, [*range(0, 70, 2), 69]), (2, list(range(70)))]
    assert_rows_are_their_chains(gpu.block_attention, case, tree, options("causal", 4), paths)


@pytest.mark.parametrize("dtype", CUDA_DTYPES[1:])
def test_the_bits_of_a_tree_do_not_depend_on_the_number_of_splits(dtype, gpu, emulation, monkeypatch):
    case, tree, chosen = draw((4, 1, 64, 64), [250, 1020, 0], 24, dtype), random_shapes(24, 3), options("sinks", 4)
    want = gpu.block_attention(*case, **chosen, ancestors=tree.ancestors)
    emulation.seed(3)  # blocks arrive in another order
    assert torch.equal(gpu.block_attention(*case, **chosen, ancestors=tree.ancestors), want)
    workspace = gpu.workspace
    monkeypatch.setattr(gpu, "workspace", lambda *shapes: (1, *workspace(*shapes)[1:]))
    assert torch.equal(gpu.block_attention(*case, **chosen, ancestors=tree.ancestors), want)


# ---- on both


@pytest.mark.parametrize("mode", MODES)
def test_a_tree_is_as_exact_as_torch(mode, dtype, kernels):
    heads, lengths, rows = (
        ((4, 2, 64, 40), [0, 250], 33) if isinstance(kernels, Emulated) else ((6, 2, 64, 48), [0, 61, 300], 40)
    )
    assert_exact(kernels, draw(heads, lengths, rows, dtype), random_shapes(rows, len(lengths)), options(mode, heads[0]))


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_a_row_does_not_notice_what_it_does_not_see(bad, dtype, kernels):
    """A bad row reaches the rows that continue it and no other; what a window excludes reaches none."""
    q, k_cache, v_cache, lengths = draw((4, 1, 64, 48), [50, 250], 24, dtype)
    tree, chosen = random_shapes(24, 2), {**options("all", 4), "window": 20}
    clean = kernels.block_attention(q, k_cache, v_cache, lengths, **chosen, ancestors=tree.ancestors)
    for row, spoilt_k in ((1, True), (1, False), (7, False), (23, True)):
        spoilt = [k_cache.clone(), v_cache.clone()]
        for b, length in enumerate(lengths.tolist()):
            spoilt[0 if spoilt_k else 1][b, :, length + row] = bad
            spoilt[0][b, :, : length - 19] = spoilt[1][b, :, : length - 19] = bad
        out = kernels.block_attention(q, *spoilt, lengths, **chosen, ancestors=tree.ancestors)
        sees = (tree.ancestors[..., 0] >> row & 1).bool()
        assert torch.equal(out[~sees], clean[~sees])
        assert spoilt_k or not out[sees].isfinite().all(-1).any()


@pytest.mark.parametrize("mode", ["causal", "narrow window"])
def test_rows_outside_the_cache_are_no_keys(mode, dtype, kernels):
    """Lengths that do not fit, as of rows that are done: nothing outside of the cache is read, and the twin agrees."""
    lengths = [-9, -2, -40, -100, 20, 33, 39, 1000]
    q, k_cache, v_cache, _ = draw((2, 1, 64, 48), [0] * len(lengths), 37, dtype)
    case = (q, *(torch.where(x.isnan(), 0.5, x) for x in (k_cache, v_cache)), torch.tensor(lengths))
    out, exact = assert_exact(kernels, case, random_shapes(37, len(lengths)), options(mode, 2))
    assert torch.equal(out.eq(0).all(-1), exact.eq(0).all(-1))


def test_any_bits_are_safe(dtype, kernels):
    """Bits of later rows, of rows that do not exist, or none at all."""
    q, k_cache, v_cache, lengths = draw((2, 1, 64, 48), [0, 60], 70, dtype, capacity=60 + 256)
    full = torch.full((2, 70, 2), -1)
    assert kernels.block_attention(q, k_cache, v_cache, lengths, 0.1, True, ancestors=full).isfinite().all()
    none = kernels.block_attention(q, k_cache, v_cache, lengths, 0.1, True, ancestors=torch.zeros_like(full))
    assert none[0].eq(0).all()
    assert none[1].ne(0).any(-1).all()
    assert none[1].isfinite().all()
