"""The recurrent kernels for CUDA: their blocks share what was saved, and nothing but what is kept may move a state."""

from functools import partial

import pytest
import torch
from op_checks import CUDA_DTYPES, Emulated
from torch.nn.functional import normalize

from dflash import ops
from dflash.ops import reference

# key_heads, heads, key_dim, value_dim, decay per key channel, beta: copies of 16 bytes, and of 4
SHAPES = {
    "delta": (2, 6, 36, 40, False, True),
    "delta of odd sizes": (1, 2, 13, 7, False, True),
    "decay per channel": (1, 2, 128, 36, True, True),
    "no correction": (1, 3, 64, 33, False, False),
}


def make(shape, rows, batch=2, block=5):
    """The inputs of `rows` rows, and a state with its saved rows."""
    key_heads, heads, keys, values, per_channel, delta = shape
    g = torch.Generator().manual_seed(rows)
    draw, channels = partial(torch.randn, generator=g), [keys] * per_channel
    q, k = normalize(draw(2, batch, rows, key_heads, keys), dim=-1)
    log_decay = -torch.rand(batch, rows, heads, *channels, generator=g) / 4
    beta = torch.rand(batch, rows, heads, generator=g) if delta else None
    saved = normalize(draw(batch, block, key_heads, keys), dim=-1), draw(batch, block, heads, values)
    a = torch.rand(batch, block, heads, *channels, generator=g)
    return [q, k, draw(batch, rows, heads, values), log_decay, beta], [draw(batch, heads, keys, values), *saved, a]


def copies(tensors):
    return [x.clone() for x in tensors]


def counts(*numbers):
    return [torch.tensor([n, n]) if isinstance(n, int) else torch.tensor(n) for n in numbers]


def same(*pairs):
    return all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["delta", "decay per channel"])
def test_saved_rows_are_overwritten_behind_the_last_block_that_reads_them(emulation, name, seed):
    """Several blocks apply the rows of one key head, in any order; one of them overwrites these."""
    on, (inputs, state) = Emulated(emulation), make(SHAPES[name], 5)
    after, twin = copies(state), copies(state)
    emulation.seed(seed)
    on.gated_recurrence_(*inputs, *after, *counts([5, 2], 0))
    reference.gated_recurrence_(*inputs, *twin, *counts([5, 2], 0))
    torch.testing.assert_close(after, twin, rtol=1e-5, atol=1e-5)


def test_keys_that_do_not_fit_in_registers_are_refused(emulation):
    inputs, state = make((1, 2, 257, 6, True, True), 2)
    with pytest.raises(ValueError, match="key_dim must be at most 256 on a GPU, got 257"):
        Emulated(emulation).gated_recurrence_(*inputs, *state, *counts([0, 0], 0))


def test_there_may_be_more_key_heads_than_counters(emulation):
    batch = emulation.NUM_COUNTERS // 2 + 3
    on, (inputs, state) = Emulated(emulation), make((2, 2, 4, 36, False, True), 2, batch, 2)
    counters = on.counters(torch.device("cpu"))
    after, twin = copies(state), copies(state)
    for _ in range(2):
        numbers = torch.full((2, batch), 1)
        on.gated_recurrence_(*inputs, *after, *numbers)
        reference.gated_recurrence_(*inputs, *twin, *numbers)
        assert not counters.any()
    torch.testing.assert_close(after, twin, rtol=1e-5, atol=1e-5)


def convolve(on, x, weight, bias, window, pending, keep):
    return on.causal_conv_(x, weight, bias, True, window, *counts(pending, keep))


@pytest.mark.parametrize("dtype", CUDA_DTYPES)
@pytest.mark.parametrize(("width", "channels"), [(1, 7), (3, 261), (4, 6), (8, 7), (9, 6)])
def test_a_convolution_gives_the_bits_of_its_rows_one_by_one(emulation, dtype, width, channels):
    on, g = Emulated(emulation), torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g).to(dtype)  # noqa: E731
    x, weight, bias, window = draw(2, 37, channels), draw(channels, width), draw(channels), draw(2, width + 4, channels)
    whole, parts, twin = window.clone(), window.clone(), window.clone()
    want = convolve(on, x, weight, bias, whole, [2, 5], 37)
    outs = [convolve(on, x[:, t : t + 1], weight, bias, parts, [2, 5] if t == 0 else 0, 1) for t in range(37)]
    theirs = convolve(reference, x, weight, bias, twin, [2, 5], 37)
    assert torch.equal(torch.cat(outs, 1), want)
    assert torch.equal(whole, twin)
    assert torch.equal(parts[:, : width - 1], whole[:, : width - 1])
    torch.testing.assert_close(want, theirs, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_may_start_before_the_one_ahead_has_run(emulation, seed):
    on, (inputs, state) = Emulated(emulation), make(SHAPES["delta"], 5)
    q, _, v, log_decay, beta = inputs
    x, weight = torch.randn(2, 5, 72, generator=torch.Generator().manual_seed(1)), torch.ones(72, 4)

    def layers(numbers, window, *state):
        y = on.causal_conv_(x, weight, None, True, window, *numbers)
        k = y.view(2, 5, 2, 36)
        one = on.gated_recurrence_(q, k, v, log_decay, beta, *state, *numbers)
        two = on.gated_recurrence_(q, k, one, log_decay, beta, *state, *numbers)
        return y, one, two, on.silu_mul(two.view(10, 240)), window, *state

    numbers, window = counts([3, 5], [0, 4]), torch.ones(2, 8, 72)
    emulation.seed(seed)
    want = layers(numbers, window.clone(), *copies(state))
    with on.overlapping():
        have = layers(numbers, window.clone(), *copies(state))
    assert same((have, want))


@pytest.mark.cuda
def test_a_graph_gives_the_same_bits_on_a_gpu():
    inputs, state = ([x if x is None else x.cuda() for x in tensors] for tensors in make(SHAPES["delta"], 5))
    x, weight, numbers = torch.randn(2, 5, 8).cuda(), torch.ones(8, 4).cuda(), [n.cuda() for n in counts([5, 2], 1)]
    now, window = copies(state), torch.ones(2, 8, 8).cuda()
    held, begun = copies(now), window.clone()

    def layer(window, state):
        return [
            ops.causal_conv_(x, weight, None, True, window, *numbers),
            ops.gated_recurrence_(*inputs, *state, *numbers),
        ]

    want = layer(window, now)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = layer(begun, held)
    graph.replay()
    assert same(([*have, begun, *held], [*want, window, *now]))
