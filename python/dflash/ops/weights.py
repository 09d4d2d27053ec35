"""The weights of whole decoder layers, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import expect, expect_memory, expect_strided
from .int8 import Int8Weight, Weight, expect_weight

_OP = "decoder_layers"
# In place of gate, up and down, which are None then: takes and returns [batch, rows, hidden].
Experts = Callable[[Tensor], Tensor]


class BlockConv(NamedTuple):
    """The weights of a convolution over the rows of a block, in front of a sublayer (side 0) and after it (side 1).

    Row t of the output is the sum over taps i of ``(base[side, i] + kernels[t, side, i]) * x[t - i]``, with zeros in
    front of the block. ``kernels [rows, 2, taps, groups]`` are the sublayer's input times ``projection``; channels of
    one group, hidden / groups in a row, share a number.
    """

    base: Tensor  # [2, taps, hidden]
    projection: Tensor  # [2 * taps * groups, hidden]

    def record(self) -> tuple:
        """Return the fields of ``BlockConvWeights``, as in params.h."""
        taps = self.base.shape[1]
        return self.base, self.projection, taps, self.projection.shape[0] // (2 * taps)


def linear_weight(weight: Weight | None) -> tuple | None:
    """Return the fields of ``LinearWeight``, as in params.h."""
    return weight if weight is None or isinstance(weight, Int8Weight) else (weight, None)


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

    is_recurrent = False

    def mixer(self) -> tuple:
        """Return the fields of ``AttentionWeights``, as in params.h."""
        qkvo, norms = map(linear_weight, (self.q, self.k, self.v, self.o)), (self.q_norm, self.k_norm)
        biases = (self.q_bias, self.k_bias, self.v_bias, self.o_bias)
        return (*qkvo, *norms, *biases, self.sinks, self.causal, self.window, self.gated)


class DeltaNetLayer(NamedTuple):
    """The weights of one pre-norm decoder layer with a Gated DeltaNet, every matrix ``[out, in]``.

    The recurrence has ``heads`` heads, and ``key_heads`` heads of q and k that each serve several in a row. Without
    ``z`` and ``a``, ``qkv`` has per key head its q, its k, the v of the heads that it serves and their z, and ``b`` has
    per key head the b and then the a of these heads.
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
    attention_conv = mlp_conv = None

    def mixer(self) -> tuple:
        """Return the fields of ``DeltaNetWeights``, as in params.h."""
        projections = map(linear_weight, (self.qkv, self.z, self.b, self.a))
        return *projections, self.conv, self.a_log, self.dt_bias, self.norm, linear_weight(self.out)

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


def check_layers(layers: Sequence[DecoderLayer | DeltaNetLayer], norm: Tensor, taps: Sequence[int]) -> None:
    """Check every weight against the shapes of the first layer's of its kind."""
    _check_stack(layers, norm, taps)
    size, dtype, width = norm.shape[0], norm.dtype, layers[0].gate.shape[0]
    shared = {"input_norm": (size,), "post_norm": (size,), "gate": (width, size), "up": (width, size)}
    shared["down"] = (size, width)
    shapes: dict[bool, dict[str, tuple[int, ...]]] = {}
    for i, layer in enumerate(layers):
        if layer.is_recurrent not in shapes:
            own = _delta_net_shapes if layer.is_recurrent else _attention_shapes
            shapes[layer.is_recurrent] = shared | own(f"layers[{i}]", layer, size, dtype)
        _check_shapes(f"layers[{i}]", layer, shapes[layer.is_recurrent], dtype)
        if not layer.is_recurrent:
            _check_attention(f"layers[{i}]", layer, "q_norm" in shapes[False])
        for name in ("attention_conv", "mlp_conv"):
            if getattr(layer, name) is not None:
                _check_conv(f"layers[{i}].{name}", getattr(layer, name), size, dtype)
    if len({layer.sizes for layer in layers if layer.is_recurrent}) > 1:
        raise ValueError(f"{_OP}: all recurrent layers must have heads of one shape, got several")
    if len({layer.gated for layer in layers if not layer.is_recurrent}) > 1:
        raise ValueError(f"{_OP}: gated must be the same in all layers of attention")


