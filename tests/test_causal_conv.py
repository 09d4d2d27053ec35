"""A causal convolution whose window waits in front of a block until it is known which rows are kept."""

import pytest
import torch
from op_checks import assert_as_exact_as_torch

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op

NAN, INF = float("nan"), float("inf")
SHAPES = [(7, 4), (64, 3), (300, 4), (37, 1), (20, 6)]  # channels, width


def draw(shape, batch=2, rows=5, block=6, dtype=torch.float32, seed=0, pending=0, keep=0, bias=True, silu=True):
    """The op's arguments by name."""
    (channels, width), generator = shape, torch.Generator().manual_seed(seed)

    def floats(*sizes):
        return torch.randn(sizes, generator=generator).to(dtype)

    return {
        "x": floats(batch, rows, channels), "weight": floats(channels, width), "bias": floats(channels) * bias,
        "silu": silu, "window": floats(batch, width - 1 + block, channels), "pending": counts(pending, batch),
        "keep": counts(keep, batch),
    } | ({} if bias else {"bias": None})  # fmt: skip


def counts(value, batch):
    return torch.tensor(value if isinstance(value, list) else [value] * batch, dtype=torch.int64)


def run(place, call):
    """Run the op on a copy of the window; return the result and the window."""
    window = call["window"].clone()
    return place.causal_conv_(**(call | {"window": window})), window


def go_on(place, call, **changes):
    """Run the op on the call's own window, with other rows or counts."""
    return place.causal_conv_(**(call | changes))


def sequences(call, chosen):
    """The call for some sequences, on copies."""
    cut = {name: call[name][chosen].clone() for name in ("x", "window", "pending", "keep")}
    return call | cut


def has_fixed_silu(place):
    """True unless SiLU is torch's own, which on CPU rounds a value differently at the end of a tensor."""
    return place is not reference


def double(call):
    return {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in call.items()}


def context(call):
    """How many rows of the window are the context."""
    return call["weight"].shape[1] - 1


@pytest.mark.parametrize("silu", [True, False])
def test_the_twin_against_torchs_own_convolution(silu):
    call = double(draw((7, 4), batch=3, pending=[0, 2, 6], keep=[5, 0, 3], silu=silu))
    out, window = run(reference, call)
    for b, (pending, keep) in enumerate(((0, 5), (2, 0), (6, 3))):
        inputs = torch.cat([call["window"][b, pending : pending + 3], call["x"][b]])
        want = torch.nn.functional.conv1d(inputs.mT[None], call["weight"][:, None], call["bias"], groups=7)[0].mT
        torch.testing.assert_close(out[b], torch.nn.functional.silu(want) if silu else want, rtol=1e-12, atol=1e-12)
        assert torch.equal(window[b, :3], inputs[keep : keep + 3])
        assert torch.equal(window[b, 3:8], call["x"][b])
        assert torch.equal(window[b, 8:], call["window"][b, 8:])


@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, dtype, kernels):
    for rows, pending, keep, bias, silu in (
        (5, [6, 2], [0, 4], True, True), (1, [0, 1], [1, 0], False, True), (9, [3, 0], [9, 8], True, False)
    ):  # fmt: skip
        call = draw(shape, rows=rows, dtype=dtype, pending=pending, keep=keep, bias=bias, silu=silu)
        (out, window), (twin, wanted), (exact, _) = (
            run(*pair) for pair in ((kernels, call), (reference, call), (reference, double(call)))
        )
        assert_as_exact_as_torch(out, twin, exact)
        assert torch.equal(window, wanted)


@pytest.mark.parametrize("shape", [(70, 4), (7, 1), (261, 3), (7, 8), (6, 9)])
def test_rows_have_the_same_bits_however_they_are_divided_into_passes(shape, dtype, implementation):
    rows, sizes = (520, (512, 64, 7, 1)) if implementation is ops else (37, (7, 1))
    call = draw(shape, rows=rows, dtype=dtype, pending=[2, 5], keep=rows, silu=has_fixed_silu(implementation))
    whole, window = run(implementation, call)
    for size in sizes:
        divided = sequences(call, slice(None))
        parts = []
        for i in range(0, rows, size):
            parts.append(go_on(implementation, divided, x=call["x"][:, i : i + size]))
            divided["pending"] = counts(0, 2)
        assert torch.equal(torch.cat(parts, 1), whole), size
        assert torch.equal(divided["window"][:, : context(call)], window[:, : context(call)]), size


