from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise

import layers_oracle
import pytest
import torch
from op_checks import DTYPES, OpByOp, assert_as_exact_as_torch, relative_error, same
from torch import Tensor
from trees import random_shapes

from dflash import decoder, ops
from dflash.cache import RecurrentCache, RecurrentLayer
from dflash.decoder import BlockConv, DecoderLayer, DecoderStack, DeltaNetLayer
from dflash.ops import PackedLayers, PackedWeight
from dflash.state import Tree

pytestmark = pytest.mark.op
HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, CAPACITY = 40, 52, 4, 2, 24, 3, 90
DELTA_HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, CONV, BLOCK = 4, 2, 24, 20, 4, 16


@dataclass
class Call:
    """Everything of one call, and the layers that it runs."""

    hidden: Tensor
    context: Tensor | None
    num_context: Tensor | None
    lengths: Tensor
    cos: Tensor
    sin: Tensor
    k_caches: list[Tensor]
    v_caches: list[Tensor]
    layers: list[DecoderLayer]
    norm: Tensor
    eps: float = 1e-6
    scale: float = HEAD_DIM**-0.5
    taps: tuple[int, ...] = (2, 0)
    zero_centered: bool = False
    windows: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    saved_k: list[Tensor] = field(default_factory=list)
    saved_d: list[Tensor] = field(default_factory=list)
    saved_a: list[Tensor] = field(default_factory=list)
    pending: Tensor | None = None
    keep: Tensor | None = None
    tree: Tree | None = None
    sequences: Tensor | None = None
    origin: Tensor | None = None
    local: tuple[Tensor, Tensor] | None = None

    @property
    def recurrent(self) -> tuple:
        """The arguments of the op after the handle."""
        return (*self.buffers, self.pending, self.keep)

    @property
    def buffers(self) -> tuple[list[Tensor], ...]:
        return self.windows, self.states, self.saved_k, self.saved_d, self.saved_a

    @property
    def ancestors(self) -> Tensor | None:
        return None if self.tree is None else self.tree.ancestors

    @property
    def fixed(self) -> dict:
        return {"eps": self.eps, "scale": self.scale, "taps": self.taps, "zero_centered": self.zero_centered}

    @property
    def varying(self) -> tuple:
        """The arguments of the op before the handle."""
        rotary = (self.cos, self.sin)
        return (self.hidden, self.context, self.num_context, self.lengths, *rotary, self.k_caches, self.v_caches)

    @property
    def caches(self) -> list[Tensor]:
        return [*self.k_caches, *self.v_caches, *(buffer for buffers in self.buffers for buffer in buffers)]

    def packed(self) -> PackedLayers:
        return PackedLayers(self.layers, self.norm, **self.fixed)

    def run(self) -> tuple[Tensor, Tensor]:
        packed = self.packed()
        places = self.ancestors, self.sequences, self.origin, *(self.local or ())
        return ops.decoder_layers(*self.varying, packed.handle, *self.recurrent, *places)

    def run_twin(self) -> tuple[Tensor, Tensor]:
        fixed = (self.norm, self.eps, self.scale, self.taps)
        return layers_oracle.decoder_layers(
            *self.varying, self.layers, *fixed, *self.recurrent, self.ancestors, self.zero_centered, self.origin,
            *(self.local or ()),
        )  # fmt: skip

    def run_stack(self) -> tuple[Tensor, Tensor]:
        stack = DecoderStack(self.layers, self.norm, **self.fixed)
        cache = recurrent_cache(self) if self.windows else Cache(self)
        length = self.lengths if self.origin is None else self.lengths + self.origin
        return stack(self.hidden, length, cache, self.context, self.num_context, self.tree)


class Cache:
    """The caches of a call as a stack takes them."""

    def __init__(self, call: Call) -> None:
        self.keys, self.values = call.k_caches, call.v_caches
        self.rotary, self.local_rotary, self.capacity = (call.cos, call.sin), call.local, call.k_caches[0].shape[2]
        self.sequences, self.origin = call.sequences, call.origin


def recurrent_cache(call: Call) -> RecurrentCache:
    """The caches of a call with recurrent layers as a stack takes them."""
    batch, rotary = call.hidden.shape[0], (call.cos, call.sin)
    cache = RecurrentCache(batch, CAPACITY, BLOCK, device="cpu")
    cache.rotary, cache.pending, cache.keep = rotary, call.pending, call.keep
    names, attention, buffers = ("window", "state", "saved_k", "saved_d", "saved_a"), 0, zip(*call.buffers, strict=True)
    for i, layer in enumerate(call.layers):
        if layer.is_recurrent:
            cache.recurrent[i] = RecurrentLayer(batch, BLOCK)
            for name, buffer in zip(names, next(buffers), strict=True):
                setattr(cache.recurrent[i], name, buffer)
        else:
            cache.keys[i], cache.values[i] = call.k_caches[attention], call.v_caches[attention]
            attention += 1
    return cache


