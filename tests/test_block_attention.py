import math

import pytest
import torch
from op_checks import DTYPES, Emulated, assert_as_exact_as_torch

from dflash import ops
from dflash.ops import reference, switches
from dflash.ops.registry import CpuLauncher

pytestmark = pytest.mark.op

NAN = float("nan")
HEADS = [(3, 1, 64, 64), (4, 2, 192, 128), (5, 1, 20, 12), (2, 2, 7, 3), (80, 1, 8, 8)]  # heads, kv heads, dims of k, v
MODES = {
    "full": {"causal": False}, "causal": {"causal": True}, "window": {"causal": True, "window": 37},
    "window full": {"causal": False, "window": 5}, "softcap": {"causal": True, "softcap": 3.0},
    "sinks": {"causal": True, "sinks": True}, "all": {"causal": False, "window": 130, "softcap": 20.0, "sinks": True},
}  # fmt: skip


def draw(heads, lengths, rows, dtype, capacity=None, seed=0):
    """q, and caches that are NaN behind each sequence's block."""
    num_heads, num_kv_heads, head_dim, v_head_dim = heads
    generator = torch.Generator().manual_seed(seed)
    capacity = capacity or max(lengths) + rows + 3
    q = torch.randn(len(lengths), rows, num_heads, head_dim, generator=generator) * 2
    k_cache = torch.randn(len(lengths), num_kv_heads, capacity, head_dim, generator=generator)
    v_cache = torch.randn(len(lengths), num_kv_heads, capacity, v_head_dim, generator=generator)
    for b, length in enumerate(lengths):
        k_cache[b, :, length + rows :] = NAN
        v_cache[b, :, length + rows :] = NAN
    return q.to(dtype), k_cache.to(dtype), v_cache.to(dtype), torch.tensor(lengths)


def options(mode, num_heads):
    chosen = dict(MODES[mode])
    if "sinks" in chosen:
        chosen["sinks"] = torch.linspace(-2, 4, num_heads)
    return chosen


def by_hand(q, k_cache, v_cache, lengths, scale, causal, window=0, softcap=0.0, sinks=None):
    """One query at a time in float64, from the sentence in the docstring."""
    batch, rows, num_heads, _ = q.shape
    heads = num_heads // k_cache.shape[1]
    out = torch.zeros(batch, rows, num_heads, v_cache.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for row in range(rows):
            position, valid = int(lengths[b]) + row, min(int(lengths[b]) + rows, k_cache.shape[2])
            keys = [
                key
                for key in range(valid)
                if (not causal or key <= position) and (not window or abs(position - key) < window)
            ]
            for head in range(num_heads):
                k, v = k_cache[b, head // heads, keys].double(), v_cache[b, head // heads, keys].double()
                scores = k @ q[b, row, head].double() * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head : head + 1].double()])
                if len(scores):
                    out[b, row, head] = torch.softmax(scores, 0)[: len(keys)] @ v
    return out


