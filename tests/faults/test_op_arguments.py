"""An op given tensors of any shape, strides and values returns what plain torch does, or says what is wrong."""

import math
import re

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_calls import CALLS, as_list, assert_same, copied, packed_for, run, run_twin
from torch import Tensor

from dflash import ops

pytestmark = [pytest.mark.op, pytest.mark.long]
INT64 = (-(2**63), 2**63 - 1)
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}

# ---- ways to hold the same values

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

    def disguise(x: Tensor) -> Tensor:
        kind = data.draw(st.sampled_from([*DISGUISES]))
        return DISGUISES[kind](x) if x.dim() else x

    def change(name: str, value: object) -> object:
        if isinstance(value, list):
            return [disguise(x) for x in value]
        return disguise(value) if isinstance(value, Tensor) else value

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
            assert re.search("must be contiguous|evenly spaced|must not be a negative view", refusal)


# ---- shapes and values


class Draw:
    """Draws sizes, tensors and the values that only the device knows, from one example."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
        self.dtype = torch.float32

    def size(self, low: int = 0, high: int = 5) -> int:
        return self.data.draw(st.integers(low, high))

    def flag(self) -> bool:
        return self.data.draw(st.booleans())

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, and sometimes NaN, infinities, zeros and subnormal ones among them."""
        x = torch.randn(shape, generator=self.generator)
        if self.data.draw(st.integers(0, 4)) == 0 and x.numel():
            special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40]
            for _ in range(self.size(1, 3)):
                x.view(-1)[self.size(0, x.numel() - 1)] = self.data.draw(st.sampled_from(special))
        return x.to(dtype or self.dtype)

    def ints(self, count: int, low: int, high: int) -> Tensor:
        """Integers of which some are anywhere in 64 bits."""
        one = st.integers(low, high) | st.integers(low, high) | st.sampled_from(INT64) | st.integers(*INT64)
        return torch.tensor([self.data.draw(one) for _ in range(count)], dtype=torch.int64)

    def positions(self, batch: int, rows: int, capacity: int) -> Tensor:
        """Cache slots, different within a sequence where they are inside."""
        slots = [torch.randperm(capacity + 4, generator=self.generator)[:rows] - 2 for _ in range(batch)]
        positions = torch.stack(slots) if batch else torch.zeros(0, rows, dtype=torch.int64)
        if positions.numel() and self.flag():
            positions.view(-1)[0] = self.data.draw(st.sampled_from([*INT64, 2**40]))
        return positions

    def choice(self, *values: float) -> float:
        return self.data.draw(st.sampled_from(values))


def rms_norm(d: Draw) -> dict[str, object]:
    batch, rows, hidden = d.size(), d.size(), d.size(1, 40)
    counts = d.ints(batch, -1, rows + 1) if d.flag() else None
    return {
        "x": d.floats(batch, rows, hidden),
        "weight": d.floats(hidden),
        "eps": d.choice(1e-6, 0.0),
        "counts": counts,
        "front": d.floats(batch, d.size(), hidden) if d.flag() else None,
    }


def draft_rows(d: Draw) -> dict[str, object]:
    batch, capacity, vocab, hidden, num_drafts = d.size(), d.size(1), d.size(1, 9), d.size(1, 40), d.size()
    named = {"tokens": d.ints(batch * capacity, -1, vocab).view(batch, capacity), "length": d.ints(batch, -1, capacity)}
    named["drafts"] = d.ints(batch * num_drafts, -1, vocab).view(batch, num_drafts) if d.flag() else None
    named |= {"table": d.floats(vocab, hidden), "mask_id": d.size(0, vocab - 1), "num_drafts": num_drafts}
    named |= {"rows": d.size(0, num_drafts + 1), "mask_embedding": d.floats(hidden) if d.flag() else None}
    return named | {"scale": d.choice(1.0, 0.3, -2.0)}


def add_rms_norm(d: Draw) -> dict[str, object]:
    shape = (d.size(), d.size(), d.size(1, 40))
    tap = d.floats(*shape) if d.flag() else None
    if tap is not None and d.flag():
        tap = torch.zeros(*shape[:2], shape[2] + 3, dtype=d.dtype)[..., 2 : 2 + shape[2]]
    x, residual, weight = d.floats(*shape), d.floats(*shape), d.floats(shape[2])
    front = d.floats(shape[0], d.size(), shape[2]) if d.flag() else None
    return {"x": x, "residual": residual, "weight": weight, "eps": 1e-6, "tap": tap, "front": front}