def make_call(
    dtype, rows=16, context_rows=16, batch=3, head_norms=True, biases=False, sinks=False, causal=(1, 0, 1), seed=0,
    delta="", tree=False, convs=False, slides=False, sandwiched=False,
):  # fmt: skip
    """A call whose stale cache slots and dead context rows hold NaN.

    With ``delta`` all but the last layer have a Gated DeltaNet, whose projections are "apart" or "together", and the
    last has gated attention; the norms are zero-centered. With ``convs`` there are convolutions of several shapes. With
    ``slides`` the first slot of each sequence has another position. With ``sandwiched`` sublayers have norms after them
    too, gates are GELUs, and the layer with a window has a RoPE of its own.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0, shift=0.0):
        return (torch.randn(shape, generator=g) * scale + shift).to(dtype)

    def matrix(out, width):
        return normal(out, width, scale=width**-0.5)

    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM

    def layer(index):
        weights = [normal(HIDDEN, scale=0.1, shift=1), matrix(q, HIDDEN), matrix(kv, HIDDEN), matrix(kv, HIDDEN)]
        weights += [matrix(HIDDEN, q), normal(HIDDEN, scale=0.1, shift=1), matrix(WIDTH, HIDDEN)]
        weights += [matrix(WIDTH, HIDDEN), matrix(HIDDEN, WIDTH)]
        made = DecoderLayer(*weights, causal=bool(causal[index]), window=20 if index == 2 else 0)
        if head_norms:
            made = made._replace(**{name: normal(HEAD_DIM, scale=0.1, shift=1) for name in ("q_norm", "k_norm")})
        if biases:
            made = made._replace(q_bias=normal(q), k_bias=normal(kv), v_bias=normal(kv))
            made = made if index == 0 else made._replace(o_bias=normal(HIDDEN))
        if sandwiched:
            norms = {name: normal(HIDDEN, scale=0.1, shift=1) for name in ("attention_out_norm", "mlp_out_norm")}
            made = made._replace(**norms, gate_kind="gelu_tanh")
        return made._replace(sinks=normal(HEADS)) if sinks else made

    def delta_net_layer():
        keys, values = KEY_HEADS * KEY_DIM, DELTA_HEADS * VALUE_DIM
        around, is_apart = layer(0), delta == "apart"
        return DeltaNetLayer(
            input_norm=around.input_norm - 1, post_norm=around.post_norm - 1, gate=around.gate, up=around.up,
            down=around.down, qkv=matrix(2 * keys + values + (0 if is_apart else values), HIDDEN),
            z=matrix(values, HIDDEN) if is_apart else None, b=matrix(DELTA_HEADS * (1 if is_apart else 2), HIDDEN),
            a=matrix(DELTA_HEADS, HIDDEN) if is_apart else None,
            conv=normal(2 * keys + values, 1, CONV, scale=0.5), a_log=normal(DELTA_HEADS, shift=-1),
            dt_bias=normal(DELTA_HEADS), norm=normal(VALUE_DIM, scale=0.1, shift=1), out=matrix(HIDDEN, values),
            key_heads=KEY_HEADS,
        )  # fmt: skip

    layers = [delta_net_layer() if delta and index + 1 < LAYERS else layer(index) for index in range(LAYERS)]
    lengths = torch.tensor([0, 33, 70])[:batch]
    live = torch.minimum(torch.tensor([0, 5, 16]), torch.tensor(context_rows))[:batch]
    num_attention = 1 if delta else LAYERS
    caches = [normal(batch, KV_HEADS, CAPACITY, HEAD_DIM) for _ in range(2 * num_attention)]
    context = normal(batch, context_rows, HIDDEN) if context_rows else None
    for b in range(batch):
        for cache in caches:
            cache[b, :, lengths[b] - live[b] :] = float("nan")
        if context is not None:
            context[b, live[b] :] = float("nan")
    angles = torch.arange(CAPACITY + 50)[:, None] * 10000.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    call = Call(
        normal(batch, rows, HIDDEN), context, live if context_rows else None, lengths, angles.cos(), angles.sin(),
        caches[:num_attention], caches[num_attention:], layers, normal(HIDDEN, scale=0.1, shift=1),
        tree=random_shapes(rows, batch) if tree else None, origin=torch.tensor([50, 0, 7])[:batch] if slides else None,
    )  # fmt: skip
    if sandwiched:
        call = replace(call, local=((3 * angles).cos(), (3 * angles).sin()))
    call = with_convs(call, g) if convs else call
    return with_states(call, g) if delta else call


def with_convs(call, g):
    """The call with convolutions in four of its six sublayers."""

    def block_conv(taps, groups):
        base = torch.randn(2, taps, HIDDEN, generator=g) * 0.3
        projection = torch.randn(2 * taps * groups, HIDDEN, generator=g) * HIDDEN**-0.5
        return BlockConv(base.to(call.hidden.dtype), projection.to(call.hidden.dtype))

    first = call.layers[0]._replace(attention_conv=block_conv(3, 4), mlp_conv=block_conv(2, 8))
    second = call.layers[1]._replace(mlp_conv=block_conv(1, HIDDEN))
    third = [layer._replace(attention_conv=block_conv(2, 1)) for layer in call.layers[2:]]
    return replace(call, layers=[first, second, *third])


def with_states(call, g):
    """The call with gated attention in the last layer, and recurrent states in the others.

    What was saved of rows that are not pending is NaN.
    """
    (batch, rows, _), layers = call.hidden.shape, [layer for layer in call.layers if layer.is_recurrent]
    channels = 2 * KEY_HEADS * KEY_DIM + DELTA_HEADS * VALUE_DIM
    pending, keep = torch.tensor([0, 5, 16])[:batch], torch.tensor([rows, 0, rows // 2])[:batch]

    def normal(*shape):
        return [torch.randn(batch, *shape, generator=g) * 0.3 for _ in layers]

    windows = [window.to(call.hidden.dtype) for window in normal(CONV - 1 + BLOCK, channels)]
    states, saved_k = normal(DELTA_HEADS, KEY_DIM, VALUE_DIM), normal(BLOCK, KEY_HEADS, KEY_DIM)
    saved_d, saved_a = normal(BLOCK, DELTA_HEADS, VALUE_DIM), [x.abs() for x in normal(BLOCK, DELTA_HEADS)]
    for b in range(batch):
        for saved in (*saved_k, *saved_d, *saved_a):
            saved[b, pending[b] :] = float("nan")
        for window in windows:
            window[b, CONV - 1 + pending[b] :] = float("nan")
    buffers = {"windows": windows, "states": states, "saved_k": saved_k, "saved_d": saved_d, "saved_a": saved_a}
    gates = torch.randn(2 * HEADS * HEAD_DIM, HIDDEN, generator=g) * HIDDEN**-0.5
    layers = [*call.layers[:-1], call.layers[-1]._replace(q=gates.to(call.hidden.dtype), gated=True)]
    return replace(call, layers=layers, zero_centered=True, **buffers, pending=pending, keep=keep)


def changed(call, change):
    """A copy of a call with ``change`` applied to each of its tensors."""

    def one(value):
        if isinstance(value, (BlockConv, DecoderLayer, DeltaNetLayer, PackedWeight, Tree)):
            return type(value)(*map(one, value))
        if isinstance(value, list):
            return [one(x) for x in value]
        if type(value) is tuple:
            return tuple(map(one, value))
        return change(value) if isinstance(value, Tensor) else value

    return Call(**{name: one(value) for name, value in vars(call).items()})


def widened(x):
    return x.double() if x.dtype.is_floating_point else x


OPTIONS = [
    {}, {"context_rows": 0, "head_norms": False}, {"biases": True, "rows": 5, "context_rows": 3, "slides": True},
    {"sinks": True, "batch": 1, "rows": 1}, {"tree": True, "causal": (1, 1, 1), "rows": 20, "slides": True},
    {"delta": "apart", "context_rows": 0}, {"delta": "together", "context_rows": 0, "rows": 5},
    {"convs": True}, {"convs": True, "rows": 3, "context_rows": 0}, {"sandwiched": True, "causal": (1, 1, 1)},
]  # fmt: skip
RECURRENT = [options for options in OPTIONS if "delta" in options]
CONVS = [options for options in OPTIONS if "convs" in options]


@pytest.mark.parametrize("weights", ["wide", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, RECURRENT[1], CONVS[0]])
def test_bits_do_not_depend_on_the_threads(options, dtype, weights, monkeypatch, set_threads):
    """With work enough for threads, more threads than processors, and one loop after the other."""
    for name, size in {"HIDDEN": 192, "WIDTH": 512, "HEADS": 6, "LAYERS": 2}.items():
        monkeypatch.setitem(globals(), name, size)
    call = make_call(dtype, **options)
    call = replace(call, layers=[call.layers[0], call.layers[1]._replace(window=20)], taps=(1, 0))
    if weights == "int8":
        call = replace(call, layers=[ops.packed_layer(layer, "w8a8") for layer in call.layers])

    def everything(count):
        set_threads(count)
        copied = changed(call, torch.clone)
        return [*copied.run(), *copied.caches]

    wanted = everything(1)
    for count in [2] * 10 + [3] * 10 + [8] * 10:
        assert same(everything(count), wanted)
    with ThreadPoolExecutor(2) as pool:  # and from two callers at a time
        for results in pool.map(everything, [2, 3] * 8):
            assert same(results, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_against_float64(options, dtype):
    check_against_float64(make_call(dtype, **options), Call.run)


def check_against_float64(call, run):
    """What is returned and what is written are as exact as the twin's, and nothing else is written."""
    ours, twin, exact = (changed(call, change) for change in (torch.clone, torch.clone, widened))
    got, theirs, wanted = run(ours), twin.run_twin(), exact.run_twin()
    for a, b, c in zip((*got, *ours.caches), (*theirs, *twin.caches), (*wanted, *exact.caches), strict=True):
        assert torch.equal(a.isnan(), c.isnan()), "other slots were written"
        assert_as_exact_as_torch(a.nan_to_num(), b.nan_to_num(), c.nan_to_num(), factor=3.0)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_stack_op_by_op_is_as_exact_as_torch(options, kernels, dtype, monkeypatch):
    """As it runs on a GPU, and on the CPU for many rows."""
    call = make_call(dtype, **options)
    monkeypatch.setattr(decoder, "ops", OpByOp(kernels))
    check_against_float64(call, Call.run_stack)


