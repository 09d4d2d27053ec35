"""A linear recurrence whose state waits in front of a block until it is known which rows are kept."""

import pytest
import torch
from op_checks import assert_as_exact_as_torch
from test_causal_conv import INF, NAN, counts

from dflash import ops
from dflash.ops import reference

pytestmark = pytest.mark.op

# key heads, heads, key_dim, value_dim
SHAPES = [(2, 4, 16, 24), (1, 3, 33, 70), (2, 2, 7, 5), (1, 2, 128, 128), (1, 1, 200, 9)]
KINDS = {"gated delta rule": (True, False), "kda": (True, True), "mamba-2": (False, False), "channels": (False, True)}
INPUTS = ("q", "k", "v", "log_decay", "beta")
WRITTEN = ("state", "saved_k", "saved_d", "saved_a")


def draw(kind, shape, batch=2, rows=5, block=6, seed=0, pending=0, keep=0):
    """The op's arguments by name."""
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


def run(place, call):
    """Run the op on copies of what it writes; return the result, and what it wrote by name."""
    written = {name: call[name].clone() for name in WRITTEN}
    return place.gated_recurrence_(**(call | written)), written


def go_on(place, call, **changes):
    """Run the op on the call's own state, with some rows of the inputs or other counts."""
    return place.gated_recurrence_(**(call | changes))


def some_rows(call, rows):
    """The inputs of some rows."""
    return {name: call[name] if call[name] is None else call[name][:, rows] for name in INPUTS}


def sequences(call, chosen):
    """The call for some sequences, on copies."""
    return {name: x if x is None else x[chosen].clone() for name, x in call.items()}


def double(call):
    return {n: x.double() if x is not None and x.is_floating_point() else x for n, x in call.items()}