def dynamic_conv(d: Draw) -> dict[str, object]:
    batch, rows, width, groups = d.size(), d.size(), d.size(1), d.size(1, 4)
    hidden = groups * d.size(1, 20)
    named = {"x": d.floats(batch, rows, hidden), "base": d.floats(width, hidden) * d.flag()}
    return named | {"dynamic": d.floats(batch, rows, width, groups) * d.flag()}


def conv_add_rms_norm(d: Draw) -> dict[str, object]:
    call = dynamic_conv(d)
    norm = {"residual": d.floats(*call["x"].shape), "weight": d.floats(call["x"].shape[2]), "eps": 1e-6}
    return call | norm | {"tap": d.floats(*call["x"].shape) if d.flag() else None, "zero_centered": d.flag()}


def silu_mul(d: Draw) -> dict[str, object]:
    return {"gate_up": d.floats(d.size(), d.size(), 2 * d.size(0, 40)) * d.choice(1, 100)}


def fuse_features(d: Draw) -> dict[str, object]:
    batch, rows, hidden, width = d.size(), d.size(), d.size(1, 20), d.size(1, 40)
    named = {"context": d.floats(batch, rows, width), "num_context": d.ints(batch, -1, rows + 1)}
    return named | {"fc_weight": d.floats(hidden, width), "norm_weight": d.floats(hidden), "eps": 1e-6}


def linear(d: Draw) -> dict[str, object]:
    out, width = d.size(0, 40), d.size(0, 70)
    bias = d.floats(out) if d.flag() else None
    return {"x": d.floats(d.size(), d.size(0, 20), width), "weight": d.floats(out, width), "bias": bias}


def linears(d: Draw) -> dict[str, object]:
    number, width, biased = d.size(1, 4), d.size(0, 70), d.flag()
    sizes = [d.size(0, 30) for _ in range(number)]
    weights = [d.floats(size, width) for size in sizes]
    if d.flag():  # one after another in one storage
        whole = torch.cat(weights)
        weights = [*whole.split(sizes)]
    return {"x": d.floats(d.size(0, 20), width), "weights": weights, "biases": [d.floats(n) for n in sizes] * biased}


def swiglu(d: Draw) -> dict[str, object]:
    out, width = d.size(0, 40), d.size(0, 70)
    return {"x": d.floats(d.size(), d.size(0, 20), width), "gate": d.floats(out, width), "up": d.floats(out, width)}


def block_attention(d: Draw) -> dict[str, object]:
    batch, rows, kv_heads, capacity = d.size(), d.size(0, 7), d.size(1, 3), d.size(1, 80)
    dim, v_dim = d.choice(1, 7, 8, 16, 24), d.choice(1, 8, 16)
    named = {
        "q": d.floats(batch, rows, kv_heads * d.size(1, 3), dim),
        "k_cache": d.floats(batch, kv_heads, capacity, dim),
    }
    named |= {"v_cache": d.floats(batch, kv_heads, capacity, v_dim), "lengths": d.ints(batch, -rows - 1, capacity + 9)}
    named |= {
        "scale": d.choice(0.3, 0.0, -1.0),
        "causal": d.flag(),
        "window": d.choice(0, 1, 5, capacity, 2**62, 2**63 - 1),
    }
    sinks = d.floats(named["q"].shape[2]) if d.flag() else None
    return named | {"softcap": d.choice(0.0, 5.0), "sinks": sinks}


def append_kv_(d: Draw) -> dict[str, object]:
    batch, heads, rows, dim, v_dim, capacity = d.size(), d.size(), d.size(), d.size(1, 9), d.size(1, 9), d.size(1, 9)
    rows = min(rows, capacity)
    named = {"key": d.floats(batch, heads, rows, dim), "value": d.floats(batch, heads, rows, v_dim)}
    named |= {"positions": d.positions(batch, rows, capacity), "k_cache": d.floats(batch, heads, capacity, dim)}
    return named | {"v_cache": d.floats(batch, heads, capacity, v_dim)}