@pytest.mark.parametrize("options", [options for options in OPTIONS if options not in RECURRENT])
def test_what_attention_may_read_early_is_not_what_the_kernel_ahead_appends(options, monkeypatch):
    calls = []

    class Recorder(OpByOp):
        def __getattr__(self, name):
            def run(*arguments, **named):
                calls.append((name, arguments, named))
                return getattr(ops, name)(*arguments, **named)

            return run

    monkeypatch.setattr(decoder, "ops", Recorder(ops))
    make_call(torch.float32, **options).run_stack()
    pairs = [(ahead, call) for ahead, call in pairwise(calls) if call[0] == "block_attention"]
    assert len(pairs) == LAYERS
    for (ahead, (_, begin, num_context, *_), _), (_, (_, _, _, lengths, *_), named) in pairs:
        assert ahead == "qkv_norm_rope_append_"
        assert torch.equal(begin, lengths)
        assert num_context is None or (num_context <= named["fresh"]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_weights_in_8_bits_are_as_exact_as_in_plain_torch(options, dtype):
    call = make_call(dtype, **options)
    call = replace(call, layers=[ops.packed_layer(layer, "w8a8") for layer in call.layers])
    ours, twin = changed(call, torch.clone), changed(call, torch.clone)
    exact = changed(call, widened)
    for a, b, c in zip(ours.run(), twin.run_twin(), exact.run_twin(), strict=True):
        # 0.5 %: elements next to a middle that one of them rounds to the other step
        assert relative_error(a, c) < 3 * relative_error(b, c) + 0.005


@pytest.mark.parametrize(("weights", "dtype", "options"), [
    *((None, dtype, options) for options in ({"causal": (1, 1, 1)}, *CONVS, OPTIONS[-1]) for dtype in DTYPES),
    *(("w8a8", torch.bfloat16, {"batch": 1, "rows": 10, "context_rows": 0} | options)
      for options in ({"biases": True}, *RECURRENT, CONVS[0])),
    ("w8a8", torch.bfloat16, {"biases": True, "causal": (1, 1, 1)}),
])  # fmt: skip
def test_one_op_has_the_bits_of_op_by_op(weights, dtype, options, monkeypatch):
    call = make_call(dtype, **({"context_rows": 5} | options))  # rows that all go through the kernel of ops.linear
    if weights is not None:
        call = replace(call, layers=[ops.packed_layer(layer, weights) for layer in call.layers])
    whole, parts = changed(call, torch.clone), changed(call, torch.clone)
    wanted = whole.run()
    monkeypatch.setattr(decoder, "ops", OpByOp(ops))
    assert same((*parts.run_stack(), *parts.caches), (*wanted, *whole.caches))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"slides": True}, {"tree": True, "causal": (1, 1, 1), "rows": 20}])
