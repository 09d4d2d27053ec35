"""The weights of whole decoder layers, and their checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .contract import Contract, expect_memory, expect_strided
from .formats import FORMATS, PackedWeight, Weight

_OP = "decoder_layers"
# In place of gate, up and down, which are None then: takes and returns [batch, rows, hidden].
Experts = Callable[[Tensor], Tensor]


class BlockConv(NamedTuple):
    """The weights of `dynamic_conv` over the rows of a block, in front of a sublayer (side 0) and after it (side 1).

    The dynamic weights ``[rows, 2, taps, groups]`` are the sublayer's input times ``projection``.
    """

    base: Tensor  # [2, taps, hidden]
    projection: Tensor  # [2 * taps * groups, hidden]

    def record(self) -> tuple:
        """Return the fields of ``BlockConvWeights``, as in params.h."""
        taps = self.base.shape[1]
        return self.base, self.projection, taps, self.projection.shape[0] // (2 * taps)


def _is_plain(layer: DecoderLayer | DeltaNetLayer) -> bool:
    """Return True if `decoder_layers` can run a layer."""
    packed = [weight for weight in layer if isinstance(weight, PackedWeight)]
    are_read = all(weight.order is None and FORMATS[weight.format].device != "cuda" for weight in packed)
    return layer.experts is None and are_read and not layer.is_packed_together


class DecoderLayer(NamedTuple):
    """The weights of one pre-norm decoder layer with attention, every matrix ``[out, in]``."""

    input_norm: Tensor  # [hidden]
    q: Weight  # [num_heads * head_dim, hidden]; twice as many rows if gated
    k: Weight  # [num_kv_heads * head_dim, hidden]
    v: Weight  # [num_kv_heads * head_dim, hidden]
    o: Weight  # [hidden, num_heads * head_dim]
    post_norm: Tensor  # [hidden]
    gate: Weight | None  # [width, hidden]
    up: Weight | None  # [width, hidden]
    down: Weight | None  # [hidden, width]
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None  # [head_dim]
    q_bias: Tensor | None = None  # of q's rows; of q, k and v all or none
    k_bias: Tensor | None = None  # [num_kv_heads * head_dim]
    v_bias: Tensor | None = None  # [num_kv_heads * head_dim]
    o_bias: Tensor | None = None  # [hidden]
    sinks: Tensor | None = None  # [num_heads], see block_attention
    causal: bool = True
    window: int = 0  # as in block_attention; 0 for none
    gated: bool = False  # q has a gate after each head, and the attention's output is multiplied by its sigmoid
    experts: Experts | None = None
    attention_conv: BlockConv | None = None
    mlp_conv: BlockConv | None = None
    attention_out_norm: Tensor | None = None  # [hidden], of what the attention adds; with it goes mlp_out_norm
    mlp_out_norm: Tensor | None = None  # [hidden]
    gate_kind: str = "silu"  # or "gelu_tanh"

    is_recurrent = is_packed_together = False
    is_plain = property(_is_plain)


class DeltaNetLayer(NamedTuple):
    """The weights of one pre-norm decoder layer with a Gated DeltaNet, every matrix ``[out, in]``.

    Without ``z`` and ``a``, ``qkv`` has per key head its q, its k, the v of the heads that it serves and their z, and
    ``b`` has per key head the b and then the a of these heads.
    """

    input_norm: Tensor  # [hidden]
    qkv: Weight  # [2 * key_heads * key_dim + heads * value_dim, hidden]: q heads, k heads, v heads
    z: Weight | None  # [heads * value_dim, hidden]
    b: Weight  # [heads, hidden]
    a: Weight | None  # [heads, hidden]
    conv: Tensor  # [2 * key_heads * key_dim + heads * value_dim, 1, conv_width]
    a_log: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    norm: Tensor  # [value_dim]
    out: Weight  # [hidden, heads * value_dim]
    post_norm: Tensor  # [hidden]
    gate: Weight | None  # [width, hidden]
    up: Weight | None  # [width, hidden]
    down: Weight | None  # [hidden, width]
    key_heads: int
    experts: Experts | None = None

    is_recurrent = True
    attention_conv = mlp_conv = attention_out_norm = mlp_out_norm = None
    gate_kind = "silu"
    is_plain = property(_is_plain)

    @property
    def is_packed_together(self) -> bool:
        """True if packed weights hold rows that `decoder_layers` needs apart."""
        return self.z is None and any(isinstance(weight, PackedWeight) for weight in (self.qkv, self.b))

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """``(key_heads, heads, key_dim, value_dim, conv_width)``."""
        heads, value_dim = self.a_log.shape[0], self.norm.shape[0]
        keys = self.conv.shape[0] - heads * value_dim
        return self.key_heads, heads, keys // (2 * self.key_heads), value_dim, self.conv.shape[2]

    @property
    def projections(self) -> list[Weight]:
        """The weights that meet the layer's input."""
        return [weight for weight in (self.qkv, self.z, self.b, self.a) if weight is not None]

    def split(self, projected: Tensor) -> Sequence[Tensor]:
        """Return ``qkv``, ``z``, ``b``, ``a``, each ``[batch, rows, ...]``, from the products side by side."""
        parts = projected.split([weight.shape[0] for weight in self.projections], -1)
        if self.z is not None:
            return parts
        key_heads, heads, key_dim, value_dim, _ = self.sizes
        served = heads // key_heads
        per_head = [key_dim, key_dim, served * value_dim, served * value_dim]
        q, k, v, z = (x.flatten(2) for x in parts[0].unflatten(-1, (key_heads, -1)).split(per_head, -1))
        b, a = (x.flatten(2) for x in parts[1].unflatten(-1, (key_heads, -1)).split(served, -1))
        return torch.cat([q, k, v], -1), z, b, a