def test_accepted_rows_give_the_bits_of_rows_run_one_by_one(dtype, implementation):
    """Sequence m accepts m rows of its block; the next pass has to find the inputs that m single rows leave."""
    block = 6
    silu = has_fixed_silu(implementation)
    blocks, after = (draw((70, 4), block + 1, rows, block, dtype, rows, silu=silu) for rows in (block, 3))
    verified, accepted = sequences(blocks, slice(None)), counts([*range(block + 1)], block + 1)
    go_on(implementation, verified)
    assert torch.equal(verified["window"][:, :3], blocks["window"][:, :3]), "a block keeps none of its rows"
    out = go_on(implementation, verified, x=after["x"], pending=accepted, keep=counts(2, block + 1))
    for m in range(block + 1):
        one = sequences(blocks, slice(m, m + 1))
        for t in range(m):
            go_on(implementation, one, x=blocks["x"][m : m + 1, t : t + 1], keep=counts(1, 1))
        rest = go_on(implementation, one, x=after["x"][m : m + 1], keep=counts(2, 1))
        assert torch.equal(rest, out[m : m + 1]), m
        assert torch.equal(one["window"][:, :3], verified["window"][m : m + 1, :3]), m


def test_bits_do_not_depend_on_batch_channels_or_threads(dtype, kernels, set_threads):
    shape = (600, 4) if kernels is ops else (70, 4)
    call = draw(shape, batch=3, rows=20, dtype=dtype, pending=[1, 0, 6], keep=[0, 20, 2])
    want, window = run(kernels, call)
    for count in (1, 2, 3, 7) if kernels is ops else ():
        set_threads(count)
        assert all(torch.equal(a, b) for a, b in zip(run(kernels, call), (want, window), strict=True))
    for b in range(3):
        out, alone = run(kernels, sequences(call, slice(b, b + 1)))
        assert torch.equal(out, want[b : b + 1])
        assert torch.equal(alone, window[b : b + 1])
    for some in (slice(0, 1), slice(3, 69)):
        part = {"x": call["x"][..., some], "window": call["window"][..., some].contiguous()}
        out, few = run(kernels, call | part | {"weight": call["weight"][some], "bias": call["bias"][some]})
        assert torch.equal(out, want[..., some])
        assert torch.equal(few, window[..., some])


@pytest.mark.parametrize("bad", [NAN, INF])
def test_rows_that_are_not_kept_may_hold_anything(bad, dtype, implementation):
    clean = draw((70, 4), dtype=dtype, pending=[2, 0], keep=[3, 0])
    spoilt = sequences(clean, slice(None))
    spoilt["x"][:, 3:] = bad
    spoilt["window"][0, 5:] = spoilt["window"][1, 3:] = bad
    (want, clean_window), (out, window) = run(implementation, clean), run(implementation, spoilt)
    assert torch.equal(out[:, :3], want[:, :3])
    assert not out[:, 3:].isfinite().all()
    assert torch.equal(window[:, :6], clean_window[:, :6])
    after = draw((70, 4), dtype=dtype, pending=[0, 3], keep=2, seed=1)
    ours, theirs = (run(implementation, after | {"window": left}) for left in (window, clean_window))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1][:, :3], theirs[1][:, :3])


@pytest.mark.parametrize(("rows", "block"), [(0, 4), (3, 0), (9, 4), (4, 4), (1, 6)])
def test_only_the_first_rows_of_a_pass_are_stored(rows, block, implementation):
    call = draw((7, 4), rows=rows, block=block, pending=[0, block], keep=rows)
    out, window = run(implementation, call)
    stored = min(rows, block)
    assert out.shape == call["x"].shape
    assert torch.equal(window[:, 3 : 3 + stored], call["x"][:, :stored])
    assert torch.equal(window[:, 3 + stored :], call["window"][:, 3 + stored :])


def test_strided_views(dtype, kernels):
    call = draw((70, 4), dtype=dtype, pending=3, keep=2)
    want, window = run(kernels, call)
    x = call["x"]
    packed = torch.cat([x, x], -1)[..., 70:]
    views = [packed, x.mT.contiguous().mT, torch.stack([x, x], 1).flatten(0, 1)[::2]]
    others = {"weight": call["weight"].mT.contiguous().mT, "bias": torch.stack([call["bias"]] * 2, -1)[..., 0]}
    others |= {name: torch.stack([call[name]] * 2, -1)[..., 0] for name in ("pending", "keep")}
    for view in views:
        assert not view.is_contiguous()
        out, moved = run(kernels, call | others | {"x": view})
        assert torch.equal(out, want)
        assert out.is_contiguous()
        assert torch.equal(moved, window)
