import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from op_checks import DTYPES, OpByOp, assert_as_exact_as_torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash import decoder, ops
from dflash.decoder import DecoderLayer, DecoderStack
from dflash.ops import reference
from dflash.ops.layers import PackedLayers

pytestmark = pytest.mark.op
HIDDEN, WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, CAPACITY = 40, 52, 4, 2, 24, 3, 90


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

    @property
    def varying(self) -> tuple:
        """The arguments of the op before the handle."""
        rotary = (self.cos, self.sin)
        return (self.hidden, self.context, self.num_context, self.lengths, *rotary, self.k_caches, self.v_caches)

    @property
    def caches(self) -> list[Tensor]:
        return [*self.k_caches, *self.v_caches]

    def packed(self) -> PackedLayers:
        return PackedLayers(self.layers, self.norm, eps=self.eps, scale=self.scale, taps=self.taps)

    def run(self) -> tuple[Tensor, Tensor]:
        packed = self.packed()
        return ops.decoder_layers(*self.varying, packed.handle)

    def run_twin(self) -> tuple[Tensor, Tensor]:
        return reference.decoder_layers(*self.varying, self.layers, self.norm, self.eps, self.scale, self.taps)

    def run_stack(self) -> tuple[Tensor, Tensor]:
        stack = DecoderStack(self.layers, self.norm, eps=self.eps, scale=self.scale, taps=self.taps)
        return stack(self.hidden, self.lengths, Cache(self), self.context, self.num_context)


class Cache:
    """The caches of a call as a stack takes them."""

    def __init__(self, call: Call) -> None:
        self.keys, self.values = call.k_caches, call.v_caches
        self.rotary, self.capacity = (call.cos, call.sin), call.k_caches[0].shape[2]


def make_call(
    dtype, rows=16, context_rows=16, batch=3, head_norms=True, biases=False, sinks=False, causal=(1, 0, 1), seed=0
):
    """A call whose stale cache slots and dead context rows hold NaN."""
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
        return made._replace(sinks=normal(HEADS)) if sinks else made

    layers = [layer(index) for index in range(LAYERS)]
    lengths = torch.tensor([0, 33, 70])[:batch]
    live = torch.minimum(torch.tensor([0, 5, 16]), torch.tensor(context_rows))[:batch]
    caches = [normal(batch, KV_HEADS, CAPACITY, HEAD_DIM) for _ in range(2 * LAYERS)]
    context = normal(batch, context_rows, HIDDEN) if context_rows else None
    for b in range(batch):
        for cache in caches:
            cache[b, :, lengths[b] - live[b] :] = float("nan")
        if context is not None:
            context[b, live[b] :] = float("nan")
    angles = torch.arange(CAPACITY)[:, None] * 10000.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    return Call(
        normal(batch, rows, HIDDEN), context, live if context_rows else None, lengths, angles.cos(), angles.sin(),
        caches[:LAYERS], caches[LAYERS:], layers, normal(HIDDEN, scale=0.1, shift=1),
    )  # fmt: skip


def changed(call, change):
    """A copy of a call with ``change`` applied to each of its tensors."""

    def one(value):
        if isinstance(value, DecoderLayer):
            return DecoderLayer(*map(one, value))
        if isinstance(value, list):
            return [one(x) for x in value]
        return change(value) if isinstance(value, Tensor) else value

    return Call(**{name: one(value) for name, value in vars(call).items()})


def widened(x):
    return x.double() if x.dtype.is_floating_point else x