def _contract(kind: type[NamedTuple], tensors: str, where: str, derived: str = "") -> Contract:
    numbers = {"causal": bool, "window": int, "gated": bool, "key_heads": int}
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ("final_norm", *kind._fields)
    parameters = [inspect.Parameter(name, place, annotation=numbers.get(name, Tensor | None)) for name in names]
    return Contract(_OP, parameters, "final_norm[hidden] " + tensors, where=where, derived=derived)


_MLP = "input_norm[hidden] post_norm[hidden] gate[width, hidden]:T|u8 up[width, hidden]:T|u8 down[hidden, width]:T|u8 "
_CONTRACTS = {
    DecoderLayer: _contract(
        DecoderLayer,
        _MLP + "o[hidden, q_size]:T|u8 q[q_size * (2 if gated else 1), hidden]:T|u8 k[kv_size, hidden]:T|u8 "
        "v[kv_size, hidden]:T|u8 q_norm[head_dim] k_norm[head_dim] q_bias[q_size * (2 if gated else 1)] "
        "k_bias[kv_size] v_bias[kv_size] o_bias[hidden] sinks[sinks_given]:any attention_out_norm[hidden] "
        "mlp_out_norm[hidden]",
        "hidden >= 1; width >= 1; q_size >= 1; has(q_norm) == has(k_norm): q_norm and k_norm come together; "
        "has(attention_out_norm) == has(mlp_out_norm): attention_out_norm and mlp_out_norm come together; "
        "has(q_bias) == has(k_bias) == has(v_bias): q_bias, k_bias and v_bias come together; window >= 0",
    ),
    DeltaNetLayer: _contract(
        DeltaNetLayer,
        _MLP + "conv[channels, 1, conv_width] a_log[heads] norm[value_dim] dt_bias[heads] out[hidden, values]:T|u8 "
        "qkv[channels + (0 if has(z) else values), hidden]:T|u8 z[values, hidden]:T|u8 "
        "b[heads * (1 if has(z) else 2), hidden]:T|u8 a[heads, hidden]:T|u8",
        "hidden >= 1; width >= 1; heads >= 1 and value_dim >= 1 and conv_width >= 1; "
        "key_heads >= 1 and heads % key_heads == 0; keys >= 1 and keys % (2 * key_heads) == 0; "
        "has(z) == has(a): z and a come together",
        "values = heads * value_dim; keys = channels - heads * value_dim",
    ),
    BlockConv: _contract(
        BlockConv,
        "base[2, taps, hidden] projection[columns, hidden]",
        "taps >= 1; columns >= 1 and columns % (2 * taps) == 0; hidden % (columns // (2 * taps)) == 0",
    ),
}
_SHARED = ("hidden", "width", "q_size", "kv_size", "head_dim", "gated", "channels", "heads", "value_dim", "key_heads")


def check_layers(layers: Sequence[DecoderLayer | DeltaNetLayer], norm: Tensor, taps: Sequence[int]) -> None:
    """Raise unless every weight is as the contracts say, and the sizes are those of the first layer of its kind."""
    # 1. The stack
    if all(layer.is_recurrent for layer in layers):
        raise ValueError(f"{_OP}: layers must have at least one layer with attention, got none")
    if [tap for tap in taps if not 0 <= tap < len(layers)] or len(set(taps)) != len(taps):
        raise ValueError(f"{_OP}: taps must be different layers in 0 .. {len(layers) - 1}, got {list(taps)}")
    for name, tensor in named_tensors(layers, norm):
        if not tensor.is_contiguous():
            raise ValueError(f"{_OP}: {name} must be contiguous, got strides {tensor.stride()}")
    # 2. Each layer
    sizes: dict[bool, dict[str, int]] = {}
    for i, layer in enumerate(layers):
        own = _check_weights(f"layers[{i}].", layer, norm)
        for name, size in sizes.setdefault(layer.is_recurrent, own).items():
            if own[name] != size:
                raise ValueError(f"{_OP}: layers[{i}] must have {name} = {size} as the layers before, got {own[name]}")
        for name in ("attention_conv", "mlp_conv"):
            if (conv := getattr(layer, name)) is not None:
                _check_weights(f"layers[{i}].{name}.", conv, norm)


