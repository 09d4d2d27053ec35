"""A small call of every op of `dflash.ops`, by argument names, for tests that spoil one argument after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import layers_oracle
import torch
from torch import Tensor

from dflash import ops
from dflash.ops import DecoderLayer, DeltaNetLayer, PackedLayers, reference

BATCH, ROWS, HIDDEN, HEADS, KV_HEADS, DIM, CAPACITY, VOCAB = 2, 3, 16, 4, 2, 8, 12, 70
WIDTH, TAPS = 24, (1, 0)
CONV, BLOCK, CHANNELS = 4, 4, (2 * KV_HEADS + HEADS) * DIM  # of recurrent layers
RECURRENT = "decoder_layers+recurrent"  # the op on layers of which some are recurrent


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


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


def _qkv() -> dict[str, object]:
    return {
        "qkv": torch.randn(BATCH, ROWS, (HEADS + 2 * KV_HEADS) * DIM), "lengths": _ints(4, 9),
        "num_context": _ints(1, 0), "depth": torch.tensor([[0, 1], [0, 0]]), "cos": torch.rand(CAPACITY, DIM // 2),
        "sin": torch.rand(CAPACITY, DIM // 2), "q_norm_weight": torch.randn(DIM), "k_norm_weight": torch.randn(DIM),
        "eps": 1e-6, "q_out": torch.zeros(BATCH, 2, HEADS, DIM), "k_cache": cache(), "v_cache": cache(),
    }  # fmt: skip


def _positions() -> Tensor:
    return torch.tensor([[0, 5, -1], [CAPACITY, 2, 3]])


def _context() -> dict[str, object]:
    cos, sin = torch.rand(2, BATCH, ROWS, DIM // 2)
    kv, norms = torch.randn(2, BATCH, ROWS, 2 * KV_HEADS * DIM), torch.randn(2, DIM)
    caches = {"k_caches": [cache(), cache()], "v_caches": [cache(), cache()]}
    named = {"positions": _positions(), "cos": cos, "sin": sin}
    return {"kv": kv, **named, "k_norm_weight": norms, "eps": 1e-6, **caches}


def _recurrence() -> dict[str, object]:
    keys, heads, block = (KV_HEADS, DIM), (HEADS, 5), 4
    return {
        "q": torch.randn(BATCH, ROWS, *keys), "k": torch.randn(BATCH, ROWS, *keys),
        "v": torch.randn(BATCH, ROWS, *heads), "log_decay": -torch.rand(BATCH, ROWS, HEADS),
        "beta": torch.rand(BATCH, ROWS, HEADS), "state": torch.randn(BATCH, HEADS, DIM, 5),
        "saved_k": torch.randn(BATCH, block, *keys), "saved_d": torch.randn(BATCH, block, *heads),
        "saved_a": torch.rand(BATCH, block, HEADS), "pending": _ints(3, 0), "keep": _ints(0, 2),
    }  # fmt: skip


def _convolution() -> dict[str, object]:
    return {
        "x": torch.randn(BATCH, ROWS, HIDDEN), "weight": torch.randn(HIDDEN, 4), "bias": torch.randn(HIDDEN),
        "silu": True, "window": torch.randn(BATCH, 3 + 4, HIDDEN), "pending": _ints(3, 0), "keep": _ints(0, 2),
    }  # fmt: skip


def _dynamic_convolution() -> dict[str, object]:
    x, dynamic = torch.randn(BATCH, ROWS, HIDDEN), torch.randn(BATCH, ROWS, 2, 4)
    return {"x": x, "base": torch.randn(2, HIDDEN), "dynamic": dynamic}


def _layers() -> dict[str, object]:
    return {
        "hidden": torch.randn(BATCH, ROWS, HIDDEN), "context": torch.randn(BATCH, 4, HIDDEN),
        "num_context": _ints(0, 2), "lengths": _ints(1, 6), "cos": torch.rand(CAPACITY, DIM // 2),
        "sin": torch.rand(CAPACITY, DIM // 2), "k_caches": [cache(), cache()], "v_caches": [cache(), cache()],
    }  # fmt: skip


def _recurrent_layers() -> dict[str, object]:
    shapes = {
        "windows": (CONV - 1 + BLOCK, CHANNELS), "states": (HEADS, DIM, DIM), "saved_k": (BLOCK, KV_HEADS, DIM),
        "saved_d": (BLOCK, HEADS, DIM), "saved_a": (BLOCK, HEADS),
    }  # fmt: skip
    buffers = {name: [torch.rand(BATCH, *shape)] for name, shape in shapes.items()}
    caches = {"k_caches": [cache()], "v_caches": [cache()], "context": None, "num_context": None}
    return _layers() | caches | buffers | {"pending": _ints(0, 3), "keep": _ints(2, 0)}


def cache() -> Tensor:
    """Return a random cache of keys or values."""
    return torch.randn(BATCH, KV_HEADS, CAPACITY, DIM)


CALLS: dict[str, Callable[[], dict[str, object]]] = {
    "rms_norm": lambda: {
        "x": torch.randn(BATCH, ROWS, HIDDEN), "weight": torch.randn(HIDDEN), "eps": 1e-6, "counts": _ints(3, 1),
        "front": torch.randn(BATCH, 2, HIDDEN)},
    "add_rms_norm": lambda: {
        "x": torch.randn(BATCH, ROWS, HIDDEN), "residual": torch.randn(BATCH, ROWS, HIDDEN),
        "weight": torch.randn(HIDDEN), "eps": 1e-6, "tap": torch.zeros(BATCH, ROWS, HIDDEN),
        "front": torch.randn(BATCH, 2, HIDDEN)},
    "dynamic_conv": lambda: _dynamic_convolution() | {"front": torch.randn(BATCH, 2, HIDDEN)},
    "conv_add_rms_norm": lambda: _dynamic_convolution() | {
        "residual": torch.randn(BATCH, ROWS, HIDDEN), "weight": torch.randn(HIDDEN), "eps": 1e-6,
        "tap": torch.zeros(BATCH, ROWS, HIDDEN)},
    "draft_rows": lambda: {
        "tokens": torch.randint(0, VOCAB, (BATCH, CAPACITY)), "length": _ints(3, 7),
        "drafts": torch.randint(0, VOCAB, (BATCH, ROWS)), "table": torch.randn(VOCAB, HIDDEN), "mask_id": 5,
        "num_drafts": ROWS, "rows": ROWS + 1, "mask_embedding": torch.randn(HIDDEN), "scale": 1.5},
    "silu_mul": lambda: {"gate_up": torch.randn(BATCH, ROWS, 2 * HIDDEN)},
    "swiglu": lambda: {
        "x": torch.randn(ROWS, HIDDEN), "gate": torch.randn(WIDTH, HIDDEN), "up": torch.randn(WIDTH, HIDDEN),
        "prefetch": False},
    "sigmoid_mul": lambda: {"x": torch.randn(ROWS, HEADS, DIM), "gate": torch.randn(ROWS, HEADS, DIM)},
    "delta_net_inputs": lambda: {
        "qkv": torch.randn(BATCH, ROWS, (2 * KV_HEADS + HEADS) * DIM), "b": torch.randn(BATCH, ROWS, HEADS),
        "a": torch.randn(BATCH, ROWS, HEADS), "a_log": torch.randn(HEADS), "dt_bias": torch.randn(HEADS),
        "key_heads": KV_HEADS, "key_dim": DIM},
    "gated_rms_norm": lambda: {
        "x": torch.randn(BATCH, ROWS, HEADS, DIM), "z": torch.randn(BATCH, ROWS, HEADS * DIM),
        "weight": torch.randn(DIM), "eps": 1e-6},
    "fuse_features": lambda: {
        "context": torch.randn(BATCH, ROWS, 2 * HIDDEN), "num_context": _ints(3, 1),
        "fc_weight": torch.randn(HIDDEN, 2 * HIDDEN), "norm_weight": torch.randn(HIDDEN), "eps": 1e-6},
    "linear": lambda: {
        "x": torch.randn(ROWS, HIDDEN), "weight": torch.randn(WIDTH, HIDDEN), "bias": torch.randn(WIDTH),
        "prefetch": False},
    "linears": lambda: {
        "x": torch.randn(ROWS, HIDDEN), "weights": [torch.randn(WIDTH, HIDDEN), torch.randn(5, HIDDEN)],
        "biases": [torch.randn(WIDTH), torch.randn(5)], "prefetch": False},
    "experts": lambda: {
        "x": torch.randn(ROWS, HIDDEN), "ids": torch.arange(2 * ROWS).view(ROWS, 2) % 3, "scores": torch.rand(ROWS, 2),
        "gate_up": torch.randn(3, 2 * WIDTH, HIDDEN), "down": torch.randn(3, HIDDEN, WIDTH),
        "gate_up_bias": torch.randn(3, 2 * WIDTH), "down_bias": torch.randn(3, HIDDEN), "gate": "silu", "alpha": 1.0,
        "limit": 1.0, "transposed": False},
    "block_attention": lambda: {
        "q": torch.randn(BATCH, ROWS, HEADS, DIM), "k_cache": cache(), "v_cache": cache(), "lengths": _ints(0, 7),
        "scale": 0.3, "causal": True, "window": 0, "softcap": 0.0, "sinks": torch.randn(HEADS), "ancestors": None},
    "append_kv_": lambda: {
        "key": torch.randn(BATCH, KV_HEADS, ROWS, DIM), "value": torch.randn(BATCH, KV_HEADS, ROWS, DIM),
        "positions": _positions(), "k_cache": cache(), "v_cache": cache()},
    "qkv_norm_rope_append_": _qkv,
    "append_context_kv_": _context,
    "select_tokens": lambda: {
        "logits": torch.randn(BATCH, ROWS, VOCAB), "positions": torch.arange(BATCH * ROWS).view(BATCH, ROWS),
        "seeds": _ints(1, 2), "temperature": torch.tensor([0.0, 0.8]), "top_k": _ints(0, 9),
        "top_p": torch.tensor([1.0, 0.9]), "min_p": torch.tensor([0.0, 0.01]), "sharpness": torch.ones(BATCH)},
    "log_sum_exp": lambda: {"logits": torch.randn(BATCH, ROWS, VOCAB)},
    "tree_candidates": lambda: {
        "logits": torch.randn(BATCH, ROWS, VOCAB), "positions": torch.arange(BATCH * ROWS).view(BATCH, ROWS),
        "seeds": _ints(1, 2), "temperature": torch.tensor([0.0, 0.8]), "count": 5, "noise_weight": 0.1},
    "top_candidates": lambda: {
        "logits": torch.randn(BATCH, ROWS, VOCAB), "positions": torch.arange(BATCH * ROWS).view(BATCH, ROWS),
        "seeds": _ints(1, 2), "temperature": torch.tensor([0.0, 0.8]), "sharpness": torch.ones(BATCH), "count": 5},
    "walk_candidates": lambda: {
        "hidden": torch.randn(BATCH, ROWS, DIM), "predecessors": torch.randn(VOCAB, DIM),
        "successors": torch.randn(VOCAB, DIM), "anchor": _ints(3, 4),
        "ids": torch.arange(BATCH * ROWS * 5).view(BATCH, ROWS, 5), "logits": torch.randn(BATCH, ROWS, 5),
        "positions": torch.arange(BATCH * ROWS).view(BATCH, ROWS), "seeds": _ints(1, 2),
        "temperature": torch.tensor([0.0, 0.8]), "top_k": _ints(0, 9), "top_p": torch.tensor([1.0, 0.9]),
        "min_p": torch.tensor([0.0, 0.01]), "sharpness": torch.ones(BATCH), "stream": 0},
    "build_tree": lambda: {
        "anchor": _ints(3, 4), "ids": torch.arange(BATCH * ROWS * 5).view(BATCH, ROWS, 5),
        "scores": -torch.rand(BATCH, ROWS, 5).sort().values, "rows": 9},
    "accept_prefix_": lambda: {
        "block_ids": torch.tensor([[9, 1, 2], [8, 4, 4]]), "posterior": torch.tensor([[1, 2, 3], [4, 5, 6]]),
        "stop_token_ids": _ints(5, 50).repeat(BATCH, 1), "limits": _ints(100, 100),
        "tokens": torch.full((BATCH, CAPACITY), -7), "length": _ints(3, 4), "num_context": _ints(0, 0),
        "done": _ints(0, 0)},
    "accept_path_": lambda: {
        "ids": torch.tensor([[9, 1, 2], [8, 4, 4]]), "parents": torch.tensor([[-1, 0, 0], [-1, 0, 1]]),
        "choices": torch.tensor([[2, 2, 3], [4, 5, 6]]), "stop_token_ids": _ints(5, 50).repeat(BATCH, 1),
        "limits": _ints(100, 100), "tokens": torch.full((BATCH, CAPACITY), -7), "length": _ints(3, 4),
        "num_context": _ints(0, 0), "done": _ints(0, 0),
        **{name: torch.zeros(BATCH, 2, dtype=torch.int64) for name in ("path", "chain_choices", "chain_ids")}},
    "compact_kv_": lambda: {
        "path": torch.tensor([[0, 2, 3], [0, 1, 4]]), "counts": _ints(3, 3), "first": _ints(1, 6),
        "k_caches": [cache(), cache()], "v_caches": [cache(), torch.randn(BATCH, KV_HEADS, CAPACITY, 5)]},
    "gather_rows_": lambda: {
        "x": torch.randn(BATCH, ROWS, HIDDEN), "path": torch.tensor([[0, 2], [1, 1]]),
        "out": torch.zeros(BATCH, 2, HIDDEN)},
    "gated_recurrence_": _recurrence,
    "causal_conv_": _convolution,
    "decoder_layers": _layers,
    RECURRENT: _recurrent_layers,
}  # fmt: skip


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
