"""No op reads or writes memory that its tensors do not have, however they were freed, cut, disguised or overlapped."""

import re

import pytest
import torch
from op_calls import (
    BATCH,
    CALLS,
    CAPACITY,
    HIDDEN,
    RECURRENT,
    ROWS,
    assert_same,
    copied,
    make_layers,
    make_recurrent_layers,
    op_of,
    pack,
    packed_for,
    replaced,
    resized,
    run,
    run_twin,
)  # fmt: skip

from dflash import ops

pytestmark = pytest.mark.op
_, STOP, LIMIT, _ = ops.ROW_STATES
HOSTILE_LENGTHS = [-(2**63), -(2**62), -CAPACITY - 1, -ROWS, -1, CAPACITY - 1, CAPACITY, 1000, 2**31, 2**62, 2**63 - 1]

FREED = {
    "freed": lambda x: resized(x, 0),
    "cut": lambda x: resized(x, x.nbytes - 1),
    "freed view": lambda x: resized(x, 0, before=1000),
    "cut view": lambda x: resized(x, x.nbytes, before=x.numel()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_whose_storage_was_freed_or_cut_is_refused_by_name(name):
    layers = packed_for(name)
    plain = CALLS[name]() | ({"layers": layers.handle} if layers else {})
    for change in FREED.values():
        changed = list(replaced(plain, change))
        assert changed
        for argument, call in changed:
            wanted = f"{op_of(name)}: {argument} must be in memory, but its storage holds"
            with pytest.raises(ValueError, match=f"^{re.escape(wanted)}"):
                run(name, call)


@pytest.mark.parametrize("limit", [-(2**63), -1, 0, CAPACITY, 2**63 - 1])
def test_a_length_without_room_emits_nothing(limit, implementation):
    for length in HOSTILE_LENGTHS:
        around = torch.full((3 * BATCH, CAPACITY), -7)
        call = CALLS["accept_prefix_"]() | {"tokens": around[BATCH : 2 * BATCH]}
        call |= {"length": torch.tensor([length, 3]), "limits": torch.tensor([limit, 9])}
        call |= {"block_ids": torch.tensor([[9, 1, 2], [8, 4, 4]]), "posterior": torch.tensor([[1, 2, 3], [4, 5, 6]])}
        implementation.accept_prefix_(**call)
        assert call["length"].tolist() == [length, 5]
        assert call["num_context"].tolist() == [0, 2]
        assert call["done"].tolist() == [LIMIT, STOP]
        assert (around != -7).nonzero().tolist() == [[BATCH + 1, 4], [BATCH + 1, 5]]


@pytest.mark.parametrize("length", HOSTILE_LENGTHS)
@pytest.mark.parametrize("num_context", [-(2**63), -1, 0, 5, 2**63 - 1])
def test_decoder_layers_at_lengths_outside_the_cache_are_their_twin(length, num_context):
    layers, norm = make_layers()
    layers[1] = layers[1]._replace(causal=False, window=4)
    packed = pack(layers, norm)
    call = CALLS["decoder_layers"]() | {"layers": packed.handle, "lengths": torch.tensor([length, 6])}
    call["num_context"] = torch.tensor([num_context, 2])
    assert_same(run("decoder_layers", copied(call)), run_twin("decoder_layers", copied(call), packed), 1e-3, 1e-3)


@pytest.mark.parametrize("op", ["append_kv_", "append_context_kv_"])
def test_positions_outside_the_cache_append_nothing(op, kernels):
    for first in HOSTILE_LENGTHS:
        call = CALLS[op]()
        call["positions"] = torch.tensor([[first, -1, CAPACITY], [2, 2**63 - 1, 5]])
        if first == CAPACITY - 1:
            call["positions"][0, 0] = 2**40
        assert_same(run(op, copied(call), kernels), run_twin(op, copied(call)), 1e-3, 1e-3)


def set_data(change):
    return lambda x: setattr(x, "data", change(x.data))


def freed_twice(x):  # the second memory may be where the first one was
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(8)


def moved(x):
    values = x.clone()
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(values.nbytes)
    x.copy_(values)


WEIGHTS = {
    "decoder_layers": (make_layers, 1, ("q", "down", "input_norm", "k_norm", "o_bias", "sinks")),
    RECURRENT: (make_recurrent_layers, 0, ("qkv", "conv", "dt_bias", "out")),
}
# How a weight is spoiled, and the weights for which that changes nothing.
VECTORS = ("input_norm", "k_norm", "o_bias", "sinks", "dt_bias")
ALL = [name for *_, names in WEIGHTS.values() for name in names]
SPOILED = {
    "transposed": (lambda x: x.transpose_(0, -1), VECTORS), "flat": (set_data(torch.Tensor.flatten), VECTORS),
    "transposed data": (set_data(lambda x: x.transpose(0, -1)), VECTORS),
    "smaller": (set_data(lambda x: x[:-1]), ()), "empty": (set_data(lambda x: x[:0]), ()),
    "double": (set_data(torch.Tensor.double), ("sinks",)),
    "half": (set_data(torch.Tensor.half), ("sinks",)), "emptied": (lambda x: x.resize_(0), ()),
    "strided": (set_data(lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]]), VECTORS),
    "expanded": (set_data(lambda x: x[:1].expand(x.shape)), ()), "freed twice": (freed_twice, ()),
    "freed": (lambda x: x.untyped_storage().resize_(0), ()), "cut": (lambda x: x.untyped_storage().resize_(8), ()),
    "set": (lambda x: x.set_(torch.zeros(2)), ()), "replaced": (set_data(lambda x: x * 2), ALL),
    "in place": (lambda x: x.mul_(0.5), ALL), "moved": (moved, ALL),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILED)
