import pytest
import torch
from op_checks import DTYPES, assert_as_exact_as_torch

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op

EPS, NAN = 1e-6, float("nan")
CAPACITY = 50
SHAPES = [(4, 2, 16, 16), (3, 1, 64, 64), (8, 8, 20, 10), (5, 1, 128, 32), (2, 2, 6, 6)]  # heads, kv, head_dim, rotary


def draw(shape, batch, rows, q_rows, dtype, norm=True):
    """The op's arguments; some rows are off, and their cos and sin are NaN, as the caches are."""
    num_heads, num_kv_heads, head_dim, rotary = shape
    generator = torch.Generator().manual_seed(rows)
    qkv = torch.randn(batch, rows, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator) * 3
    positions = torch.stack([torch.randperm(CAPACITY, generator=generator)[:rows] for _ in range(batch)])
    angles = torch.rand(batch, rows, rotary // 2, generator=generator) * 7
    cos, sin = angles.cos(), angles.sin()
    if rows > q_rows:
        positions[0, 0], positions[-1, rows - q_rows - 1] = -1, CAPACITY
        cos[0, 0] = sin[-1, rows - q_rows - 1] = NAN
    weights = [torch.randn(head_dim, generator=generator).add(1).to(dtype) if norm else None for _ in "qk"]
    q_out = torch.full((batch, q_rows, num_heads, head_dim), NAN, dtype=dtype)
    caches = [torch.full((batch, num_kv_heads, CAPACITY, head_dim), NAN, dtype=dtype) for _ in "kv"]
    return [qkv.to(dtype), positions, cos, sin, *weights, EPS, q_out, *caches]


def double(args):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]


def run(op, args):
    args = [*args[:7], *(x.clone() for x in args[7:])]
    op(*args)
    return args[7:]


def by_hand(qkv, positions, cos, sin, q_norm_weight, k_norm_weight, eps, q_out, k_cache, v_cache):
    """One row and head at a time, RoPE by complex numbers."""
    batch, rows, _ = qkv.shape
    _, q_rows, num_heads, head_dim = q_out.shape
    num_kv_heads, half = k_cache.shape[1], cos.shape[-1]

    def turn(x, weight, b, row):
        if weight is not None:
            x = x / (x.square().mean() + eps).sqrt() * weight
        turned = torch.complex(x[:half], x[half : 2 * half]) * torch.complex(cos[b, row], sin[b, row])
        return torch.cat([turned.real, turned.imag, x[2 * half :]])

    for b in range(batch):
        for row in range(rows):
            heads = qkv[b, row].view(-1, head_dim)
            if row >= rows - q_rows:
                for h in range(num_heads):
                    q_out[b, row - rows + q_rows, h] = turn(heads[h], q_norm_weight, b, row)
            position = int(positions[b, row])
            if 0 <= position < k_cache.shape[2]:
                for h in range(num_kv_heads):
                    k_cache[b, h, position] = turn(heads[num_heads + h], k_norm_weight, b, row)
                    v_cache[b, h, position] = heads[num_heads + num_kv_heads + h]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, norm, dtype, kernels):
    for batch, rows, q_rows in ((9, 1, 1), (2, 16, 16), (3, 32, 16), (2, 17, 0), (2, 17, 1)):
        args = draw(shape, batch, rows, q_rows, dtype, norm)
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
    exact = run(by_hand, [*wide[:4], wide[4] + 1, wide[5] + 1, *wide[6:]])

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


def test_all_rows_off_append_nothing(implementation):
    args = draw(SHAPES[0], 3, 16, 16, torch.float32)
    args[1][0], args[1][1] = -1, torch.arange(CAPACITY, CAPACITY + 16)
    before = [args[8].clone(), args[9].clone()]
    _, k_cache, v_cache = run(implementation.qkv_norm_rope_append_, args)
    for cache, old in zip((k_cache, v_cache), before, strict=True):
        assert torch.equal(cache[:2].nan_to_num(7), old[:2].nan_to_num(7))
        assert not cache[2, :, args[1][2]].isnan().any()