def _check_stack(layers: Sequence[DecoderLayer | DeltaNetLayer], norm: Tensor, taps: Sequence[int]) -> None:
    if all(layer.is_recurrent for layer in layers):
        raise ValueError(f"{_OP}: layers must have at least one layer with attention, got none")
    if [tap for tap in taps if not 0 <= tap < len(layers)] or len(set(taps)) != len(taps):
        raise ValueError(f"{_OP}: taps must be different layers in 0 .. {len(layers) - 1}, got {list(taps)}")
    first, dtype = layers[0], norm.dtype
    expect(_OP, "layers[0].input_norm", first.input_norm, (None,), dtype, "hidden")
    size = first.input_norm.shape[0]
    if size == 0:
        raise ValueError(f"{_OP}: layers[0].input_norm must be [hidden] with hidden >= 1, got [0]")
    expect(_OP, "norm", norm, (size,), dtype, "hidden")
    if not norm.is_contiguous():
        raise ValueError(f"{_OP}: norm must be contiguous, got strides {norm.stride()}")
    for _, tensor in named_tensors(layers, norm):
        if tensor.device != norm.device:
            raise ValueError(f"{_OP}: all weights must be on {norm.device} as norm is, got {tensor.device}")
    if any(layer.experts is not None for layer in layers):
        raise ValueError(f"{_OP}: layers must have gate, up and down, got experts")
    expect_weight(_OP, "layers[0].gate", first.gate, (None, size), dtype, "out, hidden")
    if first.gate.shape[0] == 0:
        raise ValueError(f"{_OP}: layers[0].gate must have at least one row, got none")