def by_hand(call):
    """One head and row at a time in float64, from the sentence in the docstring: the outputs and the state."""
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
def test_the_twin_against_one_row_at_a_time(kind):
    call = draw(kind, (2, 4, 12, 8), batch=3, pending=[0, 2, 6], keep=[5, 0, 3])
    out, written = run(reference, double(call))
    want, state = by_hand(call)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(written["state"], state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_against_float64(kind, shape, kernels):
    cases = (5, [6, 2], [0, 4]), (1, [0, 1], [1, 0]), (21, [3, 0], [21, 8])  # 21: more than a chunk of a GPU
    for rows, pending, keep in cases:
        call = draw(kind, shape, rows=rows, pending=pending, keep=keep)
        ours, twin, exact = run(kernels, call), run(reference, call), run(reference, double(call))
        assert_as_exact_as_torch(ours[0], twin[0], exact[0])
        for name in WRITTEN:
            assert_as_exact_as_torch(ours[1][name], twin[1][name], exact[1][name])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_however_they_are_divided_into_passes(kind, implementation):
    places = {ops: (520, (512, 64, 7, 1), (1, 2, 33, 70)), reference: (9, (4, 1), (1, 2, 8, 6))}
    rows, sizes, shape = places.get(implementation, (71, (64, 7, 1), (1, 2, 36, 40)))
    call = draw(kind, shape, rows=rows, keep=rows)
    whole, written = run(implementation, call)
    for size in sizes:
        divided = sequences(call, slice(None))
        parts = [
            go_on(implementation, divided, **some_rows(call, slice(i, i + size)), keep=counts(rows, 2))
            for i in range(0, rows, size)
        ]
        assert torch.equal(torch.cat(parts, 1), whole), size
        assert torch.equal(divided["state"], written["state"]), size


@pytest.mark.parametrize("kind", KINDS)
def test_accepted_rows_give_the_bits_of_rows_run_one_by_one(kind, implementation):
    """Sequence m accepts m rows of its block; the next pass has to find the state that m single rows leave."""
    block = 6
    shape = (2, 4, 16, 40) if implementation is ops else (1, 2, 8, 6)
    blocks = draw(kind, shape, batch=block + 1, rows=block, block=block)
    after = draw(kind, shape, batch=block + 1, rows=3, block=block, seed=1)
    verified = sequences(blocks, slice(None))
    go_on(implementation, verified)
    assert torch.equal(verified["state"], blocks["state"]), "a block keeps none of its rows"
    accepted = counts([*range(block + 1)], block + 1)
    out = go_on(implementation, verified, **some_rows(after, slice(None)), pending=accepted, keep=counts(2, block + 1))
    for m in range(block + 1):
        one, rest = sequences(blocks, slice(m, m + 1)), sequences(after, slice(m, m + 1))
        for t in range(m):
            row = {name: x if x is None else x[m : m + 1] for name, x in some_rows(blocks, slice(t, t + 1)).items()}
            go_on(implementation, one, **row, keep=counts(1, 1))
        rest = go_on(implementation, one, **some_rows(rest, slice(None)), keep=counts(2, 1))
        assert torch.equal(rest, out[m : m + 1]), m
        assert torch.equal(one["state"], verified["state"][m : m + 1]), m


@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_batch_heads_columns_or_threads(kind, kernels, set_threads):
    shape = (2, 4, 16, 70) if kernels is ops else (2, 4, 16, 34)
    call = draw(kind, shape, batch=3, rows=6, block=4, pending=[1, 0, 4], keep=[0, 6, 2])
    want, written = run(kernels, call)
    for count in (1, 2, 3, 7) if kernels is ops else ():
        set_threads(count)
        out, others = run(kernels, call)
        assert torch.equal(out, want)
        assert all(torch.equal(others[name], written[name]) for name in WRITTEN)
    for b in range(3):
        out, alone = run(kernels, sequences(call, slice(b, b + 1)))
        assert torch.equal(out, want[b : b + 1])
        assert all(torch.equal(alone[name], written[name][b : b + 1]) for name in WRITTEN)
    axes = {"q": 2, "k": 2, "v": 2, "log_decay": 2, "beta": 2, "state": 1, "saved_k": 2, "saved_d": 2, "saved_a": 2}
    one_key_head = dict(call)
    for name, axis in axes.items():
        if call[name] is not None:
            one_key_head[name] = call[name].narrow(axis, call[name].shape[axis] // 2, call[name].shape[axis] // 2)
    out, half = run(kernels, {n: x if x is None else x.contiguous() for n, x in one_key_head.items()})
    assert torch.equal(out, want[:, :, 2:])
    assert torch.equal(half["state"], written["state"][:, 2:])
    columns = {name: call[name][..., 3:8].contiguous() for name in ("v", "state", "saved_d")}
    out, few = run(kernels, call | columns)
    assert torch.equal(out, want[..., 3:8])
    assert torch.equal(few["state"], written["state"][..., 3:8])


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_not_kept_may_hold_anything(kind, bad, implementation):
    clean = draw(kind, (1, 2, 16, 24), rows=5, block=6, pending=[2, 0], keep=[3, 0])
    spoilt = {name: x if x is None else x.clone() for name, x in clean.items()}
    for name in INPUTS:
        if spoilt[name] is not None:
            spoilt[name][:, 3:] = bad
    for name in WRITTEN[1:]:
        spoilt[name][0, 2:] = spoilt[name][1] = bad
    want, written = run(implementation, clean)
    out, others = run(implementation, spoilt)
    assert torch.equal(out[:, :3], want[:, :3])
    assert not out[:, 3:].isfinite().all()
    assert torch.equal(others["state"], written["state"])
    assert all(torch.equal(others[name][:, :3], written[name][:, :3]) for name in WRITTEN[1:])
    accepted = counts([0, 3], 2)
    ours, theirs = ({**clean, **left, "pending": accepted} for left in (others, written))
    assert torch.equal(go_on(implementation, ours), go_on(implementation, theirs))
    assert torch.equal(ours["state"], theirs["state"])


@pytest.mark.parametrize(("rows", "block"), [(0, 4), (3, 0), (9, 4), (4, 4), (1, 6)])
def test_only_the_first_rows_of_a_pass_are_saved(rows, block, implementation):
    call = draw("kda", (1, 2, 8, 6), rows=rows, block=block, pending=[0, block], keep=rows)
    out, written = run(implementation, call)
    stored = min(rows, block)
    assert out.shape == call["v"].shape
    assert torch.equal(written["saved_k"][:, :stored], call["k"][:, :stored])
    torch.testing.assert_close(written["saved_a"][:, :stored], call["log_decay"][:, :stored].exp())
    for name in WRITTEN[1:]:
        assert torch.equal(written[name][:, stored:], call[name][:, stored:])
