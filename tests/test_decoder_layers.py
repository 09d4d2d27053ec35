from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from op_checks import DTYPES, assert_as_exact_as_torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op
HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, CAPACITY = 40, 52, 4, 2, 24, 3, 90


def arguments(dtype, rows=16, context_rows=16, batch=3, head_norms=True, biases=False, sinks=False, seed=0):
    """Everything of one call as a dict; stale cache slots and dead context rows hold NaN."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0, shift=0.0):
        return (torch.randn(shape, generator=g) * scale + shift).to(dtype)

    def matrix(out, width):
        return normal(out, width, scale=width**-0.5)

    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights = []
    for _ in range(LAYERS):
        weights += [normal(HIDDEN, scale=0.1, shift=1), matrix(q, HIDDEN), matrix(kv, HIDDEN), matrix(kv, HIDDEN)]
        weights += [matrix(HIDDEN, q), normal(HIDDEN, scale=0.1, shift=1), matrix(WIDTH, HIDDEN)]
        weights += [matrix(WIDTH, HIDDEN), matrix(HIDDEN, WIDTH)]
    lengths = torch.tensor([0, 33, 70])[:batch]
    live = torch.minimum(torch.tensor([0, 5, 16]), torch.tensor(context_rows))[:batch]
    caches = [normal(batch, KV_HEADS, CAPACITY, HEAD_DIM) for _ in range(2 * LAYERS)]
    context = normal(batch, context_rows, HIDDEN) if context_rows else None
    for b in range(batch):
        for cache in caches:
            cache[b, :, lengths[b] - live[b] :] = float("nan")
        if context is not None:
            context[b, live[b] :] = float("nan")
    angles = torch.arange(CAPACITY)[:, None] * 10000.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    offsets = [normal(size) for _ in range(LAYERS) for size in (q, kv, kv, HIDDEN)]
    offsets[3] = offsets[3][:0]
    return {
        "hidden": normal(batch, rows, HIDDEN),
        "context": context,
        "num_context": live if context_rows else None,
        "lengths": lengths,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "weights": weights,
        "head_norms": [normal(HEAD_DIM, scale=0.1, shift=1) for _ in range(2 * LAYERS)] if head_norms else [],
        "biases": offsets if biases else [],
        "sinks": [normal(HEADS) for _ in range(LAYERS)] if sinks else [],
        "norm": normal(HIDDEN, scale=0.1, shift=1),
        "eps": 1e-6,
        "scale": HEAD_DIM**-0.5,
        "causal": [1, 0, 1],
        "windows": [0, 0, 20],
        "taps": [2, 0],
        "k_caches": caches[:LAYERS],
        "v_caches": caches[LAYERS:],
    }


def changed(call, change):
    """A copy of a call with ``change`` applied to each of its tensors."""
    one = lambda x: change(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
    return {name: [one(x) for x in value] if isinstance(value, list) else one(value) for name, value in call.items()}


def widened(x):
    return x.double() if x.dtype.is_floating_point else x


OPTIONS = [
    {},
    {"context_rows": 0, "head_norms": False},
    {"biases": True, "rows": 5, "context_rows": 3},
    {"sinks": True, "batch": 1, "rows": 1},
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_threads(dtype, monkeypatch):
    """With work enough for threads, more of them than processors, and loops one behind the other."""
    for name, size in {"HIDDEN": 192, "WIDTH": 512, "HEADS": 6, "LAYERS": 2}.items():
        monkeypatch.setitem(globals(), name, size)
    call = arguments(dtype) | {"causal": [1, 0], "windows": [0, 20], "taps": [1, 0]}

    def everything(count):
        torch.set_num_threads(count)
        copied = changed(call, torch.clone)
        return [*ops.decoder_layers(*copied.values()), *copied["k_caches"], *copied["v_caches"]]

    def same(results, wanted):
        for got, want in zip(results, wanted, strict=True):
            assert torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))

    before = torch.get_num_threads()
    try:
        wanted = everything(1)
        for count in [2] * 10 + [3] * 10 + [8] * 10:
            same(everything(count), wanted)
        with ThreadPoolExecutor(2) as pool:  # and from two callers at a time
            for results in pool.map(everything, [2, 3] * 8):
                same(results, wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_against_float64(options, dtype):
    call = arguments(dtype, **options)
    ours, twin, exact = (changed(call, change) for change in (torch.clone, torch.clone, widened))
    got, theirs, wanted = (
        ops.decoder_layers(**ours),
        reference.decoder_layers(**twin),
        reference.decoder_layers(**exact),
    )
    for a, b, c in zip(got, theirs, wanted, strict=True):
        assert_as_exact_as_torch(a, b, c, factor=3.0)
    for name in ("k_caches", "v_caches"):
        for a, b, c in zip(ours[name], twin[name], exact[name], strict=True):
            assert torch.equal(a.isnan(), c.isnan()), "other slots were written"
            assert_as_exact_as_torch(a.nan_to_num(), b.nan_to_num(), c.nan_to_num(), factor=3.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_at_a_time_gives_the_same_bits(dtype):
    call = arguments(dtype, context_rows=0)
    call["causal"] = [1] * LAYERS
    whole, single = changed(call, torch.clone), changed(call, torch.clone)
    out, tapped = ops.decoder_layers(**whole)
    for row in range(16):
        step = single | {"hidden": call["hidden"][:, row : row + 1], "lengths": call["lengths"] + row}
        one, tap = ops.decoder_layers(**step)
        assert torch.equal(one[:, 0], out[:, row])
        assert torch.equal(tap[:, 0], tapped[:, row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_context_is_appended_without_a_block(dtype):
    call = arguments(dtype, rows=0)
    ours, twin = changed(call, torch.clone), changed(call, torch.clone)
    out, tapped = ops.decoder_layers(**ours)
    reference.decoder_layers(**twin)
    assert out.shape == (3, 0, HIDDEN)
    assert tapped.shape == (3, 0, 2 * HIDDEN)
    for name in ("k_caches", "v_caches"):
        for a, b in zip(ours[name], twin[name], strict=True):
            assert not a[2, :, 54:70].isnan().any(), "the live context rows were not appended"
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_twin_runs_without_data(options):
    real = arguments(torch.float32, **options)
    with FakeTensorMode() as mode:
        out, tapped = reference.decoder_layers(**changed(real, mode.from_tensor))
    assert out.shape == real["hidden"].shape
    assert tapped.shape == (*out.shape[:2], 2 * HIDDEN)


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_opcheck(options):
    call = changed(arguments(torch.float32, **options), lambda x: x.nan_to_num() if x.dtype.is_floating_point else x)
    torch.library.opcheck(torch.ops.dflash.decoder_layers.default, tuple(call.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": []}, r"weights must have 27 entries, got 0"),
        ({"taps": [3]}, r"taps must be different layers in 0 \.\. 2, got \[3\]"),
        ({"norm": torch.ones(7)}, r"norm must be \[hidden\] = \[40\], got \[7\]"),
        ({"num_context": None}, r"context and num_context come together"),
        ({"windows": [0, 0, -1]}, r"windows must be positive"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        ops.decoder_layers(**(arguments(torch.float32) | change))
