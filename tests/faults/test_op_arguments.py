"""An op given tensors of any shape, strides and values returns what plain torch does, or says what is wrong."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_calls import CALLS, as_list, assert_same, copied, op_of, packed_for, run, run_twin
from torch import Tensor

from dflash import ops

pytestmark = [pytest.mark.op, pytest.mark.long]
INT64 = (-(2**63), 2**63 - 1)
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}

DISGUISES = {
    "as it is": lambda x: x,
    "offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda x: torch.stack([x, torch.zeros_like(x)], -1)[..., 0],
    "padded": lambda x: torch.cat([x, x[..., :1]], -1)[..., : x.shape[-1]] if x.dim() and x.shape[-1] else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() and len(x) and (x == x[:1]).all() else x,
    "negative": lambda x: negative(x) if x.is_floating_point() else x,
    "negative strided": lambda x: x if not x.is_floating_point() else torch._neg_view(-torch.stack([x, x], -1)[..., 0]),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "gradient": lambda x: x.detach().clone().requires_grad_() if x.is_floating_point() else x,
}


def negative(x: Tensor) -> Tensor:
    """Return a view with the values of ``x`` whose memory holds minus them."""
    view = torch._neg_view((-x).contiguous())
    assert view.is_neg()
    return view


@settings(examples(8), suppress_health_check=[*HealthCheck])
@given(data=st.data())
@pytest.mark.parametrize("op", CALLS)
def test_disguised_tensors_give_what_plain_ones_do(op, data):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    layers = packed_for(op)
    call = CALLS[op]() | ({"layers": layers.handle} if layers else {})
    plain = {name: value for name, value in copied(call).items() if name != "layers"}
    written = getattr(ops, op_of(op)).op.contract.writes

    def disguise(name: str, x: Tensor) -> Tensor:
        kinds = [kind for kind in DISGUISES if "negative" not in kind or name not in written]
        kind = data.draw(st.sampled_from(kinds))
        return DISGUISES[kind](x) if x.dim() else x

    def change(name: str, value: object) -> object:
        if isinstance(value, list):
            return [disguise(name, x) for x in value]
        return disguise(name, value) if isinstance(value, Tensor) else value

    disguised = {name: change(name, value) for name, value in call.items()}
    with torch.no_grad():
        refusal = None
        try:
            ours = run(op, disguised)
        except ValueError as error:
            refusal = str(error)
        if refusal is None:
            assert_same(ours, run_twin(op, plain, layers), 1e-3, 1e-3)
        else:
            assert re.search("must be contiguous|evenly spaced", refusal)


ODD = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-30, 3e38, 1.0, 0.7, 0.9, 5.0)
# What a contract does not say of sizes, numbers and integers, by name, alone or after the op's: bounds, values to
# choose from, or what it follows from. All others are 0 to 5.
RANGES: dict[str, tuple[int | str, int | str] | list[float] | str] = {
    **{f"{op}.columns": "width" for op in ("linear", "swiglu")},  # of dense weights
    # sizes
    "batch": [2, 1, 4, 0], "rows": [3, 1, 5, 0], "hidden": (1, 40), "capacity": (1, 12), "vocab": [65, 1, 3, 64, 300],
    "head_dim": (1, 40), "columns": "2 * size(0, 40)", "half": (0, "head_dim // 2"), "positions": (1, 9),
    "q_rows": (0, "rows"), "out_features": (0, 40), "in": (0, 70),
    "path_rows": (1, 8), "out_rows": "path_rows + size(0, 2)", "width": (1, 40), "rank": (1, 40), "codes": (8, 40),
    "depths": (1, 4), "num_heads": "num_kv_heads * size(1, 3)", "heads": "key_heads * size(1, 2)", "key_heads": (1, 2),
    "key_dim": (1, 40), "value_dim": (1, 40), "channels": (0, 80), "slots": (0, 5), "num_stop_tokens": (0, 2),
    "linear.rows": (0, 20), "swiglu.rows": (0, 20), "gather_rows_.rows": (1, 5), "accept_prefix_.rows": (1, 6),
    "accept_path_.rows": (1, 7), "build_tree.rows": [1, 2, 16, 64, 65, 128], "draft_rows.vocab": (1, 9),
    "dynamic_conv.hidden": "12 * size(1, 3)", "conv_add_rms_norm.hidden": "12 * size(1, 3)", "groups": [1, 2, 3, 4, 12],
    "dynamic_conv.width": (1, 5), "conv_add_rms_norm.width": (1, 5), "causal_conv_.width": (1, 5),
    "causal_conv_.slots": "width - 1 + block", "append_context_kv_.columns": "2 * num_kv_heads * head_dim",
    "append_context_kv_.num_kv_heads": (1, 3), "append_context_kv_.num_layers": (1, 3),
    "qkv_norm_rope_append_.num_heads": (0, 5),
    "block_attention.num_kv_heads": (1, 3), "block_attention.capacity": (1, 80), "block_attention.rows": [4, 1, 7, 0],
    "block_attention.head_dim": [16, 1, 7, 8, 24], "v_head_dim": [8, 1, 16],
    "lists": "batch * depths",
    # numbers
    "eps": [1e-6], "scale": [0.3, 0.0, -1.0], "window": [0, 1, 5, 80, 2**62, 2**63 - 1], "softcap": [0.0, 5.0],
    "draft_rows.rows": (0, "num_drafts + 1"), "mask_id": (0, "vocab - 1"), "count": (1, 6), "stream": (0, 1),
    "noise_weight": [0.0, 0.1, 0.5, 1.0], "silu_mul.gate": ["silu", "gelu_tanh"],
    # integers of the device
    "counts": (-1, "rows_per_sequence + 1"), "compact_kv_.counts": (-1, "path_rows + 1"), "first": (-2, "capacity"),
    "num_context": (-1, "rows + 1"), "lengths": ("-rows - 1", "capacity + 9"), "length": (-2, "capacity + 1"),
    "depth": (0, 9),
    "limits": (0, "capacity + 2"), "tokens": (-1, 9), "drafts": (-1, "vocab"), "top_k": (-1, 9), "anchor": (-1, 9),
    "path": (-1, 9), "pending": (0, "block"), "keep": (0, "rows"), "done": (0, 1), "stop_token_ids": (0, 3),
    **dict.fromkeys(("block_ids", "posterior", "ids", "parents", "choices"), (-1, 3)),
    **{f"{op}.positions": (0, 99) for op in ("select_tokens", "tree_candidates", "top_candidates", "walk_candidates")},
}  # fmt: skip
# Integers that differ within a row: how many there are from -2 on.
DISTINCT = {
    **dict.fromkeys(("walk_candidates.ids", "link_candidates.ids"), "codes + 3"), "build_tree.ids": "9",
    "append_kv_.positions": "capacity + 4", "append_context_kv_.positions": "capacity + 4",
}  # fmt: skip
# Numbers of which only some mean anything. Sums of eighths are exact: a choice does not hang on rounding.
_PAIRS = ("hidden", "predecessors", "successors", "logits", "scores")
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "gated_recurrence_.log_decay": lambda x: -x.abs(),
    "gated_recurrence_.saved_a": torch.sigmoid,
    "build_tree.scores": lambda x: (-x.abs() * 4).round().div(4).sort(-1, descending=True).values,
    **dict.fromkeys(
        (f"{op}_candidates.{name}" for op in ("walk", "link") for name in _PAIRS),
        lambda x: x.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1).mul(8).round().div(8),
    ),
}
LEFT_OUT = {"ancestors", "scales", "format", "prefetch", "fresh", "gated", "front_rows", "order"}  # the defaults
OPS = [
    *("rms_norm", "add_rms_norm", "dynamic_conv", "conv_add_rms_norm", "silu_mul", "fuse_features", "linear", "swiglu"),
    *("draft_rows", "block_attention", "append_kv_", "qkv_norm_rope_append_", "append_context_kv_", "select_tokens"),
    *("tree_candidates", "top_candidates", "walk_candidates", "link_candidates", "build_tree"),
    *("accept_prefix_", "accept_path_"),
    *("compact_kv_", "gather_rows_", "gated_recurrence_", "causal_conv_"),
]


class Drawn(dict):
    """The sizes and numbers of a call by name. Each is drawn when it is first asked for."""

    def __init__(self, op: str, data: st.DataObject) -> None:
        super().__init__(size=lambda low, high: data.draw(st.integers(low, high)))
        self.op, self.data = op, data
        self.generator = torch.Generator().manual_seed(self["size"](0, 2**31))

    def __missing__(self, name: str) -> float:
        found = self.range_of(name)
        if isinstance(found, str):
            self[name] = self.value(found)
        else:
            self[name] = self.data.draw(st.sampled_from(found) if isinstance(found, list) else st.integers(*found))
        return self[name]

    def range_of(self, name: str) -> tuple[int, int] | list[float] | str:
        found = RANGES.get(f"{self.op}.{name}", RANGES.get(name, (0, 5)))
        return tuple(map(self.value, found)) if isinstance(found, tuple) else found

    def value(self, expression: int | str) -> int:
        return eval(str(expression), {}, self)

    def flag(self) -> bool:
        return self.data.draw(st.booleans())

    def tensor(self, name: str, shape: list[int], kind: str | None, dtype: torch.dtype) -> Tensor:
        """Draw a tensor: normal numbers, sometimes special ones among them, or integers, some anywhere in 64 bits."""
        key, count = f"{self.op}.{name}", math.prod(shape)
        if key in DISTINCT:
            order = torch.rand(*shape[:-1], self.value(DISTINCT[key]), generator=self.generator).argsort(-1)
            return order[..., : shape[-1]].contiguous() - 2
        if kind == "i64":
            one = st.integers(*self.range_of(name))
            one = one | one | st.sampled_from(INT64) | st.integers(*INT64)
            return torch.tensor([self.data.draw(one) for _ in range(count)], dtype=torch.int64).view(shape)
        if name in ("temperature", "top_p", "min_p", "sharpness"):
            return torch.tensor([self.data.draw(st.sampled_from(ODD)) for _ in range(count)])
        x = torch.randn(shape, generator=self.generator)
        if self["size"](0, 4) == 4 and count:
            for _ in range(self["size"](1, 3)):
                special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40]
                x.view(-1)[self["size"](0, count - 1)] = self.data.draw(st.sampled_from(special))
        return CHANGES.get(key, torch.clone)(x.to(torch.float32 if kind in ("f32", "float") else dtype))


def draw_call(op: str, data: st.DataObject, dtype: torch.dtype) -> dict[str, object]:
    """Draw the arguments of an op as its contract wants them."""
    drawn, contract, call = Drawn(op, data), getattr(ops, op).op.contract, {}
    drawn["gated"] = False
    specs = {spec.name: spec for spec in contract.tensors}

    def tensor(spec) -> Tensor:
        dims = [spec.leading] if spec.leading else []
        dims += [dim.rstrip("?") for dim in spec.sizes if not dim.endswith("?") or drawn.setdefault(dim, drawn.flag())]
        shape = [drawn["size"](0, 9) if dim == "*" else drawn[dim] if dim == "in" else drawn.value(dim) for dim in dims]
        return drawn.tensor(spec.name, shape, spec.dtype, dtype)

    for name, parameter in contract.parameters.items():
        if name in LEFT_OUT:
            continue
        if name not in specs:
            call[name] = drawn.flag() if parameter.annotation is bool else drawn[name]
        elif specs[name].is_optional and drawn.flag() and (name != "num_context" or drawn["q_rows"] == drawn["rows"]):
            call[name] = None
        else:
            count = specs[name].count
            call[name] = [tensor(specs[name]) for _ in range(drawn[count])] if count else tensor(specs[name])
    return call


def check(op, data, place, dtypes):
    """Hold an op against its twin on one example."""
    dtype = data.draw(st.sampled_from(dtypes))
    call, tolerance = draw_call(op, data, dtype), TOLERANCE[dtype]
    theirs = run_twin(op, copied(call))
    spoilt = any(not x.isfinite().all() for value in call.values() for x in as_list(value))
    ours = run(op, copied(call), place)
    if spoilt and op in ("linear", "swiglu", "fuse_features", "block_attention", "gated_recurrence_"):
        # Sums with infinities are infinite or NaN, by the order of the additions.
        ours, theirs = ([x.nan_to_num(0.0, 0.0, 0.0) if x.isfinite().all() else x * 0 for x in side]
                        for side in (ours, theirs))  # fmt: skip
        ours, theirs = ([x.nan_to_num(0.0) for x in side] for side in (ours, theirs))
    assert_same(ours, theirs, tolerance, tolerance)


@settings(examples(12), suppress_health_check=[*HealthCheck])
@given(data=st.data())
@pytest.mark.parametrize("op", OPS)
def test_any_shapes_and_values_give_what_the_twin_gives(op, data):
    check(op, data, ops, [torch.float32, torch.bfloat16])


@settings(examples(6), suppress_health_check=[*HealthCheck])
@given(data=st.data())
@pytest.mark.parametrize("op", OPS)
def test_any_shapes_and_values_on_an_emulated_gpu_give_what_the_twin_gives(op, emulation, data):
    from op_checks import Emulated

    check(op, data, Emulated(emulation), [torch.float32, torch.bfloat16, torch.float16])
