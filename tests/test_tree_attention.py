"""``block_attention`` with ancestors: a row of a tree is that row of a chain which consists of its ancestors."""

import pytest
import torch
from op_checks import DTYPES, Emulated, assert_as_exact_as_torch
from test_block_attention import NAN, draw
from trees import longest_paths, random_shapes, tree_of

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op


MODES = {
    "causal": {},
    "window": {"window": 37},
    "narrow window": {"window": 3},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "all": {"window": 130, "softcap": 20.0, "sinks": True},
}


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


def assert_rows_are_their_chains(op, case, tree, chosen, out=None):
    """Every row of every tree equals, bit for bit, the row of the chain that leads to it."""
    out = op(*case, **chosen, ancestors=tree.ancestors) if out is None else out
    for b in range(len(case[3])):
        for path in longest_paths(tree, b):
            want = op(*as_chain(case, b, path), **chosen)[0]
            assert torch.equal(out[b, path], want), (b, path)


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


def test_a_chain_of_ancestors_is_the_causal_mode():
    q, k_cache, v_cache, lengths = draw((4, 2, 16, 12), [0, 33, -3], 70, torch.float64, capacity=80)
    chain = tree_of([list(range(-1, 69))] * 3)
    want = reference.block_attention(q, k_cache, v_cache, lengths, 0.25, True, 20)
    out = reference.block_attention(q, k_cache, v_cache, lengths, 0.25, True, 20, ancestors=chain.ancestors)
    assert torch.equal(out, want)


LENGTHS = [0, 1, 47, 50, 63, 64, 65, 130, 191, 240, 255, 256, 257, 500, 511]  # around tiles of 64 and chunks of 256


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [2, 17, 64, 128])
def test_a_row_has_the_bits_of_its_chain(rows, mode, dtype):
    lengths = LENGTHS if rows == 17 else [0, 50, 200]
    case, tree = draw((6, 2, 64, 48), lengths, rows, dtype, seed=rows), random_shapes(rows, len(lengths), seed=rows)
    assert_rows_are_their_chains(ops.block_attention, case, tree, options(mode, 6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads_or_batch(dtype):
    """With work enough for threads to share chunks."""
    case, tree = draw((6, 1, 64, 64), [1020, 700, 0], 40, dtype), random_shapes(40, 3)
    want = ops.block_attention(*case, **options("all", 6), ancestors=tree.ancestors)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(ops.block_attention(*case, **options("all", 6), ancestors=tree.ancestors), want)
            for b in range(3):
                alone = [x[b : b + 1] for x in (*case, tree.ancestors)]
                out = ops.block_attention(*alone[:4], **options("all", 6), ancestors=alone[4])
                assert torch.equal(out, want[b : b + 1])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(3, 1, 20, 12), (2, 2, 7, 3), (80, 1, 8, 8), (1, 1, 128, 128)])
def test_bits_with_any_heads(heads, dtype):
    case, tree = draw(heads, [3, 62, 300], 33, dtype), random_shapes(33, 3)
    assert_rows_are_their_chains(ops.block_attention, case, tree, options("all", heads[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_a_tree_is_as_exact_as_torch(mode, dtype):
    case, tree, chosen = draw((6, 2, 64, 48), [0, 61, 300], 40, dtype), random_shapes(40, 3), options(mode, 6)
    twin, out = (
        op(*case, **chosen, ancestors=tree.ancestors) for op in (reference.block_attention, ops.block_attention)
    )
    wide = [x.double() for x in case[:3]]
    exact = reference.block_attention(*wide, case[3], **chosen, ancestors=tree.ancestors)
    assert_as_exact_as_torch(out, twin, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [NAN, float("inf"), -float("inf")])
def test_a_row_does_not_notice_what_it_does_not_see(bad, dtype):
    """Keys or values of a row of NaN reach the rows that continue it, and no other."""
    q, k_cache, v_cache, lengths = draw((6, 2, 64, 48), [50, 0, 250], 40, dtype)
    tree, chosen = random_shapes(40, 3), options("all", 6)
    clean = ops.block_attention(q, k_cache, v_cache, lengths, **chosen, ancestors=tree.ancestors)
    for row in (1, 7, 20):
        sees = (tree.ancestors[..., 0] >> row & 1).bool()
        for at, name in ((0, "k"), (1, "v")):
            spoilt = [k_cache.clone(), v_cache.clone()]
            for b, length in enumerate(lengths.tolist()):
                spoilt[at][b, :, length + row] = bad
            out = ops.block_attention(q, *spoilt, lengths, **chosen, ancestors=tree.ancestors)
            assert torch.equal(out[~sees], clean[~sees]), name
            if name == "v":
                assert out[sees].isnan().any(-1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [[-9, -2, -40, -100], [20, 33, 39, 1000]])
@pytest.mark.parametrize("mode", ["causal", "narrow window"])
def test_rows_outside_the_cache_are_no_keys(mode, lengths, dtype):
    """Lengths that do not fit, as of rows that are done: nothing outside of the cache is read, and the twin agrees."""
    q, k_cache, v_cache, _ = draw((6, 2, 64, 48), [0] * 4, 37, dtype)
    chosen, tree = options(mode, 6), random_shapes(37, 4)
    case = (q, *(torch.where(x.isnan(), 0.5, x) for x in (k_cache, v_cache)), torch.tensor(lengths))
    exact = reference.block_attention(*(x.double() for x in case[:3]), case[3], **chosen, ancestors=tree.ancestors)
    twin = reference.block_attention(*case, **chosen, ancestors=tree.ancestors)
    out = ops.block_attention(*case, **chosen, ancestors=tree.ancestors)
    assert_as_exact_as_torch(out, twin, exact)
    assert torch.equal(out.eq(0).all(-1), exact.eq(0).all(-1))


def test_any_bits_are_safe():
    """Bits of later rows, of rows that do not exist, or none at all."""
    q, k_cache, v_cache, lengths = draw((6, 2, 64, 48), [0, 60, 250], 70, torch.float32)
    full = torch.full((3, 70, 2), -1)
    assert ops.block_attention(q, k_cache, v_cache, lengths, 0.1, True, ancestors=full).shape == (3, 70, 6, 48)
    none = ops.block_attention(q, k_cache, v_cache, lengths, 0.1, True, ancestors=torch.zeros_like(full))
    assert none[0].eq(0).all()
    twin = reference.block_attention(q, k_cache, v_cache, lengths, 0.1, True, ancestors=torch.zeros_like(full))
    torch.testing.assert_close(none, twin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 17, 64, 70])
def test_ancestors_on_an_emulated_gpu(rows, dtype, emulation):
    kernels = Emulated(emulation)
    q, k_cache, v_cache, lengths = draw((4, 2, 64, 40), [0, 33, 250], rows, dtype)
    tree = random_shapes(rows, 3)
    exact, twin, out = (
        op(*(x.to(t) for x in (q, k_cache, v_cache)), lengths, 0.125, True, 0, 9.0, ancestors=tree.ancestors)
        for op, t in (
            (reference.block_attention, torch.float64),
            (reference.block_attention, dtype),
            (kernels.block_attention, dtype),
        )
    )
    assert_as_exact_as_torch(out, twin, exact)
    # a chain is the causal mode, bit for bit
    chain = tree_of([list(range(-1, rows - 1))] * 3).ancestors
    want = kernels.block_attention(q, k_cache, v_cache, lengths, 0.125, True)
    assert torch.equal(kernels.block_attention(q, k_cache, v_cache, lengths, 0.125, True, ancestors=chain), want)
