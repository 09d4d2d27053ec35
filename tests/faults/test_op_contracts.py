"""An op takes what its contract says: plain calls go straight to the kernel, others are refused by name."""

import pytest
import torch
from op_calls import (
    BATCH,
    CALLS,
    CAPACITY,
    DIM,
    HEADS,
    HIDDEN,
    ROWS,
    copied,
    op_of,
    packed_for,
    replaced,
    resized,
    run,
    run_twin,
)  # fmt: skip
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from dflash import ops
from dflash.ops.registry import CpuLauncher

pytestmark = pytest.mark.op
OPS = [name for name in CALLS if "decoder_layers" not in name]


def contract_of(name):
    return getattr(ops, op_of(name)).op.contract


def arguments_of(name, call):
    """Return every argument of a call in order."""
    return [call.get(p.name, p.default) for p in contract_of(name).parameters.values()]


def tensors_of(call):
    values = [y for x in call.values() for y in (x if isinstance(x, list) else [x])]
    return [x for x in values if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", CALLS)
def test_plain_tensors_reach_the_kernel_directly_with_the_bits_of_a_checked_call(name):
    layers = packed_for(name)
    call = CALLS[name]() | ({"layers": layers.handle} if layers else {})
    other, op = copied(call), getattr(ops, op_of(name)).op
    direct = op.direct(*arguments_of(name, call))
    assert direct is not NotImplemented
    checked = op.run(CpuLauncher(), *arguments_of(name, other))
    returned = [x if isinstance(x, tuple) else () if x is None else (x,) for x in (direct, checked)]
    for a, b in zip((*returned[0], *tensors_of(call)), (*returned[1], *tensors_of(other)), strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.dflash, op_of(name)).default, (*arguments_of(name, CALLS[name]()),))


@pytest.mark.parametrize("name", OPS)
def test_a_twin_runs_without_data(name):
    """Under FakeTensorMode reading a value is an error: a twin that did could not run inside a CUDA graph."""
    call = CALLS[name]()
    real = run_twin(name, copied(call))
    with FakeTensorMode() as mode:
        fake = run_twin(name, tree_map_only(torch.Tensor, mode.from_tensor, call))
    described = [[(x.shape, x.dtype, x.stride()) for x in results] for results in (real, fake)]
    assert described[0] == described[1]


@pytest.mark.parametrize("name", OPS)
def test_a_tensor_of_another_shape_or_dtype_is_named(name):
    contract = contract_of(name)
    for spec in contract.tensors:
        call = CALLS[name]()
        good = call.get(spec.name)
        if good is None or (isinstance(good, list) and not good):
            continue

        def refused(change, kind, message, good=good, spec=spec):
            value = [change(good[0]), *good[1:]] if spec.count else change(good)
            with pytest.raises(kind, match=f"{contract.op}: {spec.name}{message}"):
                run(name, CALLS[name]() | {spec.name: value})

        if not spec.is_optional and not spec.count and len(contract.tensors) > 1:
            refused(lambda x: None, TypeError, " must be a tensor, got None")
        if not spec.leading:
            refused(lambda x: x[..., None, None], ValueError, r".* must be \[.*\], got \d dimensions")
        is_first = spec is next((s for s in contract.tensors if s.dtype is None), None)
        if spec.dtype not in ("any", "float") and not is_first:
            wrong = torch.int32 if spec.dtype == "i64" else torch.float64
            refused(lambda x, wrong=wrong: x.to(wrong), TypeError, r".* must be torch\.")
        if spec.is_written:
            refused(lambda x: torch.stack([x, x], -1)[..., 0], ValueError, ".* (must be contiguous|needs .*evenly)")


class Subclass(torch.Tensor):
    pass


MISFITS = {
    "on another device": lambda t: t.to("meta"),
    "freed": lambda t: resized(t, 0),
    "cut short": lambda t: resized(t, t.nbytes - 1),
    "of a subclass": lambda t: t.as_subclass(Subclass),
    "in half precision": lambda t: t.to(torch.float16),
    "a dimension more": lambda t: t[None],
    "columns apart": lambda t: torch.stack([t, t], -1)[..., 0],
    "minus its bytes": lambda t: torch._neg_view(t) if t.is_floating_point() else t.to("meta"),  # as parts of complex
    "sparse": torch.Tensor.to_sparse,
    "not a tensor": torch.Tensor.tolist,
}


@pytest.mark.parametrize("name", OPS)
def test_any_other_tensor_does_not_reach_the_kernel_and_nothing_is_written(name):
    specs = {spec.name: spec for spec in contract_of(name).tensors}
    for misfit, change in MISFITS.items():
        for argument, changed in replaced(plain := CALLS[name](), change):
            spec = specs[argument.split("[")[0]]
            if (misfit == "a dimension more" and spec.leading) or (
                misfit == "in half precision" and spec.dtype == "any"
            ):
                continue
            before = copied(plain)
            direct = getattr(ops, op_of(name)).op.direct(*arguments_of(name, changed))
            assert direct is NotImplemented, (argument, misfit)
            for tensor, same in zip(tensors_of(plain), tensors_of(before), strict=True):
                assert torch.equal(tensor, same), (argument, misfit)


@pytest.mark.parametrize("name", [name for name in OPS if name not in ("silu_mul", "log_sum_exp")])  # which have one
def test_a_tensor_on_another_device_is_named(name):
    """A kernel would read its address on the wrong one."""
    for _, call in replaced(CALLS[name](), lambda x: x.to("meta")):
        with pytest.raises(ValueError, match=rf"^{name}: all tensors must be on (cpu|meta) as the first is, got"):
            run(name, call)


