"""No op reads or writes memory that its tensors do not have, however they were freed, cut, disguised or overlapped."""

import pytest
import torch
from op_calls import BATCH, CALLS, CAPACITY, HIDDEN, ROWS, assert_same, copied, make_layers, op_of, pack, run, run_twin
from process import python

from dflash import ops

pytestmark = pytest.mark.op
_, STOP, LIMIT, _ = ops.ROW_STATES
HOSTILE_LENGTHS = [-(2**63), -(2**62), -CAPACITY - 1, -ROWS, -1, CAPACITY - 1, CAPACITY, 1000, 2**31, 2**62, 2**63 - 1]

# Every attempt of a child prints one line, "op argument kind: outcome", and may crash it on its own.
CHILD = """
    import sys, warnings
    warnings.simplefilter("ignore")
    import torch
    from op_calls import (
        CALLS, RECURRENT, assert_same, copied, make_layers, make_recurrent_layers, pack, packed_for, replaced, run,
        run_twin, written,
    )

    def attempts(kinds):
        for name, make in CALLS.items():
            for kind, change in kinds.items():
                torch.manual_seed(0)
                layers = packed_for(name)
                plain = make() | ({"layers": layers.handle} if layers else {})
                for argument, call in replaced(plain, change):
                    if any(x is None for value in call.values() for x in (value if isinstance(value, list) else [0])):
                        continue
                    try:
                        run(name, call)
                        outcome = "ran"
                    except Exception as error:
                        outcome = type(error).__name__ + " " + str(error).splitlines()[0]
                    print(name, argument, kind + ":", outcome, flush=True)
"""

FREED = """
    def freed(tensor):
        tensor = tensor.clone()
        tensor.untyped_storage().resize_(0)
        return tensor

    def cut(tensor):
        tensor = tensor.clone()
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size() - 1)
        return tensor

    def freed_view(tensor):
        whole = torch.zeros(tensor.numel() + 1000, dtype=tensor.dtype)
        view = whole[1000:].view(tensor.shape)
        whole.untyped_storage().resize_(0)
        return view

    def cut_view(tensor):
        whole = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)
        view = whole[tensor.numel():].view(tensor.shape)
        whole.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        return view

    attempts({"freed": freed, "cut": cut, "freed view": freed_view, "cut view": cut_view})
"""


def outcomes(code: str) -> list[tuple[str, str, str]]:
    """Run attempts in a child; return (op, argument and kind, outcome) of each."""
    done = python(CHILD + code)
    assert done.returncode == 0, f"after {done.stdout.splitlines()[-1:]}:\n{done.stderr[-2000:]}"
    lines = [line.split(": ", 1) for line in done.stdout.splitlines()]
    return [(attempt.split()[0], attempt.split(" ", 1)[1], outcome) for attempt, outcome in lines]


def test_a_tensor_whose_storage_was_freed_or_cut_is_refused_by_name():
    found = outcomes(FREED)
    assert {op for op, _, _ in found} == {*CALLS}
    for op, attempt, outcome in found:
        argument = attempt.split()[0]
        wanted = f"ValueError {op_of(op)}: {argument} must be in memory, but its storage holds"
        assert outcome.startswith(wanted), attempt


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


AFTER = """
    def run_layers(change, kind="decoder_layers", make=make_layers, index=1):
        torch.manual_seed(0)
        layers, norm = make()
        packed = pack(layers, norm)
        call = CALLS[kind]() | {"layers": packed.handle}
        run(kind, copied(call))
        try:
            change(layers[index])
        except RuntimeError:
            return "torch refuses"
        try:
            ours = run(kind, copied(call))
        except Exception as error:
            return type(error).__name__ + " " + str(error).splitlines()[0]
        assert_same(ours, run_twin(kind, copied(call), packed))
        return "equal"

    def data(change):
        return lambda x: setattr(x, "data", change(x.data))

    def freed_twice(x):  # the second memory may be where the first one was
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(8)

    def moved(x):
        values = x.clone()
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(values.numel() * 4)
        x.copy_(values)

    kinds = {
        "transposed": lambda x: x.t_(), "transposed data": data(torch.Tensor.t), "smaller": data(lambda x: x[:-1]),
        "empty": data(lambda x: x[:0]), "flat": data(torch.Tensor.flatten), "double": data(torch.Tensor.double),
        "half": data(torch.Tensor.half), "strided": data(lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]]),
        "expanded": data(lambda x: x[:1].expand(x.shape)), "freed": lambda x: x.untyped_storage().resize_(0),
        "cut": lambda x: x.untyped_storage().resize_(8), "freed twice": freed_twice, "emptied": lambda x: x.resize_(0),
        "set": lambda x: x.set_(torch.zeros(2)), "meta": data(lambda x: x.to("meta")),
        "sparse": data(torch.Tensor.to_sparse), "replaced": data(lambda x: x * 2), "in place": lambda x: x.mul_(0.5),
        "moved": moved,
    }
    for kind, change in kinds.items():
        for name in ("q", "down", "input_norm", "k_norm", "o_bias", "sinks"):
            if "transposed" in kind and getattr(make_layers()[0][1], name).dim() < 2:
                continue
            outcome = run_layers(lambda layer: change(getattr(layer, name)))
            print("decoder_layers", name, kind + ":", outcome, flush=True)
        for name in () if "transposed" in kind else ("qkv", "conv", "dt_bias", "out"):
            outcome = run_layers(lambda layer: change(getattr(layer, name)), RECURRENT, make_recurrent_layers, 0)
            print(RECURRENT, name, kind + ":", outcome, flush=True)
"""
STILL_RIGHT = {"replaced", "in place", "moved"}


def test_weights_spoiled_after_their_handle_was_made_are_refused_by_name():
    for call, attempt, outcome in outcomes(AFTER):
        (name, kind), index = attempt.split(" ", 1), 1 if call == "decoder_layers" else 0
        if kind in STILL_RIGHT:
            assert outcome == "equal", attempt
        elif outcome == "torch refuses":
            assert kind in ("meta", "sparse"), attempt
        elif outcome != "equal":
            assert outcome.split()[0] in ("TypeError", "ValueError"), (attempt, outcome)
            # Not always by the spoiled tensor's name: if it says how wide the layer is, another one does not fit it.
            assert f"layers[{index}]." in outcome, (attempt, outcome)
        else:
            flat = name not in ("q", "down", "qkv", "conv", "out") and kind in (
                "flat",
                "strided",
            )  # nothing changes in one dimension
            assert flat or (name == "sinks" and kind in ("double", "half")), attempt


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
