"""``block_attention`` with ancestors: a row of a tree is that row of a chain which consists of its ancestors."""

import pytest
import torch
from draft_trees import path_of, random_tree, tree_of
from op_checks import Emulated, assert_as_exact_as_torch
from test_block_attention import NAN, draw

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op


def as_chain(q, k_cache, v_cache, lengths, tree, b, row):
    """The queries and caches of the chain that leads to one row of one sequence."""
    path, length = path_of(tree, b, row), int(lengths[b])
    caches = [cache[b : b + 1].clone() for cache in (k_cache, v_cache)]
    for cache in caches:
        on_path = cache[:, :, [length + j for j in path]]
        cache[:, :, length:] = NAN
        cache[:, :, length : length + len(path)] = on_path
    return q[b : b + 1, path], *caches, lengths[b : b + 1]


@pytest.mark.parametrize("mode", [{}, {"window": 9}, {"softcap": 3.0}, {"window": 3, "softcap": 9.0, "sinks": True}])
@pytest.mark.parametrize("rows", [2, 17, 64, 70])
def test_the_twin_gives_a_row_what_its_chain_gives(rows, mode):
    q, k_cache, v_cache, lengths = draw((4, 2, 16, 12), [0, 33, -3, 60], rows, torch.float64)
    k_cache, v_cache = (torch.where(x.isnan(), 0.5, x) for x in (k_cache, v_cache))
    mode = {**mode, "sinks": torch.linspace(-2, 4, 4)} if "sinks" in mode else mode
    tree = random_tree(rows, len(lengths))
    out = reference.block_attention(q, k_cache, v_cache, lengths, 0.25, True, **mode, ancestors=tree.ancestors)
    for b, length in enumerate(lengths.tolist()):
        for row in range(rows):
            if length < 0:
                continue
            chain = as_chain(q, k_cache, v_cache, lengths, tree, b, row)
            want = reference.block_attention(*chain, 0.25, True, **mode)[0, -1]
            torch.testing.assert_close(out[b, row], want, rtol=1e-12, atol=1e-12)


def test_a_chain_of_ancestors_is_the_causal_mode():
    q, k_cache, v_cache, lengths = draw((4, 2, 16, 12), [0, 33, -3], 70, torch.float64, capacity=80)
    chain = tree_of([list(range(-1, 69))] * 3)
    want = reference.block_attention(q, k_cache, v_cache, lengths, 0.25, True, 20)
    out = reference.block_attention(q, k_cache, v_cache, lengths, 0.25, True, 20, ancestors=chain.ancestors)
    assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [2, 17, 64, 70])
def test_ancestors_on_an_emulated_gpu(rows, dtype, emulation):
    kernels = Emulated(emulation)
    q, k_cache, v_cache, lengths = draw((4, 2, 64, 40), [0, 33, 250], rows, dtype)
    tree = random_tree(rows, 3)
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


def test_bad_ancestors_are_named():
    q, k_cache, v_cache, lengths = draw((4, 2, 16, 16), [0, 33], 5, torch.float32)

    def attend(ancestors, causal=True):
        return ops.block_attention(q, k_cache, v_cache, lengths, 0.25, causal, ancestors=ancestors)

    with pytest.raises(ValueError, match=r"ancestors must be .*ceil\(rows / 64\)\] = \[2, 5, 1\], got \[2, 5, 2\]"):
        attend(torch.zeros(2, 5, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"ancestors must be \[batch, rows, .*\], got 2 dimensions"):
        attend(torch.zeros(5, 1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"ancestors must be torch.int64, got torch.int32"):
        attend(torch.zeros(2, 5, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"causal must be True with ancestors, got False"):
        attend(torch.zeros(2, 5, 1, dtype=torch.int64), causal=False)