def test_some_sequences_have_the_bits_that_they_have_among_all(options, dtype):
    call, chosen = make_call(dtype, **options), torch.tensor([2, 0])
    whole, part = changed(call, torch.clone), changed(call, torch.clone)
    part = replace(part, sequences=chosen, tree=None if part.tree is None else Tree(*(x[chosen] for x in part.tree)))
    for name in ("hidden", "context", "num_context", "lengths", *(["origin"] if "slides" in options else [])):
        setattr(part, name, getattr(part, name)[chosen])
    assert same(part.run(), [want[chosen] for want in whole.run()])
    for want, before in zip(whole.caches, call.caches, strict=True):
        want[1] = before[1]
    assert same(part.caches, whole.caches), "another sequence was written"


@pytest.mark.parametrize("dtype", DTYPES)
def test_context_is_appended_without_a_block(dtype):
    call = make_call(dtype, rows=0)
    ours, twin = changed(call, torch.clone), changed(call, torch.clone)
    out, tapped = ours.run()
    twin.run_twin()
    assert out.shape == (3, 0, HIDDEN)
    assert tapped.shape == (3, 0, 2 * HIDDEN)
    for a, b in zip(ours.caches, twin.caches, strict=True):
        assert not a[2, :, 54:70].isnan().any(), "the live context rows were not appended"
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize(("options", "change", "message"), [
    ({}, {"taps": (3,)}, r"taps must be different layers in 0 \.\. 2, got \[3\]"),
    ({}, {"num_context": None}, "context and num_context come together"),
    ({"delta": "apart"}, {"windows": [torch.ones(3, 18, 176) for _ in "ab"]}, "slots must be 19 as the layers say"),
    ({"delta": "apart"}, {"sequences": torch.arange(3)}, "sequences must be None where layers are recurrent"),
    ({"causal": (1, 0, 1)}, {"tree": random_shapes(16, 3)}, "ancestors need causal attention"),
    ({"causal": (1, 1, 1), "rows": 129}, {"tree": random_shapes(129, 3)}, "a tree has at most 128 rows"),
])  # fmt: skip
def test_bad_input_is_named(options, change, message):
    call = make_call(torch.float32, **options | ({"context_rows": 0} if "delta" in options else {}))
    with pytest.raises(ValueError, match=message):
        replace(call, **change).run()