def _rotary(d: Draw, batch: int, rows: int, capacity: int, dim: int) -> dict[str, object]:
    half = d.size(0, dim // 2)
    cos, sin = (d.floats(batch, rows, half, dtype=torch.float32) for _ in range(2))
    return {"positions": d.positions(batch, rows, capacity), "cos": cos, "sin": sin}


def qkv_norm_rope_append_(d: Draw) -> dict[str, object]:
    batch, rows, heads, kv_heads, dim, capacity = d.size(), d.size(), d.size(), d.size(), d.size(1, 40), d.size(3, 9)
    q_rows, cache, table = d.size(0, rows), (batch, kv_heads, capacity, dim), (d.size(1, 9), d.size(0, dim // 2))
    norms = [d.floats(dim) if d.flag() else None for _ in range(2)]
    counts = {"lengths": d.ints(batch, -rows - 1, capacity + 9)}
    counts["num_context"] = d.ints(batch, -1, rows + 1) if q_rows < rows or d.flag() else None
    counts["depth"] = d.ints(batch * q_rows, 0, 9).view(batch, q_rows) if d.flag() else None
    cos, sin = (d.floats(*table, dtype=torch.float32) for _ in range(2))
    named = {"qkv": d.floats(batch, rows, (heads + 2 * kv_heads) * dim), **counts, "cos": cos, "sin": sin}
    named |= {"q_norm_weight": norms[0], "k_norm_weight": norms[1], "eps": 1e-6}
    return named | {
        "q_out": d.floats(batch, q_rows, heads, dim),
        "k_cache": d.floats(*cache),
        "v_cache": d.floats(*cache),
    }


def append_context_kv_(d: Draw) -> dict[str, object]:
    layers, batch, rows, heads, dim, capacity = d.size(0, 3), d.size(), d.size(), d.size(), d.size(1, 40), d.size(3, 9)
    named = {"kv": d.floats(layers, batch, rows, 2 * heads * dim), **_rotary(d, batch, rows, capacity, dim)}
    named |= {"k_norm_weight": d.floats(layers, dim) if d.flag() else None, "eps": 1e-6}
    caches = [[d.floats(batch, heads, capacity, dim) for _ in range(layers)] for _ in range(2)]
    return named | {"k_caches": caches[0], "v_caches": caches[1]}


def _sampled_rows(d: Draw) -> dict[str, object]:
    batch, rows, vocab = d.size(), d.size(), d.choice(1, 3, 64, 65, 300)
    odd = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-30, 3e38, 1.0, 0.7, 0.9, 5.0)

    def numbers() -> Tensor:
        return torch.tensor([d.choice(*odd) for _ in range(batch)])

    named = {"logits": d.floats(batch, rows, vocab) * 3, "positions": d.ints(batch * rows, 0, 99).view(batch, rows)}
    named |= {"seeds": d.ints(batch, 0, 9), "temperature": numbers(), "top_k": d.ints(batch, -1, 9), "top_p": numbers()}
    return named | {"min_p": numbers(), "sharpness": numbers()}


def select_tokens(d: Draw) -> dict[str, object]:
    named = _sampled_rows(d)
    return named | ({"positions": d.ints(len(named["seeds"]), 0, 99)} if d.flag() else {})


def tree_candidates(d: Draw) -> dict[str, object]:
    batch, depths, vocab = d.size(), d.size(), d.choice(1, 3, 64, 65, 300)
    named = {"logits": d.floats(batch, depths, vocab) * 3}
    named |= {"positions": d.ints(batch * depths, 0, 99).view(batch, depths), "seeds": d.ints(batch, 0, 9)}
    odd = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-30, 3e38, 1.0, 0.7, 5.0)
    named |= {"temperature": torch.tensor([d.choice(*odd) for _ in range(batch)])}
    return named | {"count": d.size(1, 9), "noise_weight": d.choice(0.0, 0.1, 0.5, 1.0)}


def top_candidates(d: Draw) -> dict[str, object]:
    named = _sampled_rows(d)
    named = {name: named[name] for name in ("logits", "positions", "seeds", "temperature", "sharpness")}
    return named | {"count": d.size(1, 9)}


def walk_candidates(d: Draw) -> dict[str, object]:
    sampling = _sampled_rows(d)
    (batch, slots, _), codes, rank, count = sampling.pop("logits").shape, d.size(8, 40), d.size(1, 40), d.size(1, 6)

    def eighths(*shape: int) -> Tensor:  # their sums are exact: a choice does not hang on rounding
        return torch.randint(-8, 9, shape, generator=d.generator) / 8

    named = {"hidden": eighths(batch, slots, rank), "predecessors": eighths(codes, rank)}
    named = {name: x.to(d.dtype) for name, x in (named | {"successors": eighths(codes, rank)}).items()}
    ids = torch.rand(batch, slots, codes + 2, generator=d.generator).argsort(-1)[..., :count].contiguous() - 1
    named |= {"anchor": d.ints(batch, -1, codes + 1), "ids": ids, "logits": eighths(batch, slots, count)}
    return named | sampling | {"stream": d.choice(0, 1)}


def build_tree(d: Draw) -> dict[str, object]:
    batch, depths, count = d.size(), d.size(1, 4), d.size(1, 6)
    ids = torch.rand(batch, depths, 9, generator=d.generator).argsort(-1)[..., :count].contiguous()
    scores = -d.floats(batch, depths, count, dtype=torch.float32).abs()
    if d.flag():
        scores = scores.round()
    scores = scores.sort(-1, descending=True).values
    for holes in range(d.size(0, 2) if ids.numel() else 0):
        ids.view(-1)[d.size(0, ids.numel() - 1)] = -1 - holes
    return {"anchor": d.ints(batch, 0, 9), "ids": ids, "scores": scores, "rows": d.choice(1, 2, 16, 64, 65, 128)}


def accept_prefix_(d: Draw) -> dict[str, object]:
    batch, rows, capacity = d.size(), d.size(1, 6), d.size(0, 12)
    posterior = d.ints(batch * rows, -1, 3).view(batch, rows)
    block_ids = torch.cat([d.ints(batch, 0, 3)[:, None], posterior[:, :-1]], 1)
    stops = d.ints(batch * (count := d.size(0, 2)), 0, 3).view(batch, count)
    state = {"length": d.ints(batch, -2, capacity + 1), "num_context": d.ints(batch, 0, 3), "done": d.ints(batch, 0, 1)}
    named = {"block_ids": block_ids, "posterior": posterior, "stop_token_ids": stops}
    return named | {"limits": d.ints(batch, 0, capacity + 2), "tokens": torch.full((batch, capacity), -7)} | state


def accept_path_(d: Draw) -> dict[str, object]:
    batch, rows, capacity = d.size(), d.size(1, 7), d.size(0, 12)
    parents, choices = (d.ints(batch * rows, -1, 2).view(batch, rows) for _ in range(2))
    ids = torch.where(
        d.ints(batch * rows, 0, 4).view(batch, rows) > 0, choices.gather(1, parents.clamp(0, rows - 1)), 1
    )
    state = {"length": d.ints(batch, -2, capacity + 1), "num_context": d.ints(batch, 0, 3), "done": d.ints(batch, 0, 1)}
    stops = d.ints(batch * (count := d.size(0, 2)), 0, 3).view(batch, count)
    named = {"ids": ids, "parents": parents, "choices": choices, "stop_token_ids": stops}
    named |= {"limits": d.ints(batch, 0, capacity + 2), "tokens": torch.full((batch, capacity), -7)} | state
    path_rows = d.size(1, 8)
    return named | {name: torch.full((batch, path_rows), -7) for name in ("path", "chain_choices", "chain_ids")}


def compact_kv_(d: Draw) -> dict[str, object]:
    batch, rows, capacity = d.size(), d.size(), d.size(1, 9)
    path = d.ints(batch * rows, -1, 9).view(batch, rows)
    if d.flag():
        path = path.sort().values
    named = {"path": path, "counts": d.ints(batch, -1, rows + 1), "first": d.ints(batch, -2, capacity)}
    sizes = [(d.size(), d.size(1, 9), d.size(1, 9)) for _ in range(d.size(0, 3))]
    named |= {"k_caches": [d.floats(batch, heads, capacity, dim) for heads, dim, _ in sizes]}
    return named | {"v_caches": [d.floats(batch, heads, capacity, dim) for heads, _, dim in sizes]}


def gather_rows_(d: Draw) -> dict[str, object]:
    batch, rows, path_rows, width = d.size(), d.size(1), d.size(), d.size(0, 40)
    path = d.ints(batch * path_rows, -1, rows).view(batch, path_rows)
    return {"x": d.floats(batch, rows, width), "path": path, "out": d.floats(batch, path_rows + d.size(0, 2), width)}


def gated_recurrence_(d: Draw) -> dict[str, object]:
    batch, rows, block, key_heads, dim, v_dim = d.size(), d.size(), d.size(), d.size(1, 2), d.size(1, 40), d.size(1, 40)
    heads, f32 = key_heads * d.size(1, 2), torch.float32
    channels = [dim] * d.flag()
    named = {name: d.floats(batch, rows, key_heads, dim, dtype=f32) for name in ("q", "k")}
    named |= {"v": d.floats(batch, rows, heads, v_dim, dtype=f32)}
    named |= {"log_decay": -d.floats(batch, rows, heads, *channels, dtype=f32).abs()}
    named |= {"beta": d.floats(batch, rows, heads, dtype=f32) if d.flag() else None}
    named |= {"state": d.floats(batch, heads, dim, v_dim, dtype=f32)}
    named |= {"saved_k": d.floats(batch, block, key_heads, dim, dtype=f32)}
    named |= {"saved_d": d.floats(batch, block, heads, v_dim, dtype=f32)}
    named |= {"saved_a": d.floats(batch, block, heads, *channels, dtype=f32).sigmoid()}
    return named | {"pending": d.ints(batch, 0, block), "keep": d.ints(batch, 0, rows)}


def causal_conv_(d: Draw) -> dict[str, object]:
    batch, rows, block, channels, width = d.size(), d.size(), d.size(), d.size(0, 80), d.size(1, 5)
    named = {"x": d.floats(batch, rows, channels), "weight": d.floats(channels, width)}
    named |= {"bias": d.floats(channels) if d.flag() else None, "silu": d.flag()}
    named |= {"window": d.floats(batch, width - 1 + block, channels)}
    return named | {"pending": d.ints(batch, 0, block), "keep": d.ints(batch, 0, rows)}


MAKERS = [
    rms_norm, add_rms_norm, dynamic_conv, conv_add_rms_norm, silu_mul, fuse_features, linear, linears, swiglu,
    draft_rows, block_attention,
    append_kv_, qkv_norm_rope_append_, append_context_kv_, select_tokens, tree_candidates, top_candidates,
    walk_candidates, build_tree, accept_prefix_,
    accept_path_, compact_kv_, gather_rows_, gated_recurrence_, causal_conv_,
]  # fmt: skip


def check(make, data, place, dtypes):
    """Hold an op against its twin on one example."""
    d = Draw(data)
    d.dtype = data.draw(st.sampled_from(dtypes))
    call, op = make(d), make.__name__
    theirs = run_twin(op, copied(call))
    tolerance = TOLERANCE[d.dtype]
    spoilt = any(not x.isfinite().all() for value in call.values() for x in as_list(value))
    ours = run(op, copied_strided(call), place)
    sums = ("linear", "linears", "swiglu", "fuse_features", "block_attention", "gated_recurrence_")
    if spoilt and op in sums:
        # Sums with infinities are infinite or NaN, by the order of the additions.
        ours, theirs = ([x.nan_to_num(0.0, 0.0, 0.0) if x.isfinite().all() else x * 0 for x in side]
                        for side in (ours, theirs))  # fmt: skip
        ours, theirs = ([x.nan_to_num(0.0) for x in side] for side in (ours, theirs))
    assert_same(ours, theirs, tolerance, tolerance)


def copied_strided(call: dict[str, object]) -> dict[str, object]:
    """Copy a call, a tap with its strides."""
    fresh = copied(call)
    tap = call.get("tap")
    if tap is not None and not tap.is_contiguous():
        fresh["tap"] = torch.zeros(*tap.shape[:-1], tap.shape[-1] + 3, dtype=tap.dtype)[..., 2 : 2 + tap.shape[-1]]
    return fresh


@settings(examples(12), suppress_health_check=[*HealthCheck])
@given(data=st.data())
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_any_shapes_and_values_give_what_the_twin_gives(make, data):
    check(make, data, ops, [torch.float32, torch.bfloat16])


@settings(examples(6), suppress_health_check=[*HealthCheck])
@given(data=st.data())
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_any_shapes_and_values_on_an_emulated_gpu_give_what_the_twin_gives(make, emulation, data):
    from op_checks import Emulated

    check(make, data, Emulated(emulation), [torch.float32, torch.bfloat16, torch.float16])
