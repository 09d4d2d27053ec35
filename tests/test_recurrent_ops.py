"""Ops whose state waits in front of a block until it is known which rows are kept: a recurrence, and a convolution."""

import pytest
import torch
from op_checks import assert_as_exact_as_torch, same

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op

NAN, INF = float("nan"), float("inf")
# corrected by beta, decays per channel
KINDS = {"gated delta rule": (True, False), "kda": (True, True), "mamba-2": (False, False), "channels": (False, True)}
SHAPES = [(2, 4, 16, 24), (1, 3, 33, 70), (2, 2, 7, 5), (1, 2, 128, 128), (1, 1, 200, 9)]  # key heads, heads, dims
CONVOLUTIONS = [(7, 4), (64, 3), (300, 4), (37, 1), (20, 6)]  # channels, width
BY_ROW = ("q", "k", "v", "log_decay", "beta", "x")
WRITTEN = ("state", "saved_k", "saved_d", "saved_a")
Call = dict  # an op's arguments by name


def counts(value, batch):
    return torch.tensor(value if isinstance(value, list) else [value] * batch, dtype=torch.int64)


def draw(kind, shape, batch=2, rows=5, block=6, seed=0, pending=0, keep=0) -> Call:
    """Draw a call of the recurrence."""
    (corrected, per_channel), (key_heads, heads, key_dim, value_dim) = KINDS[kind], shape
    generator = torch.Generator().manual_seed(seed)

    def floats(*sizes):
        return torch.randn(sizes, generator=generator)

    def keys(count):
        return torch.nn.functional.normalize(floats(batch, count, key_heads, key_dim), dim=-1)

    def log_decays(count):
        return -floats(batch, count, heads, *[key_dim] * per_channel).abs() * 0.3

    return {
        "q": keys(rows), "k": keys(rows), "v": floats(batch, rows, heads, value_dim), "log_decay": log_decays(rows),
        "beta": floats(batch, rows, heads).sigmoid() if corrected else None,
        "state": floats(batch, heads, key_dim, value_dim), "saved_k": keys(block),
        "saved_d": floats(batch, block, heads, value_dim), "saved_a": log_decays(block).exp(),
        "pending": counts(pending, batch), "keep": counts(keep, batch),
    }  # fmt: skip


def draw_convolution(
    shape, batch=2, rows=5, block=6, seed=0, pending=0, keep=0, dtype=torch.float32, bias=True, silu=True
) -> Call:
    """Draw a call of the convolution."""
    (channels, width), generator = shape, torch.Generator().manual_seed(seed)

    def floats(*sizes):
        return torch.randn(sizes, generator=generator).to(dtype)

    return {
        "x": floats(batch, rows, channels), "weight": floats(channels, width),
        "bias": floats(channels) if bias else None, "silu": silu, "window": floats(batch, width - 1 + block, channels),
        "pending": counts(pending, batch), "keep": counts(keep, batch),
    }  # fmt: skip


# Calls of both, for what both promise: a recurrence, or the shape and dtype of a convolution.
CALLS = {kind: kind for kind in KINDS} | {
    f"convolution {shape} in {dtype}": (shape, dtype)
    for shape, dtype in (((70, 4), torch.float32), ((70, 4), torch.bfloat16), ((7, 11), torch.float32))
}


def draw_any(name, place, **options) -> Call:
    """Draw a call. SiLU is torch's own in the twin, which rounds the end of a tensor differently."""
    if name in KINDS:
        return draw(name, (2, 4, 16, 40), **options)
    shape, dtype = CALLS[name]
    return draw_convolution(shape, dtype=dtype, silu=place is not reference, **options)


def go_on(place, call, **changes):
    """Run the op on the call's own state, with some rows of the inputs or other counts."""
    return (place.causal_conv_ if "x" in call else place.gated_recurrence_)(**(call | changes))


def run(place, call):
    """Run the op on a copy of the call; return the result and the copy."""
    call = sequences(call, slice(None))
    return go_on(place, call), call