@pytest.mark.parametrize(("change", "message"), [
    ({"window": -1}, r"layers\[1\]: window >= 0 must hold, got window = -1"),
    ({"q_norm": None}, r"layers\[1\]: q_norm and k_norm come together"),
    ({"mlp_out_norm": torch.ones(HIDDEN)}, r"layers\[1\]: attention_out_norm and mlp_out_norm come together"),
    ({"mlp_conv": BlockConv(torch.ones(3, 2, 40), torch.ones(16, 40))}, r"layers\[1\]\.mlp_conv\.base must be"),
    ({"down": PackedWeight.of(torch.ones(HIDDEN, WIDTH), "w8a8")._replace(order=torch.arange(WIDTH))},
     r"layers\[1\]\.down must have its columns in order"),
])  # fmt: skip
def test_a_bad_layer_is_named(change, message):
    call = make_call(torch.float32)
    call.layers[1] = call.layers[1]._replace(**change)
    with pytest.raises(ValueError, match=message):
        call.run()


@pytest.mark.parametrize("names", [("qkv", "b"), ("b",)])
def test_packed_joined_projections_are_refused(names):
    call = make_call(torch.float32, delta="together", context_rows=0)
    joined = {name: PackedWeight.of(getattr(call.layers[0], name), "w8a8") for name in names}
    call.layers[0] = call.layers[0]._replace(**joined)
    with pytest.raises(TypeError, match=r"layers\[0\]\.qkv and z, b and a must be separate where they are packed"):
        call.run()


@pytest.mark.parametrize("name", ["qkv", "b"])
def test_of_joined_projections_one_may_be_packed(name):
    call = make_call(torch.float32, delta="together", context_rows=0)
    packed = changed(call, torch.clone)
    layer = packed.layers[0]
    packed.layers[0] = ops.separate_packed(layer._replace(**{name: PackedWeight.of(getattr(layer, name), "w8a8")}))
    got, wanted = packed.run_stack()[0], call.run_stack()[0]
    assert (got - wanted).norm() < 0.1 * wanted.norm()  # rows and weights are rounded to 8 bits


def test_a_handle_without_layers_is_named():
    call = make_call(torch.float32)
    packed = call.packed()
    handle = packed.handle
    del packed
    with pytest.raises(ValueError, match=r"layers must be the handle of living PackedLayers, got 'layers \d+'"):
        ops.decoder_layers(*call.varying, handle)
