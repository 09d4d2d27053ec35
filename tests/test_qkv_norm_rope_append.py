import functools

import pytest
import torch
from op_checks import Emulated, assert_as_exact_as_torch, same

from dflash import ops
from dflash.ops import reference, switches
from dflash.ops.registry import CpuLauncher

pytestmark = pytest.mark.op

EPS, NAN = 1e-6, float("nan")
CAPACITY = 50
SHAPES = [(4, 2, 16, 16), (3, 1, 64, 64), (8, 8, 20, 10), (5, 1, 128, 32), (2, 2, 6, 6)]  # heads, kv, head_dim, rotary


def draw(shape, batch, rows, q_rows, dtype, norm=True, tree=False):
    """The op's arguments; some context rows are off, and what no row may read or write is NaN."""
    num_heads, num_kv_heads, head_dim, rotary = shape
    generator = torch.Generator().manual_seed(100 + rows)
    qkv = torch.randn(batch, rows, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator) * 3
    context_rows = rows - q_rows
    live = torch.randint(0, context_rows + 1, (batch,), generator=generator)
    lengths = live + torch.randint(0, CAPACITY - rows, (batch,), generator=generator)
    depth = torch.randint(0, q_rows, (batch, q_rows), generator=generator) if tree and q_rows else None
    angles = torch.rand(CAPACITY, rotary // 2, generator=generator) * 7
    cos, sin = angles.cos(), angles.sin()
    cos[lengths.max() + q_rows :] = sin[lengths.max() + q_rows :] = NAN
    weights = [torch.randn(head_dim, generator=generator).add(1).to(dtype) if norm else None for _ in "qk"]
    q_out = torch.full((batch, q_rows, num_heads, head_dim), NAN, dtype=dtype)
    caches = [torch.full((batch, num_kv_heads, CAPACITY, head_dim), NAN, dtype=dtype) for _ in "kv"]
    counts = [lengths, live if context_rows else None, depth]
    return [qkv.to(dtype), *counts, cos, sin, *weights, EPS, q_out, *caches]


def double(args):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]


def run(op, args):
    args = [*args[:9], *(x.clone() for x in args[9:])]
    op(*args)
    return args[9:]


def places(lengths, num_context, depth, rows, q_rows, b, row):
    """The slot and the position of a row; None if it is off."""
    i = row - (rows - q_rows)
    if i >= 0:
        return int(lengths[b]) + i, int(lengths[b]) + (i if depth is None else int(depth[b, i]))
    return (int(lengths[b] - num_context[b]) + row,) * 2 if row < num_context[b] else None


def by_hand(qkv, lengths, num_context, depth, cos, sin, q_norm_weight, k_norm_weight, eps, q_out, k_cache, v_cache):
    """One row and head at a time, RoPE by complex numbers."""
    batch, rows, _ = qkv.shape
    _, q_rows, num_heads, head_dim = q_out.shape
    num_kv_heads, half = k_cache.shape[1], cos.shape[-1]

    def turn(x, weight, position):
        if weight is not None:
            x = x / (x.square().mean() + eps).sqrt() * weight
        turned = torch.complex(x[:half], x[half : 2 * half]) * torch.complex(cos[position], sin[position])
        return torch.cat([turned.real, turned.imag, x[2 * half :]])

    for b in range(batch):
        for row in range(rows):
            heads, place = qkv[b, row].view(-1, head_dim), places(lengths, num_context, depth, rows, q_rows, b, row)
            if place is None:
                continue
            slot, position = place
            if row >= rows - q_rows:
                for h in range(num_heads):
                    q_out[b, row - rows + q_rows, h] = turn(heads[h], q_norm_weight, position)
            for h in range(num_kv_heads):
                k_cache[b, h, slot] = turn(heads[num_heads + h], k_norm_weight, position)
                v_cache[b, h, slot] = heads[num_heads + num_kv_heads + h]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, norm, dtype, kernels):
    for batch, rows, q_rows in ((9, 1, 1), (2, 16, 16), (3, 32, 16), (2, 17, 0), (2, 17, 1)):
        args = draw(shape, batch, rows, q_rows, dtype, norm, tree=rows == q_rows)
        exact = run(by_hand, double(args))
        twin, out = run(reference.qkv_norm_rope_append_, args), run(kernels.qkv_norm_rope_append_, args)
        for o, t, e in zip(out, twin, exact, strict=True):
            assert torch.equal(o.isnan(), e.isnan())  # nothing but the rows' own slots was written
            assert torch.equal(t.isnan(), e.isnan())
            assert_as_exact_as_torch(o.nan_to_num(), t.nan_to_num(), e.nan_to_num())
        assert torch.equal(out[2].nan_to_num(), exact[2].to(dtype).nan_to_num())


@pytest.mark.parametrize("shape", SHAPES)
def test_gates_stay_where_they_are_and_zero_centered_weights_lack_one(shape, dtype, kernels):
    args = draw(shape, 2, 17, 5, dtype)
    heads, _, head_dim, _ = shape
    queries, rest = args[0].split([heads * head_dim, args[0].shape[-1] - heads * head_dim], -1)
    queries = queries.unflatten(-1, (heads, head_dim))
    gated = torch.cat([torch.stack([queries, torch.full_like(queries, NAN)], -2).flatten(2), rest], -1)
    wide = double(args)
    exact = run(by_hand, [*wide[:6], wide[6] + 1, wide[7] + 1, *wide[8:]])

    def with_options(op):
        return run(lambda *given: op(*given, True, True), [gated, *args[1:]])

    twin, out = (with_options(place.qkv_norm_rope_append_) for place in (reference, kernels))
    for o, t, e in zip(out, twin, exact, strict=True):
        assert torch.equal(o.isnan(), e.isnan())
        assert_as_exact_as_torch(o.nan_to_num(), t.nan_to_num(), e.nan_to_num())