@pytest.mark.parametrize("mode", MODES)
def test_the_twin_against_one_query_at_a_time(mode):
    heads = (4, 2, 12, 8)
    q, k_cache, v_cache, lengths = draw(heads, [0, 41], 5, torch.float64)
    chosen = options(mode, heads[0])
    out = reference.block_attention(q, k_cache, v_cache, lengths, 0.3, **chosen)
    torch.testing.assert_close(out, by_hand(q, k_cache, v_cache, lengths, 0.3, **chosen), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("heads", HEADS)
def test_against_float64(heads, mode, dtype, kernels):
    sizes = [[[0, 1, 15], 16], [[16, 113], 17], [[1023, 17], 1], [[600], 130]]
    if isinstance(kernels, Emulated):  # a slow machine
        many = 8 if heads[3] < 8 else 1  # numbers enough to compare errors
        sizes = sizes[1:2] if heads[2] in (8, 20) else [*sizes[:2], [[1023] * many, 1]]
        sizes += [[[200], 130]] if heads[0] == 3 and mode == "causal" else []
    for lengths, rows in sizes:
        q, k_cache, v_cache, lengths = draw(heads, lengths, rows, dtype)
        chosen, scale = options(mode, heads[0]), heads[2] ** -0.5
        exact = reference.block_attention(q.double(), k_cache.double(), v_cache.double(), lengths, scale, **chosen)
        twin = reference.block_attention(q, k_cache, v_cache, lengths, scale, **chosen)
        out = kernels.block_attention(q, k_cache, v_cache, lengths, scale, **chosen)
        assert_as_exact_as_torch(out, twin, exact)


@pytest.mark.parametrize("mode", ["causal", "window", "softcap", "sinks"])
def test_a_row_has_the_same_bits_wherever_it_stands(mode, dtype, kernels):
    emulated = isinstance(kernels, Emulated)
    heads, length, rows = ((2, 1, 64, 48), 1000, 80) if emulated else ((6, 2, 64, 48), 700, 512)
    q, k_cache, v_cache, _ = draw(heads, [length], rows, dtype)
    chosen = options(mode, heads[0])

    def attend(start, rows):
        part = q[:, start : start + rows]
        return kernels.block_attention(part, k_cache, v_cache, torch.tensor([length + start]), 0.125, **chosen)

    whole = attend(0, rows)
    assert whole.isfinite().all()
    parts = [(7, 1), (rows - 1, 1), (7, 16), (20, 17)]
    if not emulated:
        parts += [(0, 1), (0, 16), (255, 113), (496, 16)]
    for start, count in parts:
        assert torch.equal(attend(start, count), whole[:, start : start + count]), (start, count)
    # as row 0 of a block at 7 slots on and as row 7 of a block
    assert torch.equal(attend(7, 16)[:, 0], attend(0, 16)[:, 7])


@pytest.mark.parametrize("dims", [(128, 128), (40, 24), (33, 16), (320, 16)])
@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_queries_have_the_bits_that_they_have_among_many(heads, dims, dtype):
    q, k_cache, v_cache, lengths = draw((heads, 1, *dims), [301], 32, dtype)
    whole = ops.block_attention(q, k_cache, v_cache, lengths, 0.1, True)
    for row in (0, 15, 31):  # one kv head: as many queries as heads
        alone = ops.block_attention(q[:, row : row + 1], k_cache, v_cache, lengths + row, 0.1, True)
        assert torch.equal(alone[:, 0], whole[:, row])


@pytest.mark.parametrize("hidden", [NAN, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_queries_do_not_meet_values_that_are_hidden_from_them(dtype, hidden):
    q, k_cache, v_cache, lengths = draw((1, 1, 64, 64), [50], 4, dtype)
    clean = ops.block_attention(q, k_cache, v_cache, lengths, 0.1, True)
    v_cache[:, :, 52] = hidden
    out = ops.block_attention(q, k_cache, v_cache, lengths, 0.1, True)
    assert torch.equal(out[:, :2], clean[:, :2])
    assert out[:, 2:].isnan().all()


@pytest.mark.parametrize("causal", [True, False])
def test_bits_do_not_depend_on_batch_head_count_or_threads(causal, dtype, kernels, set_threads):
    q, k_cache, v_cache, lengths = draw((6, 2, 64, 64), [1500, 17, 900], 16, dtype)
    whole = kernels.block_attention(q, k_cache, v_cache, lengths, 0.125, causal)
    for count in (1, 2, 3, 7) if kernels is ops else (1,):
        set_threads(count)
        assert torch.equal(kernels.block_attention(q, k_cache, v_cache, lengths, 0.125, causal), whole)
        for b, h in ((0, 1), (1, 0), (2, 1), *(((0, 0), (1, 1), (2, 0)) if kernels is ops else ())):
            caches = [cache[b : b + 1, h : h + 1] for cache in (k_cache, v_cache)]
            queries = q[b : b + 1, :, 3 * h : 3 * h + 3]
            alone = kernels.block_attention(queries, *caches, lengths[b : b + 1], 0.125, causal)
            assert torch.equal(alone, whole[b : b + 1, :, 3 * h : 3 * h + 3])


def test_bits_do_not_depend_on_the_capacity(dtype, kernels):
    q, k_cache, v_cache, lengths = draw((2, 1, 64, 64), [1020, 0, 2050], 16, dtype)
    want = kernels.block_attention(q, k_cache, v_cache, lengths, 0.125, True)
    for capacity in (2100, 4097, 9000):
        wide = [torch.nn.functional.pad(x, (0, 0, 0, capacity - x.shape[2]), value=NAN) for x in (k_cache, v_cache)]
        assert torch.equal(kernels.block_attention(q, *wide, lengths, 0.125, True), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("mode", "heads"), [("causal", (2, 1, 64, 64)), ("all", (3, 1, 128, 96)), ("window", (1, 1, 8, 256))]
)
def test_emulated_bits_do_not_depend_on_the_number_of_splits(mode, heads, dtype, emulation, monkeypatch):
    kernels = Emulated(emulation)
    workspace = kernels.workspace
    for lengths, rows in ([[1023, 0, 255], 16], [[2100], 1], [[9210], 17]):
        case, chosen = draw(heads, lengths, rows, dtype), options(mode, heads[0])
        want = kernels.block_attention(*case, 0.1, **chosen)
        twin = reference.block_attention(*case, 0.1, **chosen)
        exact = reference.block_attention(*(x.double() for x in case[:3]), case[3], 0.1, **chosen)
        assert_as_exact_as_torch(want, twin, exact)
        emulation.seed(3)  # blocks arrive in another order
        assert torch.equal(kernels.block_attention(*case, 0.1, **chosen), want)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "workspace", lambda *shapes: (1, *workspace(*shapes)[1:]))
            assert torch.equal(kernels.block_attention(*case, 0.1, **chosen), want)


def test_emulated_blocks_take_several_chunks_where_there_are_many_tiles(emulation, monkeypatch):
    """128 tiles, of which each has 16 blocks, and one has 19 live chunks."""
    kernels = Emulated(emulation)
    case = draw((1, 1, 8, 8), [130] * 127 + [2400], 1, torch.bfloat16, capacity=2500)
    want = kernels.block_attention(*case, 0.3, True)
    workspace = kernels.workspace
    monkeypatch.setattr(kernels, "workspace", lambda *shapes: (1, *workspace(*shapes)[1:]))
    assert torch.equal(kernels.block_attention(*case, 0.3, True), want)


def test_strided_queries(dtype, kernels):
    q, k_cache, v_cache, lengths = draw((4, 2, 40, 40), [0, 33], 16, dtype)
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    packed = torch.cat([q, q], -1).flatten(2).unflatten(2, (4, 80))[..., :40]
    columns = q.transpose(2, 3).contiguous().transpose(2, 3)
    want = kernels.block_attention(q, k_cache, v_cache, lengths, 0.2, True)
    for view in (transposed, packed, columns):
        assert not view.is_contiguous()
        out = kernels.block_attention(view, k_cache, v_cache, lengths, 0.2, True)
        assert torch.equal(out, want)
        assert out.is_contiguous()


def test_a_slot_that_is_not_seen_may_hold_anything(dtype, implementation):
    """A chunk of ragged prompts: rows past a prompt's end were not appended, and its own rows must not notice."""
    op = implementation.block_attention
    q, k_cache, v_cache, lengths = draw((3, 1, 64, 64), [0, 50], 40, dtype)
    clean = op(q, k_cache, v_cache, lengths, 0.125, True)
    for bad in (NAN, float("inf")):
        k_cache[0, :, 10:] = v_cache[0, :, 10:] = bad
        out = op(q, k_cache, v_cache, lengths, 0.125, True)
        assert torch.equal(out[0, :10], clean[0, :10])
        assert torch.equal(out[1], clean[1])
        assert out[0, 10:].isnan().all()
    k_cache[0], v_cache[0] = 0.0, 1.0  # a value alone is noticed too, by the queries that see it
    v_cache[0, :, 39, 5] = NAN
    out = op(q, k_cache, v_cache, lengths, 0.125, True)
    assert out[0, :39].isfinite().all()
    assert out[0, 39].isnan().any()


def test_a_query_without_keys_gives_zero(dtype, implementation):
    """Rows past the end of the cache, with a window that reaches no slot."""
    op = implementation.block_attention
    q, k_cache, v_cache, lengths = draw((3, 1, 16, 16), [14], 6, dtype, capacity=16)
    out = op(q, k_cache, v_cache, lengths, 0.25, True, window=2)
    assert out[:, 3:].eq(0).all()
    assert out[:, :3].ne(0).all()
    sinks = torch.tensor([0.0, 5.0, -math.inf])
    assert op(q, k_cache, v_cache, lengths, 0.25, True, window=2, sinks=sinks)[:, 3:].eq(0).all()
    q, k_cache, v_cache, lengths = draw((3, 1, 16, 16), [1000], 6, dtype, capacity=300)
    assert op(q, k_cache, v_cache, lengths, 0.25, True, window=2).eq(0).all()


def append_and_attend(kernels, fresh, context_rows, append=None, head_dim=64):
    """Append rows of an earlier pass, then ``context_rows`` and a block, and attend; all may overlap."""
    g, heads, rows = torch.Generator().manual_seed(0), 2, context_rows + 16
    lengths, old = torch.tensor([140, 37]), torch.arange(20, 30).repeat(2, 1)
    k_cache, v_cache = torch.randn(2, 2, 1, 160, head_dim, generator=g).bfloat16()
    key, value = k_cache[:, :, 20:30].clone(), v_cache[:, :, 20:30].clone()
    k_cache[:, :, 20:30] = v_cache[:, :, 20:30] = NAN
    qkv = torch.randn(2, rows, (heads + 2) * head_dim, generator=g).bfloat16()
    query, angles = torch.empty(2, 16, heads, head_dim, dtype=qkv.dtype), torch.rand(2, 160, 4, generator=g)
    live = torch.tensor([context_rows, context_rows])
    kernels.append_kv_(key, value, old, k_cache, v_cache)
    kernels.qkv_norm_rope_append_(qkv, lengths, live, None, *angles, None, None, 1e-6, query, k_cache, v_cache)
    if append is not None:
        kernels.append_kv_(key, value, append, k_cache, v_cache)
    out = kernels.block_attention(query, k_cache, v_cache, lengths, 0.125, True, fresh=fresh)
    return out, (qkv, key, value, old, live, angles, lengths, k_cache, v_cache, query)  # alive until they have run


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("context_rows", "head_dim"), [(0, 64), (40, 64), (40, 136)])
def test_emulated_attention_reads_old_keys_early(context_rows, head_dim, seed, emulation):
    kernels = Emulated(emulation)
    emulation.seed(seed)
    want, _ = append_and_attend(kernels, -1, context_rows, head_dim=head_dim)
    with kernels.overlapping():
        out, _alive = append_and_attend(kernels, context_rows, context_rows, head_dim=head_dim)
    assert torch.equal(out, want)
    assert want.isfinite().all()


TOO_FRESH = {
    "context rows are not old": {"fresh": 0, "context_rows": 40},
    "another kernel is ahead": {"fresh": 0, "context_rows": 0, "append": torch.arange(60, 70).repeat(2, 1)},
}


@pytest.mark.parametrize("fault", TOO_FRESH)
def test_emulated_attention_is_caught_when_it_reads_new_keys_early(fault, emulation):
    if not emulation.watched():
        pytest.skip("accesses are not watched in this build")
    kernels = Emulated(emulation)
    with pytest.raises(RuntimeError, match="before its wait"), kernels.overlapping():
        _, _alive = append_and_attend(kernels, **TOO_FRESH[fault])


def test_emulated_attention_reads_nothing_early_if_that_is_off(emulation, monkeypatch):
    kernels = Emulated(emulation)
    monkeypatch.setattr(switches, "PREFETCH", False)
    want, _ = append_and_attend(kernels, -1, 40)
    with kernels.overlapping():
        out, _alive = append_and_attend(kernels, 0, 40)
    assert torch.equal(out, want)


@pytest.mark.parametrize("copied", [None, 1, 2, 3])
def test_nothing_is_read_early_of_what_is_copied_first(copied):
    """The copy is what the kernel ahead writes."""
    passed = []

    class Recorder(CpuLauncher):
        def __call__(self, kernel, scope):
            passed.append(scope.fresh)

    arguments = list(draw((2, 1, 64, 64), [20, 30], 4, torch.float32))
    if copied is not None:
        arguments[copied] = torch.stack([arguments[copied]] * 2, -1)[..., 0]
    ops.block_attention.op.run(Recorder(), *arguments, 0.125, True, 0, 0.0, None, None, 7)
    assert passed == [7 if copied is None else -1]
