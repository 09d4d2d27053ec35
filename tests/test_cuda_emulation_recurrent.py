"""The recurrent kernels for CUDA: their blocks share what was saved, and nothing but what is kept may move a state."""

import pytest
import torch
from op_checks import Emulated, same
from test_recurrent_ops import WRITTEN, draw, go_on, run, sequences

from dflash import ops
from dflash.ops import reference

SHAPE = (2, 6, 36, 40)  # key heads, heads, key_dim, value_dim


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("kind", "shape"), [("gated delta rule", SHAPE), ("kda", (1, 2, 128, 36))])
def test_saved_rows_are_overwritten_behind_the_last_block_that_reads_them(emulation, kind, shape, seed):
    """Several blocks apply the rows of one key head, in any order; one of them overwrites these."""
    call = draw(kind, shape, block=5, pending=[5, 2])
    emulation.seed(seed)
    written, twin = run(Emulated(emulation), call)[1], run(reference, call)[1]
    torch.testing.assert_close(written, twin, rtol=1e-5, atol=1e-5)


def test_keys_that_do_not_fit_in_registers_are_refused(emulation):
    with pytest.raises(ValueError, match="key_dim must be at most 256 on a GPU, got 257"):
        run(Emulated(emulation), draw("kda", (1, 2, 257, 6)))


def test_there_may_be_more_key_heads_than_counters(emulation):
    batch = emulation.NUM_COUNTERS // 2 + 3
    on, call = Emulated(emulation), draw("gated delta rule", (2, 2, 4, 36), batch, 2, 2, pending=1, keep=1)
    counters, twin = on.counters(torch.device("cpu")), sequences(call, slice(None))
    for _ in range(2):
        go_on(on, call)
        go_on(reference, twin)
        assert not counters.any()
    for name in WRITTEN:
        torch.testing.assert_close(call[name], twin[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_a_layer_may_start_before_the_one_ahead_has_run(emulation, seed):
    on, call = Emulated(emulation), draw("gated delta rule", SHAPE, block=5, pending=[3, 5], keep=[0, 4])
    x, weight = torch.randn(2, 5, 72, generator=torch.Generator().manual_seed(1)), torch.ones(72, 4)

    def layers():
        begun, window = call | {name: call[name].clone() for name in WRITTEN}, torch.ones(2, 8, 72)
        y = on.causal_conv_(x, weight, None, True, window, call["pending"], call["keep"])
        k = y.view(2, 5, 2, 36)
        one = go_on(on, begun, k=k)
        two = go_on(on, begun, k=k, v=one)
        return y, one, two, on.silu_mul(two.view(10, 240)), window, *(begun[name] for name in WRITTEN)

    on.check_overlapping(layers, seed)


@pytest.mark.cuda
def test_a_graph_gives_the_same_bits_on_a_gpu():
    call = {n: x.cuda() for n, x in draw("gated delta rule", SHAPE, block=5, pending=[5, 2], keep=1).items()}
    x, weight, window = torch.randn(2, 5, 8).cuda(), torch.ones(8, 4).cuda(), torch.ones(2, 8, 8).cuda()
    held, begun = sequences(call, slice(None)), window.clone()

    def layer(window, call):
        return [
            ops.causal_conv_(x, weight, None, True, window, call["pending"], call["keep"]),
            go_on(ops, call),
        ]

    want = layer(window, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        have = layer(begun, held)
    graph.replay()
    written = [[each[name] for name in WRITTEN] for each in (held, call)]
    assert same([*have, begun, *written[0]], [*want, window, *written[1]])
