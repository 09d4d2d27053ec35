import pytest
import torch
from op_checks import assert_as_exact_as_torch

from dflash.ops import reference

pytestmark = pytest.mark.op

EPS, NAN = 1e-6, float("nan")
SHAPES = [(2, 16, 16), (1, 64, 64), (3, 20, 10), (1, 128, 32)]  # kv heads, head_dim, rotary


def draw(shape, num_layers, batch, rows, dtype, norm=True):
    """The op's arguments for rows at positions 3 .., each sequence with its own count of rows that are on."""
    num_kv_heads, head_dim, rotary = shape
    generator = torch.Generator().manual_seed(rows)
    kv = torch.randn(num_layers, batch, rows, 2 * num_kv_heads * head_dim, generator=generator) * 3
    live = torch.arange(rows) < rows - 2 * torch.arange(batch)[:, None]
    positions = torch.where(live, torch.arange(rows) + 3, -1)
    angles = torch.rand(batch, rows, rotary // 2, generator=generator) * 7
    cos, sin = (torch.where(live[..., None], t, NAN) for t in (angles.cos(), angles.sin()))
    weight = torch.randn(num_layers, head_dim, generator=generator).add(1).to(dtype) if norm else None
    caches = [torch.full((batch, num_kv_heads, rows + 4, head_dim), NAN, dtype=dtype) for _ in range(2 * num_layers)]
    return [kv.to(dtype), positions, cos, sin, weight, EPS, caches[:num_layers], caches[num_layers:]]


def run(op, args):
    args = [*args[:6], *([x.clone() for x in caches] for caches in args[6:])]
    op(*args)
    return args[6:]


def double(args):
    args = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    return [*args[:6], *([x.double() for x in caches] for caches in args[6:])]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, norm, dtype, kernels):
    for num_layers, batch, rows in ((1, 1, 1), (3, 2, 15), (2, 3, 16), (5, 2, 113)):
        args = draw(shape, num_layers, batch, rows, dtype, norm)
        exact, twin, out = (
            run(op, a)
            for op, a in (
                (reference.append_context_kv_, double(args)),
                (reference.append_context_kv_, args),
                (kernels.append_context_kv_, args),
            )
        )
        for o, t, e in zip(*(k + v for k, v in (out, twin, exact)), strict=True):
            for b in range(batch):
                on = max(0, rows - 2 * b)
                assert not o[b, :, 3 : 3 + on].isnan().any()
                assert o[b, :, :3].isnan().all()
                assert o[b, :, 3 + on :].isnan().all()
            assert torch.equal(t.isnan(), o.isnan())
            assert_as_exact_as_torch(o.nan_to_num(), t.nan_to_num(), e.nan_to_num())


@pytest.mark.parametrize("norm", [True, False])
def test_each_layer_has_the_bits_of_the_step_op(norm, dtype, kernels):
    """A context row must not depend on whether prefill or a step injected it."""
    args = draw((2, 40, 20), 3, 2, 17, dtype, norm)
    live = torch.tensor([17, 15])
    tables = [torch.cat([angles.new_full((3, 10), NAN), angles[0]]) for angles in args[2:4]]
    args[2:4] = [angles[:1].expand(2, -1, -1) for angles in args[2:4]]
    k_caches, v_caches = run(kernels.append_context_kv_, args)
    for layer in range(3):
        q_out = torch.empty(2, 0, 0, 40, dtype=dtype)
        k_cache, v_cache = args[6][layer].clone(), args[7][layer].clone()
        weight = args[4][layer] if norm else None
        places = (live + 3, live, None, *tables)
        kernels.qkv_norm_rope_append_(args[0][layer], *places, None, weight, EPS, q_out, k_cache, v_cache)
        assert torch.equal(k_cache.nan_to_num(7), k_caches[layer].nan_to_num(7))
        assert torch.equal(v_cache.nan_to_num(7), v_caches[layer].nan_to_num(7))