OPTIONS = [
    {},
    {"context_rows": 0, "head_norms": False},
    {"biases": True, "rows": 5, "context_rows": 3},
    {"sinks": True, "batch": 1, "rows": 1},
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_threads(dtype, monkeypatch):
    """With work enough for threads, more threads than processors, and one loop after the other."""
    for name, size in {"HIDDEN": 192, "WIDTH": 512, "HEADS": 6, "LAYERS": 2}.items():
        monkeypatch.setitem(globals(), name, size)
    call = make_call(dtype)
    call = replace(call, layers=[call.layers[0], call.layers[1]._replace(window=20)], taps=(1, 0))

    def everything(count):
        torch.set_num_threads(count)
        copied = changed(call, torch.clone)
        return [*copied.run(), *copied.caches]

    def same(results, wanted):
        for got, want in zip(results, wanted, strict=True):
            assert torch.equal(got.nan_to_num(9.0), want.nan_to_num(9.0))

    before = torch.get_num_threads()
    try:
        wanted = everything(1)
        for count in [2] * 10 + [3] * 10 + [8] * 10:
            same(everything(count), wanted)
        with ThreadPoolExecutor(2) as pool:  # and from two callers at a time
            for results in pool.map(everything, [2, 3] * 8):
                same(results, wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_against_float64(options, dtype):
    call = make_call(dtype, **options)
    ours, twin, exact = (changed(call, change) for change in (torch.clone, torch.clone, widened))
    got, theirs, wanted = ours.run(), twin.run_twin(), exact.run_twin()
    for a, b, c in zip(got, theirs, wanted, strict=True):
        assert_as_exact_as_torch(a, b, c, factor=3.0)
    for a, b, c in zip(ours.caches, twin.caches, exact.caches, strict=True):
        assert torch.equal(a.isnan(), c.isnan()), "other slots were written"
        assert_as_exact_as_torch(a.nan_to_num(), b.nan_to_num(), c.nan_to_num(), factor=3.0)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_stack_op_by_op_is_as_exact_as_torch(options, kernels, dtype, monkeypatch):
    """As it runs on a GPU, and on the CPU for many rows."""
    call = make_call(dtype, **options)
    monkeypatch.setattr(decoder, "ops", OpByOp(kernels))
    ours, twin, exact = (changed(call, change) for change in (torch.clone, torch.clone, widened))
    got, theirs, wanted = ours.run_stack(), twin.run_twin(), exact.run_twin()
    for a, b, c in zip((*got, *ours.caches), (*theirs, *twin.caches), (*wanted, *exact.caches), strict=True):
        assert torch.equal(a.isnan(), c.isnan())
        assert_as_exact_as_torch(a.nan_to_num(), b.nan_to_num(), c.nan_to_num(), factor=3.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stack_of_few_rows_is_the_op(dtype):
    call = make_call(dtype, biases=True, rows=1, context_rows=3)
    ours, op = changed(call, torch.clone), changed(call, torch.clone)
    for a, b in zip((*ours.run_stack(), *ours.caches), (*op.run(), *op.caches), strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_at_a_time_gives_the_same_bits(dtype):
    call = make_call(dtype, context_rows=0, causal=[1] * LAYERS)
    whole, single = changed(call, torch.clone), changed(call, torch.clone)
    out, tapped = whole.run()
    for row in range(16):
        step = replace(single, hidden=call.hidden[:, row : row + 1], lengths=call.lengths + row)
        one, tap = step.run()
        assert torch.equal(one[:, 0], out[:, row])
        assert torch.equal(tap[:, 0], tapped[:, row])


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


def test_replaced_storages_are_read_at_the_next_call():
    call = make_call(torch.float32)
    layers = [DecoderLayer(*(torch.nn.Parameter(x, False) if isinstance(x, Tensor) else x for x in layer))
              for layer in call.layers]  # fmt: skip
    stack = DecoderStack(layers, call.norm, eps=call.eps, scale=call.scale, taps=call.taps)

    def run(stack):
        fresh = changed(call, torch.clone)
        return stack(fresh.hidden, fresh.lengths, Cache(fresh), fresh.context, fresh.num_context)[0]

    before = run(stack)
    layers[1].q.data = layers[1].q * 1.5
    after = run(stack)
    assert not torch.equal(after, before)
    assert torch.equal(run(DecoderStack(layers, call.norm, eps=call.eps, scale=call.scale, taps=call.taps)), after)
    layers[2].down.mul_(0.5)  # in place: nothing to refresh
    assert not torch.equal(run(stack), after)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_changed_in_place_are_read(dtype):
    call = make_call(dtype, sinks=True)
    packed = call.packed()

    def run():
        fresh = changed(call, torch.clone)
        return ops.decoder_layers(*fresh.varying, packed.handle)[0]

    before = run()
    call.layers[0].sinks.fill_(-1e9)
    assert not torch.equal(run(), before)


def test_a_copy_packs_its_own_weights():
    call = make_call(torch.float32)
    stack = DecoderStack(call.layers, call.norm, eps=call.eps, scale=call.scale, taps=call.taps)
    copied = copy.deepcopy(stack)
    for layer in stack.layers:
        layer.q.zero_()
    fresh = changed(call, torch.clone)
    out = stack(fresh.hidden, fresh.lengths, Cache(fresh), fresh.context, fresh.num_context)[0]
    fresh = changed(call, torch.clone)
    other = copied(fresh.hidden, fresh.lengths, Cache(fresh), fresh.context, fresh.num_context)[0]
    assert not torch.equal(out, other)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_twin_runs_without_data(options):
    real = make_call(torch.float32, **options)
    with FakeTensorMode() as mode:
        out, tapped = changed(real, mode.from_tensor).run_twin()
    assert out.shape == real.hidden.shape
    assert tapped.shape == (*out.shape[:2], 2 * HIDDEN)


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_opcheck(options):
    call = changed(make_call(torch.float32, **options), lambda x: x.nan_to_num() if x.dtype.is_floating_point else x)
    packed = call.packed()
    torch.library.opcheck(torch.ops.dflash.decoder_layers.default, (*call.varying, packed.handle))


def test_a_stack_compiles_whole():
    call = make_call(torch.float32, context_rows=3)
    stack = DecoderStack(call.layers, call.norm, eps=call.eps, scale=call.scale, taps=call.taps)

    def run(call, forward):
        return (*forward(call.hidden, call.lengths, Cache(call), call.context, call.num_context), *call.caches)

    compiled = torch.compile(stack.__call__, backend="aot_eager", fullgraph=True)
    wanted, got = run(changed(call, torch.clone), stack), run(changed(call, torch.clone), compiled)
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": []}, r"layers must have at least one layer, got none"),
        ({"taps": (3,)}, r"taps must be different layers in 0 \.\. 2, got \[3\]"),
        ({"norm": torch.ones(7)}, r"norm must be \[hidden\] = \[40\], got \[7\]"),
        ({"num_context": None}, r"context and num_context come together"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, r"lengths must be \[batch\] = \[3\], got \[2\]"),
        ({"k_caches": []}, r"k_caches must have one tensor for each of 3 layers, got 0"),
        ({"hidden": torch.ones(3, 16, 7)}, r"hidden must be \[batch, rows, hidden\] = \[\*, \*, 40\]"),
        ({"cos": torch.ones(5, 13), "sin": torch.ones(5, 13)}, r"cos must be \[positions, at most head_dim / 2 = 12\]"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        replace(make_call(torch.float32), **change).run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": -1}, r"layers\[1\]\.window must be positive, or 0 for none, got -1"),
        ({"up": torch.ones(3, 40)}, r"layers\[1\]\.up must be \[52, 40\]"),
        ({"o": torch.ones(96, 40).t()}, r"layers\[1\]\.o must be contiguous"),
        ({"q_bias": torch.ones(96)}, r"q_bias, k_bias and v_bias come together"),
        ({"q_norm": None}, r"q_norm and k_norm must be in all layers or in none"),
        ({"sinks": torch.ones(5)}, r"layers\[1\]\.sinks must be \[num_heads\] = \[4\], got \[5\]"),
    ],
)
def test_a_bad_layer_is_named(change, message):
    call = make_call(torch.float32)
    call.layers[1] = call.layers[1]._replace(**change)
    with pytest.raises(ValueError, match=message):
        call.run()


def test_a_handle_without_layers_is_named():
    call = make_call(torch.float32)
    packed = call.packed()
    handle = packed.handle
    del packed
    with pytest.raises(ValueError, match=r"layers must be the handle of living PackedLayers, got 'layers \d+'"):
        ops.decoder_layers(*call.varying, handle)


def test_weights_on_another_device_are_named():
    call = make_call(torch.float32)
    elsewhere = replace(call, layers=[layer._replace(down=layer.down.to("meta")) for layer in call.layers])
    with pytest.raises(ValueError, match="all weights must be on cpu as norm is, got meta"):
        elsewhere.packed()
    packed = changed(call, lambda x: x.to("meta")).packed()
    with pytest.raises(ValueError, match="the layers must be on cpu as hidden is, got weights on meta"):
        ops.decoder_layers(*call.varying, packed.handle)


def test_layers_packed_in_inference_mode_run_outside_of_it():
    call = make_call(torch.bfloat16)
    layers = [layer._replace(sinks=torch.randn(HEADS).bfloat16()) for layer in call.layers]
    packed = replace(call, layers=layers).packed()
    with torch.inference_mode():
        inside = ops.decoder_layers(*changed(call, torch.clone).varying, packed.handle)[0].clone()
    outside = ops.decoder_layers(*changed(call, torch.clone).varying, packed.handle)[0]
    assert torch.equal(inside.nan_to_num(9.0), outside.nan_to_num(9.0))


def test_replaced_weights_are_not_kept_alive():
    call = make_call(torch.float32)
    packed = call.packed()
    ops.decoder_layers(*changed(call, torch.clone).varying, packed.handle)
    storage = weakref.ref(call.layers[0].gate.untyped_storage())
    fresh = changed(call, torch.clone)
    packed.replace(fresh.layers, fresh.norm)
    call.layers = fresh.layers
    gc.collect()
    assert storage() is None