def sequences(call, chosen) -> Call:
    """Return the call for some sequences, on copies."""
    shared = ("weight", "bias", "silu")
    return {name: x if x is None or name in shared else x[chosen].clone() for name, x in call.items()}


def some_rows(call, rows) -> Call:
    """Return the inputs of some rows."""
    return {name: x if x is None else x[:, rows] for name, x in call.items() if name in BY_ROW}


def double(call) -> Call:
    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in call.items()}


def held(call):
    """Return the state, or the rows of a window that are the context."""
    return call["state"] if "state" in call else call["window"][:, : call["weight"].shape[1] - 1]


def waiting(call) -> list[torch.Tensor]:
    """Return what is stored of the rows of a block."""
    if "state" in call:
        return [call[name] for name in WRITTEN[1:]]
    return [call["window"][:, call["weight"].shape[1] - 1 :]]


def by_hand(call):
    """Compute one head and row at a time in float64, from the sentence in the docstring: the outputs and the state."""
    c = double(call)
    (batch, rows, heads, _), groups = c["v"].shape, c["v"].shape[2] // c["k"].shape[2]
    out, state = torch.zeros_like(c["v"]), c["state"].clone()
    for b in range(batch):
        for h in range(heads):
            s = state[b, h]
            for t in range(int(c["pending"][b])):
                s = c["saved_a"][b, t, h][..., None] * s
                s = s + torch.outer(c["saved_k"][b, t, h // groups], c["saved_d"][b, t, h])
            state[b, h] = s
            for t in range(rows):
                k, d = c["k"][b, t, h // groups], c["v"][b, t, h]
                s = c["log_decay"][b, t, h].exp()[..., None] * s
                if c["beta"] is not None:
                    d = c["beta"][b, t, h] * (d - s.T @ k)
                s = s + torch.outer(k, d)
                out[b, t, h] = s.T @ c["q"][b, t, h // groups]
                if t < int(c["keep"][b]):
                    state[b, h] = s
    return out, state


@pytest.mark.parametrize("kind", KINDS)
def test_the_twin_of_the_recurrence_against_one_row_at_a_time(kind):
    call = draw(kind, (2, 4, 12, 8), batch=3, pending=[0, 2, 6], keep=[5, 0, 3])
    out, written = run(reference, double(call))
    for ours, want in zip((out, written["state"]), by_hand(call), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("silu", [True, False])
def test_the_twin_of_the_convolution_against_torchs_own(silu):
    call = double(draw_convolution((7, 4), batch=3, pending=[0, 2, 6], keep=[5, 0, 3], silu=silu))
    out, written = run(reference, call)
    window = written["window"]
    for b, (pending, keep) in enumerate(((0, 5), (2, 0), (6, 3))):
        inputs = torch.cat([call["window"][b, pending : pending + 3], call["x"][b]])
        want = torch.nn.functional.conv1d(inputs.mT[None], call["weight"][:, None], call["bias"], groups=7)[0].mT
        torch.testing.assert_close(out[b], torch.nn.functional.silu(want) if silu else want, rtol=1e-12, atol=1e-12)
        assert torch.equal(window[b, :3], inputs[keep : keep + 3])
        assert torch.equal(window[b, 3:8], call["x"][b])
        assert torch.equal(window[b, 8:], call["window"][b, 8:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_recurrence_against_float64(kind, shape, kernels):
    cases = (5, [6, 2], [0, 4]), (1, [0, 1], [1, 0]), (21, [3, 0], [21, 8])  # 21: more than a chunk of a GPU
    for rows, pending, keep in cases:
        call = draw(kind, shape, rows=rows, pending=pending, keep=keep)
        ours, twin, exact = run(kernels, call), run(reference, call), run(reference, double(call))
        assert_as_exact_as_torch(ours[0], twin[0], exact[0])
        for name in WRITTEN:
            assert_as_exact_as_torch(ours[1][name], twin[1][name], exact[1][name])


@pytest.mark.parametrize("shape", CONVOLUTIONS)
def test_the_convolution_against_float64(shape, dtype, kernels):
    for rows, pending, keep, bias, silu in (
        (5, [6, 2], [0, 4], True, True), (1, [0, 1], [1, 0], False, True), (9, [3, 0], [9, 8], True, False)
    ):  # fmt: skip
        call = draw_convolution(shape, rows=rows, pending=pending, keep=keep, dtype=dtype, bias=bias, silu=silu)
        ours, twin, exact = run(kernels, call), run(reference, call), run(reference, double(call))
        assert_as_exact_as_torch(ours[0], twin[0], exact[0])
        assert torch.equal(ours[1]["window"], twin[1]["window"])


@pytest.mark.parametrize("name", CALLS)
def test_rows_have_the_same_bits_however_they_are_divided_into_passes(name, implementation):
    places = {ops: (520, (512, 64, 7, 1)), reference: (9, (4, 1))}
    rows, sizes = places.get(implementation, (71, (64, 7, 1)))
    call = draw_any(name, implementation, rows=rows, pending=[2, 5], keep=rows)
    whole, written = run(implementation, call)
    for size in sizes:
        divided, parts = sequences(call, slice(None)), []
        for i in range(0, rows, size):
            parts.append(go_on(implementation, divided, **some_rows(call, slice(i, i + size)), keep=counts(rows, 2)))
            divided["pending"] = counts(0, 2)
        assert torch.equal(torch.cat(parts, 1), whole), size
        assert torch.equal(held(divided), held(written)), size


@pytest.mark.parametrize("name", CALLS)
def test_accepted_rows_give_the_bits_of_rows_run_one_by_one(name, implementation):
    """Sequence m accepts m rows of its block; the next pass has to find the state that m single rows leave."""
    block = 6
    blocks, after = (
        draw_any(name, implementation, batch=block + 1, rows=rows, block=block, seed=rows) for rows in (block, 3)
    )
    _, verified = run(implementation, blocks)
    assert torch.equal(held(verified), held(blocks)), "a block keeps none of its rows"
    accepted, two = counts([*range(block + 1)], block + 1), counts(2, block + 1)
    out = go_on(implementation, verified, **some_rows(after, slice(None)), pending=accepted, keep=two)
    for m in range(block + 1):
        one, rest = sequences(blocks, slice(m, m + 1)), sequences(after, slice(m, m + 1))
        for t in range(m):
            row = some_rows(sequences(blocks, slice(m, m + 1)), slice(t, t + 1))
            go_on(implementation, one, **row, keep=counts(1, 1))
        rest = go_on(implementation, one, **some_rows(rest, slice(None)), keep=counts(2, 1))
        assert torch.equal(rest, out[m : m + 1]), m
        assert torch.equal(held(one), held(verified)[m : m + 1]), m


@pytest.mark.parametrize("name", CALLS)
def test_bits_do_not_depend_on_the_batch_or_the_threads(name, kernels, set_threads):
    call = draw_any(name, kernels, batch=3, rows=6, block=4, pending=[1, 0, 4], keep=[0, 6, 2])
    want, written = run(kernels, call)
    for count in (1, 2, 3, 7) if kernels is ops else ():
        set_threads(count)
        out, others = run(kernels, call)
        assert same([out, held(others), *waiting(others)], [want, held(written), *waiting(written)])
    for b in range(3):
        out, alone = run(kernels, sequences(call, slice(b, b + 1)))
        ours, theirs = [out, held(alone), *waiting(alone)], [want, held(written), *waiting(written)]
        assert same(ours, [x[b : b + 1] for x in theirs])


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_number_of_heads_or_columns(kind, kernels):
    call = draw(kind, (2, 4, 16, 34), batch=3, rows=6, block=4, pending=[1, 0, 4], keep=[0, 6, 2])
    want, written = run(kernels, call)
    whole = dict.fromkeys(("pending", "keep"), slice(None))
    half = {name: x if x is None or name in whole else x.tensor_split(2, 1 if name == "state" else 2)[1].contiguous()
            for name, x in call.items()}  # fmt: skip
    out, some = run(kernels, half)
    assert torch.equal(out, want[:, :, 2:])
    assert torch.equal(some["state"], written["state"][:, 2:])
    columns = {name: call[name][..., 3:8].contiguous() for name in ("v", "state", "saved_d")}
    out, some = run(kernels, call | columns)
    assert torch.equal(out, want[..., 3:8])
    assert torch.equal(some["state"], written["state"][..., 3:8])


def test_bits_do_not_depend_on_the_number_of_channels(dtype, kernels):
    call = draw_convolution((600, 4), batch=3, rows=20, pending=[1, 0, 6], keep=[0, 20, 2], dtype=dtype)
    want, written = run(kernels, call)
    for some in (slice(0, 1), slice(3, 69)):
        part = {name: call[name][..., some].contiguous() for name in ("x", "window")}
        out, few = run(kernels, call | part | {name: call[name][some] for name in ("weight", "bias")})
        assert torch.equal(out, want[..., some])
        assert torch.equal(few["window"], written["window"][..., some])


def test_the_convolution_takes_strided_inputs(dtype, kernels):
    call = draw_convolution((70, 4), dtype=dtype, pending=3, keep=2)
    (want, written), x = run(kernels, call), call["x"]
    strided = {name: torch.stack([call[name]] * 2, -1)[..., 0] for name in ("bias", "pending", "keep")}
    strided["weight"] = call["weight"].mT.contiguous().mT
    for view in (torch.cat([x, x], -1)[..., 70:], x.mT.contiguous().mT, torch.stack([x, x], 1).flatten(0, 1)[::2]):
        assert not view.is_contiguous()
        window = call["window"].clone()
        out = go_on(kernels, call, **strided, x=view, window=window)
        assert torch.equal(out, want)
        assert torch.equal(window, written["window"])


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", CALLS)
def test_rows_that_are_not_kept_may_hold_anything(name, bad, implementation):
    clean = draw_any(name, implementation, pending=[2, 0], keep=[3, 0])
    spoilt = sequences(clean, slice(None))
    for each in some_rows(spoilt, slice(3, None)).values():
        if each is not None:
            each[:] = bad
    for each in waiting(spoilt):
        each[0, 2:] = each[1] = bad
    (want, written), (out, others) = run(implementation, clean), run(implementation, spoilt)
    assert torch.equal(out[:, :3], want[:, :3])
    assert not out[:, 3:].isfinite().all()
    assert torch.equal(held(others), held(written))
    assert all(torch.equal(a[:, :3], b[:, :3]) for a, b in zip(waiting(others), waiting(written), strict=True))
    ours, theirs = ({**clean, **left, **some_rows(clean, slice(None))} for left in (others, written))
    after = [go_on(implementation, call, pending=counts([0, 3], 2)) for call in (ours, theirs)]
    assert torch.equal(*after)
    assert torch.equal(held(ours), held(theirs))


@pytest.mark.parametrize(("rows", "block"), [(0, 4), (3, 0), (9, 4), (4, 4), (1, 6)])
@pytest.mark.parametrize("name", CALLS)
def test_only_the_first_rows_of_a_pass_are_stored(name, rows, block, implementation):
    call = draw_any(name, implementation, rows=rows, block=block, pending=[0, block], keep=rows)
    out, written = run(implementation, call)
    stored, inputs = min(rows, block), call.get("x", call.get("v"))
    assert out.shape == inputs.shape
    first = call["x"] if "x" in call else call["k"]
    assert torch.equal(waiting(written)[0][:, :stored], first[:, :stored])
    for ours, before in zip(waiting(written), waiting(call), strict=True):
        assert torch.equal(ours[:, stored:], before[:, stored:])