i64 = torch.int64
RULES = [
    ("rms_norm", {"x": torch.ones(BATCH * ROWS, HIDDEN)}, "counts must be .batch. = .1., got .2."),
    ("rms_norm", {"x": torch.ones(1, 2, ROWS, HIDDEN)}, r"ndim\(x\) == 3 or not .* must hold, got ndim\(x\) = 4"),
    ("dynamic_conv", {"base": torch.ones(0, HIDDEN), "dynamic": torch.ones(BATCH, ROWS, 0, 4)}, "width >= 1"),
    ("draft_rows", {"rows": ROWS + 2}, "0 <= rows <= num_drafts . 1 must hold, got rows = 5, num_drafts = 3"),
    ("draft_rows", {"mask_embedding": None, "mask_id": 70}, "mask_id < vocab must hold"),
    ("silu_mul", {"gate_up": torch.ones(2, 7)}, "columns % 2 == 0 must hold, got columns = 7"),
    ("linear", {"x": torch.ones(ROWS, HIDDEN + 1)}, r"weight must be \[out_features, columns\] = \[24, 17\]"),
    ("linears", {"weights": [], "biases": []}, "1 <= count <= 4 must hold, got count = 0"),
    ("linears", {"biases": [torch.ones(24), torch.ones(6)]}, r"biases\[1\] must be \[out\] = \[5\], got \[6\]"),
    ("experts", {"gate": "relu"}, "gate must be one of silu, gelu_tanh, clamped_silu, got 'relu'"),
    ("block_attention", {"softcap": -1.0}, "softcap must be positive, or 0 for none, got softcap = -1.0"),
    ("block_attention", {"ancestors": torch.zeros(BATCH, ROWS, 1, dtype=i64), "causal": False}, "causal must be True"),
    ("qkv_norm_rope_append_", {"num_context": None}, r"q_rows == rows or has\(num_context\) must hold"),
    ("qkv_norm_rope_append_", {n: torch.ones(CAPACITY, 5) for n in ("cos", "sin")}, "2 . half <= head_dim"),
    ("append_context_kv_", {"k_caches": []}, "k_caches must have num_layers = 2 tensors, got 0|v_caches must have"),
    ("top_candidates", {"count": 0}, "1 <= count <= 128 must hold, got count = 0"),
    ("tree_candidates", {"noise_weight": 1.5}, "noise_weight must be from 0 to 1, got noise_weight = 1.5"),
    ("build_tree", {"rows": 129}, "1 <= rows <= 128 must hold, got rows = 129"),
    ("accept_path_", {n: torch.zeros(BATCH, 129, dtype=i64) for n in ("ids", "parents", "choices")}, "rows <= 128"),
    ("gather_rows_", {"out": torch.zeros(BATCH, 1, HIDDEN)}, "path_rows <= out_rows must hold, got path_rows = 2"),
    ("gated_recurrence_", {"log_decay": torch.zeros(BATCH, ROWS, HEADS, DIM)}, r"ndim\(log_decay\) == ndim\(saved_a\)"),
    ("causal_conv_", {"window": torch.ones(BATCH, 2, HIDDEN)}, "slots >= width - 1 must hold, got slots = 2"),
    ("delta_net_inputs", {"key_dim": 9 * DIM}, "value_dim >= 1 must hold, got .*value_dim = -56"),
    ("gated_rms_norm", {"z": torch.ones(BATCH, ROWS, 33)}, r"z must be .* = \[2, 3, 32\]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), RULES, ids=range(len(RULES)))
def test_a_call_that_breaks_a_rule_is_told_what_must_hold(name, change, message):
    with pytest.raises(ValueError, match=message):
        run(name, CALLS[name]() | change)


def test_packed_weights_need_scales_and_dense_ones_must_have_none():
    x, values, scales = torch.ones(2, 8), torch.ones(4, 64, dtype=torch.uint8), torch.ones(4)
    for weight, given, name in ((values, None, "w8a8"), (torch.ones(4, 8), scales, "dense")):
        with pytest.raises(ValueError, match=r"only int8 has scales apart"):
            ops.linear(x, weight, scales=given, format=name)
    for weight, given, name in ((values, None, "dense"), (torch.ones(4, 64), scales, "w8a8")):
        with pytest.raises((TypeError, ValueError), match=r"weight must be (torch\.uint8|\[out_features, columns\])"):
            ops.linear(x, weight, scales=given, format=name)
    with pytest.raises(TypeError, match=r"weights\[0\] must be torch\.float32, got torch\.uint8"):
        ops.linears(x, [values[:, :8]])
    with pytest.raises(ValueError, match=r"weights\[1\] must be \[\*, columns\] = \[\*, 64\], got \[4, 8\]"):
        ops.linears(x, [values, values[:, :8]], scales=torch.ones(8), format="w8a8")
    with pytest.raises(ValueError, match=r"scales must be \[total_rows\(weights\)\] = \[8\], got \[4\]"):
        ops.linears(x, [values, values], scales=scales, format="w8a8")
    with pytest.raises(ValueError, match=r"format must be one of dense, w8a8, w8a16, q4_0, .*, w8a16g16k, got 'int4'"):
        ops.linear(x, values, scales=scales, format="int4")


def test_a_storage_type_without_kernels_is_named():
    with pytest.raises(TypeError, match=r"rms_norm: x must be float32 or bfloat16 on CPU, got torch\.float64"):
        ops.rms_norm(torch.ones(2, 8).double(), torch.ones(8).double(), 1e-6)