def test_the_twin_computes_in_float64():
    args = double(draw(SHAPES[2], 2, 17, 5, torch.float32))
    for t, e in zip(run(reference.qkv_norm_rope_append_, args), run(by_hand, args), strict=True):
        torch.testing.assert_close(t, e, rtol=1e-13, atol=1e-13, equal_nan=True)


def test_positions_outside_the_table_take_the_nearest_angles(dtype, kernels):
    args = draw(SHAPES[0], 2, 4, 4, dtype)
    args[1], args[4:6] = torch.tensor([-2, 8]), [x[:10].nan_to_num(0.5) for x in args[4:6]]
    q_out, *_ = run(kernels.qkv_norm_rope_append_, args)
    for b, position, nearest in ((0, -2, 0), (0, -1, 0), (1, 10, 9), (1, 11, 9)):
        row = position - int(args[1][b])
        alone = [args[0][b : b + 1, row : row + 1], torch.tensor([nearest]), *args[2:9], args[9][:1, :1]]
        q_alone, *_ = run(kernels.qkv_norm_rope_append_, [*alone, *(cache[:1] for cache in args[10:])])
        assert torch.equal(q_alone[0, 0], q_out[b, row])


@pytest.mark.parametrize("tree", [False, True])
def test_angles_count_from_the_origin(tree, dtype, kernels):
    """Slots do not."""
    args = draw(SHAPES[0], 3, 20, 16, dtype, tree=tree)
    args[4:6], origin = [x.nan_to_num(0.5) for x in args[4:6]], [0, 17, CAPACITY + 1]
    results = run(functools.partial(kernels.qkv_norm_rope_append_, origin=torch.tensor(origin)), args)
    for b, first in enumerate(origin):
        tables = [torch.cat([x[first:], x[-1:]]) for x in args[4:6]]
        each = [None if x is None else x[b : b + 1] for x in args[:4]]
        alone = run(kernels.qkv_norm_rope_append_, [*each, *tables, *args[6:9], *(x[b : b + 1] for x in args[9:])])
        assert same(alone, [x[b : b + 1] for x in results])


@pytest.mark.parametrize("tree", [False, True])
def test_a_row_does_not_depend_on_its_neighbours(tree, dtype, kernels):
    args = draw(SHAPES[1], 2, 16, 16, dtype, tree=tree)
    q_out, k_cache, _ = run(kernels.qkv_norm_rope_append_, args)
    _, lengths, _, depth, *_ = args
    slot, turn = int(lengths[1]) + 5, 5 if depth is None else int(depth[1, 5])
    alone = [args[0][1:2, 5:6], lengths[1:2] + turn, None, None, *args[4:9], *(x[1:2] for x in args[9:])]
    alone[9] = alone[9][:, :1]
    q_alone, k_alone, _ = run(kernels.qkv_norm_rope_append_, alone)
    assert torch.equal(q_alone[0, 0], q_out[1, 5])
    assert torch.equal(k_alone[0, :, slot - 5 + turn], k_cache[1, :, slot])


def run_behind(kernels, args, written, prefetch):
    """Run the op behind a kernel that writes argument ``written``; both may overlap."""
    args = [x.clone() if isinstance(x, torch.Tensor) else x for x in args]
    gate_up = args[written].flatten().repeat(2)[None]
    args[written] = kernels.silu_mul(gate_up).view_as(args[written])
    kernels.qkv_norm_rope_append_(*args, prefetch=prefetch)
    return args[9:], (gate_up, args)  # alive until they have run


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("written", "prefetch"), [(0, True), (6, False), (4, False)])
def test_emulated_rows_read_early_what_the_kernel_ahead_leaves_alone(written, prefetch, seed, emulation):
    kernels, args = Emulated(emulation), draw(SHAPES[0], 2, 20, 16, torch.float32)
    args[4:6] = [x.nan_to_num(0.5) for x in args[4:6]]
    emulation.seed(seed)
    want, _ = run_behind(kernels, args, written, False)
    with kernels.overlapping():
        out, _alive = run_behind(kernels, args, written, prefetch)
    assert same(out, want)


@pytest.mark.parametrize("written", [4, 6])
def test_emulated_rows_are_caught_when_they_read_early_what_is_written(written, emulation):
    if not emulation.watched():
        pytest.skip("accesses are not watched in this build")
    kernels = Emulated(emulation)
    with pytest.raises(RuntimeError, match="before its wait"), kernels.overlapping():
        _, _alive = run_behind(kernels, draw(SHAPES[0], 2, 20, 16, torch.float32), written, True)


@pytest.mark.parametrize("switch", [True, False])
@pytest.mark.parametrize("copied", [None, 1, 2, 3, 4, 5, 6, 7, 15])
def test_nothing_is_read_early_of_what_is_copied_first(copied, switch, monkeypatch):
    """The copy is what the kernel ahead writes."""
    passed = []

    class Recorder(CpuLauncher):
        def __call__(self, kernel, scope):
            passed.append(scope.prefetch)

    monkeypatch.setattr(switches, "PREFETCH", switch)
    arguments = draw(SHAPES[0], 2, 20, 16, torch.float32, tree=True)
    arguments = [*arguments[:12], False, False, True, torch.tensor([0, 3])]
    if copied is not None:
        arguments[copied] = torch.stack([arguments[copied]] * 2, -1)[..., 0]
    ops.qkv_norm_rope_append_.op.run(Recorder(), *arguments)
    assert passed == [copied is None and switch]