def _attention_shapes(at: str, layer: DecoderLayer, size: int, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    for name in ("q", "k"):
        expect_weight(_OP, f"{at}.{name}", getattr(layer, name), (None, size), dtype, "out, hidden")
    rows, kv_size = layer.q.shape[0], layer.k.shape[0]
    q_size = rows // 2 if layer.gated else rows
    if q_size == 0:
        raise ValueError(f"{_OP}: {at}.q must have at least one row, got {rows}")
    shapes = {
        "q": (rows, size), "k": (kv_size, size), "v": (kv_size, size), "o": (size, q_size), "q_bias": (rows,),
        "k_bias": (kv_size,), "v_bias": (kv_size,), "o_bias": (size,),
    }  # fmt: skip
    if layer.q_norm is not None:
        shapes |= dict.fromkeys(("q_norm", "k_norm"), tuple(layer.q_norm.shape))
    return shapes


def _delta_net_shapes(at: str, layer: DeltaNetLayer, size: int, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    expect(_OP, f"{at}.a_log", layer.a_log, (None,), dtype, "heads")
    expect(_OP, f"{at}.norm", layer.norm, (None,), dtype, "value_dim")
    expect(_OP, f"{at}.conv", layer.conv, (None, 1, None), dtype, "channels, 1, conv_width")
    heads, value_dim, (channels, _, width) = layer.a_log.shape[0], layer.norm.shape[0], layer.conv.shape
    values, key_heads = heads * value_dim, layer.key_heads
    keys = channels - values
    if min(heads, value_dim, width, key_heads, keys) < 1 or heads % key_heads or keys % (2 * key_heads):
        raise ValueError(
            f"{_OP}: {at}.conv must be [2 * key_heads * key_dim + heads * value_dim, 1, conv_width] with key_heads = "
            f"{key_heads} a divisor of heads = {heads} and value_dim = {value_dim}, got {list(layer.conv.shape)}"
        )
    if (layer.z is None) != (layer.a is None):
        raise ValueError(f"{_OP}: {at}.z and .a come together, got one of them")
    apart = layer.z is not None
    return {
        "qkv": (channels + (0 if apart else values), size), "z": (values, size), "a": (heads, size),
        "b": (heads if apart else 2 * heads, size), "conv": (channels, 1, width), "a_log": (heads,),
        "dt_bias": (heads,), "norm": (value_dim,), "out": (size, values),
    }  # fmt: skip


def _check_shapes(
    at: str, layer: DecoderLayer | DeltaNetLayer, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    for name, shape in shapes.items():
        weight = getattr(layer, name)
        if weight is not None:
            expect_weight(_OP, f"{at}.{name}", weight, shape, dtype, ", ".join(map(str, shape)))
            for tensor in weight if isinstance(weight, Int8Weight) else (weight,):
                if not tensor.is_contiguous():
                    raise ValueError(f"{_OP}: {at}.{name} must be contiguous, got strides {tensor.stride()}")


def _check_attention(at: str, layer: DecoderLayer, has_norms: bool) -> None:
    if (layer.q_norm is not None) != has_norms or (layer.k_norm is not None) != has_norms:
        raise ValueError(f"{_OP}: q_norm and k_norm must be in all layers or in none, see {at}")
    if len({layer.q_bias is None, layer.k_bias is None, layer.v_bias is None}) == 2:
        raise ValueError(f"{_OP}: q_bias, k_bias and v_bias come together, got some of them in {at}")
    if layer.window < 0:
        raise ValueError(f"{_OP}: {at}.window must be positive, or 0 for none, got {layer.window}")
    if layer.sinks is not None and (layer.sinks.dim() != 1 or not layer.sinks.is_contiguous()):
        raise ValueError(f"{_OP}: {at}.sinks must be [num_heads], contiguous, got {list(layer.sinks.shape)}")


def _check_conv(at: str, conv: BlockConv, size: int, dtype: torch.dtype) -> None:
    expect(_OP, f"{at}.base", conv.base, (2, None, size), dtype, "2, taps, hidden")
    expect(_OP, f"{at}.projection", conv.projection, (None, size), dtype, "2 * taps * groups, hidden")
    rows, taps = conv.projection.shape[0], conv.base.shape[1]
    groups = rows // (2 * taps) if taps else 0
    if groups == 0 or rows != 2 * taps * groups or size % groups:
        raise ValueError(
            f"{_OP}: {at}.projection must be [2 * taps * groups, hidden] with taps = {taps} >= 1 and groups a divisor "
            f"of hidden = {size}, got {list(conv.projection.shape)}"
        )
    for name, weight in conv._asdict().items():
        if not weight.is_contiguous():
            raise ValueError(f"{_OP}: {at}.{name} must be contiguous, got strides {weight.stride()}")


_PROJECTIONS = ("q", "k", "v", "o", "qkv", "z", "b", "a", "out", "gate", "up", "down")


def int8_layer(layer: DecoderLayer | DeltaNetLayer) -> DecoderLayer | DeltaNetLayer:
    """Return the layer with the weights of its projections in 8 bits, in new memory. Convolutions stay as they are.

    Raises:
        NotFiniteError: a value is infinite or NaN.
    """
    return layer._replace(**int8_weights(layer))


def int8_weights(layer: DecoderLayer | DeltaNetLayer) -> dict[str, Int8Weight]:
    """Return copies in 8 bits of the weights of a layer's projections, by their names; raises as `int8_layer`."""
    weights = ((name, getattr(layer, name, None)) for name in _PROJECTIONS)
    return {name: Int8Weight.of(weight) for name, weight in weights if weight is not None}


def named_tensors(layers: Sequence[DecoderLayer | DeltaNetLayer], norm: Tensor) -> list[tuple[str, Tensor]]:
    """Return every weight with its name."""
    named = [("norm", norm)]
    for i, layer in enumerate(layers):
        named += _tensors_of(f"layers[{i}]", layer)
    return named


def _tensors_of(
    at: str, weights: DecoderLayer | DeltaNetLayer | BlockConv | Int8Weight
) -> Iterator[tuple[str, Tensor]]:
    for name, value in weights._asdict().items():
        if isinstance(value, (BlockConv, Int8Weight)):
            yield from _tensors_of(f"{at}.{name}", value)
        elif isinstance(value, Tensor):
            yield f"{at}.{name}", value


def check_memory(layers: Sequence[DecoderLayer | DeltaNetLayer], norm: Tensor) -> None:
    """Check that the addresses of the weights may be kept, and are those of their values."""
    for name, tensor in named_tensors(layers, norm):
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{_OP}: {name} must be a torch.Tensor or Parameter itself, got {type(tensor).__name__}")
        expect_strided(_OP, [name], [tensor])
        expect_memory(_OP, name, tensor)
        if tensor.is_neg():
            raise ValueError(
                f"{_OP}: {name} must not be a negative view, whose sign is not in memory: resolve_neg() it"
            )