def test_a_row_does_not_depend_on_its_neighbours(dtype, kernels):
    args = draw(SHAPES[1], 2, 16, 16, dtype)
    q_out, k_cache, _ = run(kernels.qkv_norm_rope_append_, args)
    alone = [x[1:2, 5:6] for x in args[:4]] + args[4:7] + [args[7][1:2, :1], args[8][1:2], args[9][1:2]]
    q_alone, k_alone, _ = run(kernels.qkv_norm_rope_append_, alone)
    assert torch.equal(q_alone[0, 0], q_out[1, 5])
    position = int(args[1][1, 5])
    assert torch.equal(k_alone[0, :, position], k_cache[1, :, position])


def test_strided_inputs(kernels):
    args = draw(SHAPES[0], 2, 16, 16, torch.float32)
    want = run(kernels.qkv_norm_rope_append_, args)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in args[:4]] + args[4:]
    for out, old in zip(run(kernels.qkv_norm_rope_append_, strided), want, strict=True):
        assert torch.equal(out.nan_to_num(7), old.nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype):
    op = torch.ops.dflash.qkv_norm_rope_append_.default
    for norm in (True, False):
        args = draw(SHAPES[2], 2, 5, 3, dtype, norm)
        args[2:4] = [x.nan_to_num(1.0) for x in args[2:4]]
        torch.library.opcheck(op, (*args[:7], *(x.zero_() for x in args[7:])))


def test_bad_input_is_named():
    args = draw(SHAPES[0], 2, 5, 3, torch.float32)

    def call(**other):
        names = [
            "qkv",
            "positions",
            "cos",
            "sin",
            "q_norm_weight",
            "k_norm_weight",
            "eps",
            "q_out",
            "k_cache",
            "v_cache",
        ]
        ops.qkv_norm_rope_append_(*(other.get(name, value) for name, value in zip(names, args, strict=True)))

    qkv, positions, cos, _, weight, _, _, q_out, k_cache, _ = args
    with pytest.raises(ValueError, match=r"qkv must be \[batch, rows, \(4 \+ 2 \* 2\) \* 16\].*got \[2, 5, 127\]"):
        call(qkv=qkv[..., :127])
    with pytest.raises(ValueError, match=r"positions must be \[batch, rows\] = \[2, 5\], got \[2, 4\]"):
        call(positions=positions[:, :4])
    with pytest.raises(TypeError, match=r"positions must be torch.int64, got torch.int32"):
        call(positions=positions.int())
    with pytest.raises(TypeError, match=r"cos must be torch.float32, got torch.bfloat16"):
        call(cos=cos.bfloat16())
    with pytest.raises(ValueError, match=r"sin must be .* = \[2, 5, 8\], got \[2, 5, 7\]"):
        call(sin=cos[..., :7])
    with pytest.raises(ValueError, match=r"cos may have at most head_dim / 2 = 8 columns, got 9"):
        call(cos=torch.zeros(2, 5, 9), sin=torch.zeros(2, 5, 9))
    with pytest.raises(ValueError, match=r"k_norm_weight must be \[head_dim\] = \[16\], got \[15\]"):
        call(k_norm_weight=weight[:15])
    with pytest.raises(ValueError, match=r"q_out may have at most the 5 rows of qkv, got 6"):
        call(q_out=torch.zeros(2, 6, 4, 16))
    with pytest.raises(ValueError, match=r"q_out is written in place and must be contiguous, got strides"):
        call(q_out=q_out.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match=r"k_cache is written in place and must be contiguous, got strides"):
        call(k_cache=k_cache.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match=r"v_cache must be .* = \[2, 2, 50, 16\], got \[2, 2, 49, 16\]"):
        call(v_cache=k_cache[:, :, :49])
    with pytest.raises(TypeError, match=r"q_out must be torch.bfloat16, got torch.float32"):
        call(qkv=qkv.bfloat16())
    with pytest.raises(TypeError, match=r"qkv must be float32 or bfloat16 on CPU, got torch.float16"):
        ops.qkv_norm_rope_append_(
            *(x.half() if isinstance(x, torch.Tensor) and i not in (1, 2, 3) else x for i, x in enumerate(args))
        )