def _check_weights(at: str, weights: DecoderLayer | DeltaNetLayer | BlockConv, norm: Tensor) -> dict[str, int]:
    """Check one record of weights; return the sizes that all of its kind have in common."""
    for name, weight in weights._asdict().items():
        if name in _PROJECTIONS and isinstance(weight, Tensor) and weight.dtype != norm.dtype:
            raise TypeError(f"{_OP}: {at}{name} must be {norm.dtype} or a PackedWeight, got {weight.dtype}")
        if isinstance(weight, PackedWeight) and weight.order is not None:
            raise ValueError(f"{_OP}: {at}{name} must have its columns in order: DecoderStack goes op by op")
    if isinstance(weights, DeltaNetLayer) and weights.is_packed_together:
        raise TypeError(f"{_OP}: {at}qkv and z, b and a must be separate where they are packed: use packed_layer")
    plain = [x.packed.new_empty(x.shape) if isinstance(x, PackedWeight) else x for x in weights]  # only looked at
    scope = vars(_CONTRACTS[type(weights)].check([norm, *plain], at))
    return {name: scope[name] for name in _SHARED if name in scope}


_PROJECTIONS = ("q", "k", "v", "o", "qkv", "z", "b", "a", "out", "gate", "up", "down")


def packed_layer(layer: DecoderLayer | DeltaNetLayer, format: str) -> DecoderLayer | DeltaNetLayer:
    """Return the layer with the weights of its projections packed, in new memory. Convolutions stay as they are.

    Raises:
        NotFiniteError: a value is infinite or NaN.
    """
    weights = ((name, getattr(layer, name, None)) for name in _PROJECTIONS)
    packed = {name: PackedWeight.of(weight, format) for name, weight in weights if weight is not None}
    return separate_packed(layer._replace(**packed))


def separate_packed(layer: DecoderLayer | DeltaNetLayer) -> DecoderLayer | DeltaNetLayer:
    """Return the layer with ``qkv`` and ``z``, ``b`` and ``a`` of a Gated DeltaNet apart if they are packed.

    Each then begins with a tile of its own (`DeltaNetLayer.split`). Other layers are returned as they are, those with
    one of both packed too: copies would not follow the dense one.
    """
    if not layer.is_recurrent or layer.z is not None or {type(layer.qkv), type(layer.b)} != {PackedWeight}:
        return layer
    rows = layer.qkv.shape[0]
    qkv, z, b, a = (x.flatten() for x in layer.split(torch.arange(rows + layer.b.shape[0])[None, None]))
    qkv, z = map(layer.qkv.select, (qkv, z))
    b, a = (layer.b.select(channels - rows) for channels in (b, a))
    return layer._replace(qkv=qkv, z=z, b=b, a=a)


def named_tensors(layers: Sequence[DecoderLayer | DeltaNetLayer], norm: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight with its name."""
    yield "norm", norm
    for i, layer in enumerate(layers):
        yield from _tensors_of(f"layers[{i}]", layer)


def _tensors_of(
    at: str, weights: DecoderLayer | DeltaNetLayer | BlockConv | PackedWeight
) -> Iterator[tuple[str, Tensor]]:
    for name, value in weights._asdict().items():
        if isinstance(value, (BlockConv, PackedWeight)):
            yield from _tensors_of(f"{at}.{name}", value)
        elif isinstance(value, Tensor):
            yield f"{at}.{name}", value


def check_memory(layers: Sequence[DecoderLayer | DeltaNetLayer], norm: Tensor) -> None:
    """Check that the addresses of the weights may be kept, and are those of their values."""
    for name, tensor in named_tensors(layers, norm):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{_OP}: {name} must be a torch.Tensor or Parameter itself, got {type(tensor).__name__}")
        expect_strided(_OP, name, tensor)
        expect_memory(_OP, name, tensor)
        if tensor.is_neg():
            raise ValueError(f"{_OP}: {name} must not be a negative view: its sign is not in memory. resolve_neg() it")