def test_weights_spoiled_after_their_handle_was_made_are_refused_by_name(kind):
    change, harmless = SPOILED[kind]
    for op, (make, index, names) in WEIGHTS.items():
        for name in names:
            layers, norm = make()
            packed = pack(layers, norm)
            call = CALLS[op]() | {"layers": packed.handle}
            run(op, copied(call))
            change(getattr(layers[index], name))
            if name in harmless:
                assert_same(run(op, copied(call)), run_twin(op, copied(call), packed))
                continue
            # Not always by its own name: if it says how wide the layer is, another one does not fit it.
            with pytest.raises((TypeError, ValueError), match=rf"layers\[{index}\]\."):
                run(op, copied(call))


@pytest.mark.parametrize(("op", "change", "message"), [
    ("add_rms_norm", lambda c: {"tap": c["x"]}, "tap is written in place and must not share memory with x"),
    ("add_rms_norm", lambda c: {"tap": torch.zeros(1, 1, HIDDEN).expand(BATCH, ROWS, -1)}, "evenly spaced"),
    ("append_kv_", lambda c: {"v_cache": c["k_cache"]}, "k_cache is written in place and must not share memory"),
    ("append_context_kv_", lambda c: {"k_caches": [c["k_caches"][0]] * 2}, r"k_caches\[0\] is written in place"),
    ("qkv_norm_rope_append_", lambda c: {"q_out": c["k_cache"].view(-1)[: 2 * 2 * 4 * 8].view(2, 2, 4, 8)}, "q_out"),
    ("accept_prefix_", lambda c: {"posterior": c["tokens"][:, :ROWS]}, "must not share memory with posterior"),
    ("accept_path_", lambda c: {"path": c["ids"][:, :2].contiguous(), "ids": c["tokens"][:, :ROWS]}, "with ids"),
    ("compact_kv_", lambda c: {"v_caches": [c["v_caches"][0], c["k_caches"][0]]}, r"with v_caches\[1\]"),
    ("gather_rows_", lambda c: {"out": c["x"]}, "out is written in place and must not share memory with x"),
    ("gated_recurrence_", lambda c: {"q": c["saved_k"][:, :ROWS]}, "saved_k is written in place and must not share"),
    ("causal_conv_", lambda c: {"x": c["window"][:, 3 : 3 + ROWS]}, "must not share memory with x"),
])  # fmt: skip
def test_written_tensors_that_overlap_are_refused_by_name(op, change, message):
    call = CALLS[op]()
    call |= change(call)
    with pytest.raises(ValueError, match=message):
        run(op, call)
