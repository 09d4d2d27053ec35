"""A small call of every op of `dflash.ops`, by argument names, for tests that spoil one argument after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import layers_oracle
import torch
from torch import Tensor

from dflash import ops
from dflash.ops import DecoderLayer, DeltaNetLayer, PackedLayers, reference
from dflash.ops.examples import Sizes, calls, ints

SIZES = Sizes(batch=2, rows=3, hidden=16, heads=4, kv_heads=2, dim=8, width=24, capacity=12, vocab=70)
BATCH, ROWS, HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, CAPACITY, VOCAB = SIZES
TAPS = 1, 0
CONV, BLOCK, CHANNELS = 4, 4, (2 * KV_HEADS + HEADS) * DIM  # of recurrent layers
RECURRENT = "decoder_layers+recurrent"  # the op on layers of which some are recurrent


def make_layers(number: int = 2, sinks: bool = True) -> tuple[list[DecoderLayer], Tensor]:
    """Return random layers and a final norm."""
    q, kv = HEADS * DIM, KV_HEADS * DIM
    shapes = [(HIDDEN,), (q, HIDDEN), (kv, HIDDEN), (kv, HIDDEN), (HIDDEN, q), (HIDDEN,), (WIDTH, HIDDEN)]
    shapes += [(WIDTH, HIDDEN), (HIDDEN, WIDTH), (DIM,), (DIM,), (q,), (kv,), (kv,), (HIDDEN,)]
    layers = [DecoderLayer(*(torch.randn(shape) * 0.3 for shape in shapes)) for _ in range(number)]
    if sinks:
        layers = [layer._replace(sinks=torch.randn(HEADS)) for layer in layers]
    return layers, torch.randn(HIDDEN)


def make_recurrent_layers() -> tuple[list[DecoderLayer | DeltaNetLayer], Tensor]:
    """Return a layer with a Gated DeltaNet, one with gated attention, and a final norm."""
    (_, attention), norm = make_layers()
    values = HEADS * DIM
    shapes = [(HIDDEN,), (CHANNELS, HIDDEN), (values, HIDDEN), (HEADS, HIDDEN), (HEADS, HIDDEN), (CHANNELS, 1, CONV)]
    shapes += [(HEADS,), (HEADS,), (DIM,), (HIDDEN, values), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH, HIDDEN)]
    delta_net = DeltaNetLayer(*(torch.randn(shape) * 0.3 for shape in [*shapes, (HIDDEN, WIDTH)]), key_heads=KV_HEADS)
    gated = {"q": torch.randn(2 * values, HIDDEN) * 0.3, "q_bias": torch.randn(2 * values), "gated": True}
    return [delta_net, attention._replace(**gated)], norm


def pack(layers: list[DecoderLayer | DeltaNetLayer], norm: Tensor) -> PackedLayers:
    """Pack layers for `decoder_layers`."""
    return PackedLayers(layers, norm, eps=1e-6, scale=DIM**-0.5, taps=TAPS)


def packed_for(name: str) -> PackedLayers | None:
    """Return the layers that a call needs."""
    makers = {"decoder_layers": make_layers, RECURRENT: make_recurrent_layers}
    return pack(*makers[name]()) if name in makers else None


def _layers() -> dict[str, object]:
    return {
        "hidden": torch.randn(BATCH, ROWS, HIDDEN), "context": torch.randn(BATCH, 4, HIDDEN),
        "num_context": ints(0, 2), "lengths": ints(1, 6), "cos": torch.rand(CAPACITY, DIM // 2),
        "sin": torch.rand(CAPACITY, DIM // 2), "k_caches": [cache(), cache()], "v_caches": [cache(), cache()],
    }  # fmt: skip


def _recurrent_layers() -> dict[str, object]:
    shapes = {
        "windows": (CONV - 1 + BLOCK, CHANNELS), "states": (HEADS, DIM, DIM), "saved_k": (BLOCK, KV_HEADS, DIM),
        "saved_d": (BLOCK, HEADS, DIM), "saved_a": (BLOCK, HEADS),
    }  # fmt: skip
    buffers = {name: [torch.rand(BATCH, *shape)] for name, shape in shapes.items()}
    caches = {"k_caches": [cache()], "v_caches": [cache()], "context": None, "num_context": None}
    return _layers() | caches | buffers | {"pending": ints(0, 3), "keep": ints(2, 0)}


def cache() -> Tensor:
    """Return a random cache of keys or values."""
    return torch.randn(BATCH, KV_HEADS, CAPACITY, DIM)


CALLS: dict[str, Callable[[], dict[str, object]]] = {
    **calls(SIZES),
    "log_sum_exp": lambda: {"logits": torch.randn(BATCH, ROWS, VOCAB)},
    "decoder_layers": _layers,
    RECURRENT: _recurrent_layers,
}


def run(name: str, call: dict[str, object], place: object = ops) -> list[Tensor]:
    """Run an op on a call; return what it returns and what it wrote. `decoder_layers` gets ``layers`` as a handle."""
    out = getattr(place, op_of(name))(**call)
    returned = [] if out is None else [out] if isinstance(out, Tensor) else [*out]
    return returned + [tensor for argument in written(name) for tensor in as_list(call[argument])]


def run_twin(name: str, call: dict[str, object], packed: PackedLayers | None = None) -> list[Tensor]:
    """Run the plain-torch twin of an op on a call."""
    if packed is not None:
        call = {key: value for key, value in call.items() if key != "layers"}
        call |= {"layers": packed.layers, "norm": packed.norm, "eps": packed.eps, "scale": packed.scale}
        call |= {"taps": packed.taps, "zero_centered": packed.zero_centered}
    return run(name, call, reference if packed is None else layers_oracle)


def op_of(name: str) -> str:
    """Return the op of a call."""
    return name.split("+")[0]


def written(name: str) -> list[str]:
    """Return the arguments that a call writes."""
    arguments = getattr(torch.ops.dflash, op_of(name)).default._schema.arguments
    names = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return names[:2] if name == "decoder_layers" else names  # without the recurrent layers' lists


def as_list(argument: object) -> list[Tensor]:
    """Return the tensors of an argument."""
    values = argument if isinstance(argument, (list, tuple)) else [argument]
    return [value for value in values if isinstance(value, Tensor)]


def replaced(call: dict[str, object], change: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the call with ``change`` applied to one tensor after another, and that tensor's name."""
    for name, argument in call.items():
        if isinstance(argument, Tensor):
            yield name, {**call, name: change(argument)}
        elif isinstance(argument, list):
            for i, tensor in enumerate(argument):
                yield f"{name}[{i}]", {**call, name: [*argument[:i], change(tensor), *argument[i + 1 :]]}


def resized(tensor: Tensor, size: int, before: int = 0) -> Tensor:
    """Return a copy of a tensor, after so many elements in a storage, which then has ``size`` bytes."""
    whole = torch.cat([tensor.new_zeros(before), tensor.flatten()])
    view = whole[before:].view(tensor.shape)
    whole.untyped_storage().resize_(size)
    return view


def copied(call: dict[str, object]) -> dict[str, object]:
    """Return the call with a copy of every tensor."""

    def copy(value: object) -> object:
        return value.clone() if isinstance(value, Tensor) else [x.clone() for x in value]

    return {name: copy(value) if isinstance(value, (Tensor, list)) else value for name, value in call.items()}


def assert_same(ours: list[Tensor], theirs: list[Tensor], rtol: float = 1e-4, atol: float = 1e-4) -> None:
    """Assert that results are equal up to rounding, NaN in the same places."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.resolve_neg(), b.resolve_neg(), rtol=rtol, atol=atol, equal_nan=True)
