"""Whole decoder layers in one op: their weights, checked and packed once, and the op that runs them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C
from . import reference
from .checks import dense, expect, expect_memory, expect_strided
from .kv_cache import expect_caches
from .registry import Launcher, op


class DecoderLayer(NamedTuple):
    """The weights of one pre-norm decoder layer, every matrix ``[out, in]``. The order is that of params.h."""

    input_norm: Tensor  # [hidden]
    q: Tensor  # [num_heads * head_dim, hidden]
    k: Tensor  # [num_kv_heads * head_dim, hidden]
    v: Tensor  # [num_kv_heads * head_dim, hidden]
    o: Tensor  # [hidden, num_heads * head_dim]
    post_norm: Tensor  # [hidden]
    gate: Tensor  # [width, hidden]
    up: Tensor  # [width, hidden]
    down: Tensor  # [hidden, width]
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None  # [head_dim]
    q_bias: Tensor | None = None  # [num_heads * head_dim]; of q, k and v all or none
    k_bias: Tensor | None = None  # [num_kv_heads * head_dim]
    v_bias: Tensor | None = None  # [num_kv_heads * head_dim]
    o_bias: Tensor | None = None  # [hidden]
    sinks: Tensor | None = None  # [num_heads], see block_attention
    causal: bool = True
    window: int = 0  # as in block_attention; 0 for none


class PackedLayers:
    """Decoder layers and a final norm for `decoder_layers`: checked once, their addresses packed once.

    The op names them by ``handle``, which is valid as long as they live. It notices at every call which of them were
    changed since (``parameter.data = ...``, transposed, resized, freed), and checks and packs those again.

    Args:
        layers: the weights, contiguous, used where they are.
        norm: ``[hidden]``, the final norm.
        eps: of every norm.
        scale: the factor on the attention scores.
        taps: layers whose outputs are returned; the last layer's is read after the final norm.

    Raises:
        ValueError: a shape does not fit, or a tensor is not contiguous. TypeError: a dtype does not fit.
    """

    _handles = itertools.count()

    def __init__(
        self, layers: Sequence[DecoderLayer], norm: Tensor, *, eps: float, scale: float, taps: Sequence[int] = ()
    ) -> None:
        self.layers, self.norm = tuple(layers), norm
        self.eps, self.scale, self.taps = eps, scale, tuple(taps)
        self._forget()
        _check_layers(self)
        self.handle = f"layers {next(self._handles)}"
        _live[self.handle] = self

    def tensors(self) -> Iterator[Tensor]:
        """Yield every weight."""
        yield self.norm
        for layer in self.layers:
            yield from (field for field in layer if isinstance(field, Tensor))

    def refresh(self, signs: bool = True) -> None:
        """Check the weights again if one has another address, shape, dtype or storage. Takes 0.1 us per weight.

        Args:
            signs: see whether one became a negative view too (`torch.Tensor.is_neg`), which takes as long again.
        """
        if self._records is not None and not self._records.unchanged(signs):
            _check_layers(self)
            _check_memory(self)
            self._forget()

    def replace(self, layers: Sequence[DecoderLayer], norm: Tensor) -> None:
        """Use other tensors under the same handle, which a compiled step holds as a constant."""
        self.layers, self.norm = tuple(layers), norm
        _check_layers(self)
        self._forget()

    def _forget(self) -> None:
        """Drop what was packed, so that the storages may be freed."""
        self._records: _C.DecoderLayers | None = None  # keeps the storages
        self._copies: list[tuple[Tensor, Tensor]] = []
        self.checked_heads: tuple[int, int] | None = None  # (num_kv_heads, head_dim) that these weights fit

    def records(self) -> _C.DecoderLayers:
        """Return the layers as the kernel reads them, after `refresh`."""
        if self._records is None:
            self._pack()
        if self._copies:
            with torch.inference_mode(False), torch.no_grad():
                for copy, sinks in self._copies:
                    copy.copy_(sinks)
        return self._records

    @torch.inference_mode(False)  # the copies are written outside of it too
    @torch.no_grad()
    def _pack(self) -> None:
        _check_layers(self)
        _check_memory(self)
        # The kernel reads sinks in float32; copies of others get their values again at every call.
        wide = [None if layer.sinks is None else layer.sinks.detach().float() for layer in self.layers]
        pairs = zip(wide, (layer.sinks for layer in self.layers), strict=True)
        self._copies = [pair for pair in pairs if pair[1] is not None and pair[0].dtype != pair[1].dtype]
        tap_of = [self.taps.index(i) if i in self.taps else -1 for i in range(len(self.layers))]
        layers = [layer._replace(sinks=sinks) for layer, sinks in zip(self.layers, wide, strict=True)]
        records = [(*layer, tap) for layer, tap in zip(layers, tap_of, strict=True)]
        self._records = _C.DecoderLayers(records, [*self.tensors()])


_live: weakref.WeakValueDictionary[str, PackedLayers] = weakref.WeakValueDictionary()


def _packed(handle: str) -> PackedLayers:
    packed = _live.get(handle)
    if packed is None:
        raise ValueError(f"decoder_layers: layers must be the handle of living PackedLayers, got {handle!r}")
    return packed


def _check_layers(packed: PackedLayers) -> None:
    """Check every weight against the shapes of the first layer's."""
    op, layers, taps = "decoder_layers", packed.layers, packed.taps
    # 1. The stack
    if not layers:
        raise ValueError(f"{op}: layers must have at least one layer, got none")
    if [tap for tap in taps if not 0 <= tap < len(layers)] or len(set(taps)) != len(taps):
        raise ValueError(f"{op}: taps must be different layers in 0 .. {len(layers) - 1}, got {list(taps)}")
    first, dtype = layers[0], packed.norm.dtype
    expect(op, "layers[0].input_norm", first.input_norm, (None,), dtype, "hidden")
    size = first.input_norm.shape[0]
    if size == 0:
        raise ValueError(f"{op}: layers[0].input_norm must be [hidden] with hidden >= 1, got [0]")
    expect(op, "norm", packed.norm, (size,), dtype, "hidden")
    if not packed.norm.is_contiguous():
        raise ValueError(f"{op}: norm must be contiguous, got strides {packed.norm.stride()}")
    for tensor in packed.tensors():
        if tensor.device != packed.norm.device:
            raise ValueError(f"{op}: all weights must be on {packed.norm.device} as norm is, got {tensor.device}")
    # 2. Its layers
    for name in ("q", "k", "gate"):
        expect(op, f"layers[0].{name}", getattr(first, name), (None, size), dtype, "out, hidden")
    q_size, kv_size, width = first.q.shape[0], first.k.shape[0], first.gate.shape[0]
    if q_size == 0 or width == 0:
        raise ValueError(f"{op}: layers[0].q and .gate must have at least one row, got {q_size} and {width}")
    shapes = {
        "input_norm": (size,), "q": (q_size, size), "k": (kv_size, size), "v": (kv_size, size), "o": (size, q_size),
        "post_norm": (size,), "gate": (width, size), "up": (width, size), "down": (size, width), "q_bias": (q_size,),
        "k_bias": (kv_size,), "v_bias": (kv_size,), "o_bias": (size,),
    }  # fmt: skip
    if first.q_norm is not None:
        shapes |= dict.fromkeys(("q_norm", "k_norm"), tuple(first.q_norm.shape))
    for i, layer in enumerate(layers):
        _check_layer(f"layers[{i}]", layer, shapes, dtype)


def _check_layer(at: str, layer: DecoderLayer, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    op = "decoder_layers"
    for name, shape in shapes.items():
        weight = getattr(layer, name)
        if weight is not None:
            expect(op, f"{at}.{name}", weight, shape, dtype, ", ".join(map(str, shape)))
            if not weight.is_contiguous():
                raise ValueError(f"{op}: {at}.{name} must be contiguous, got strides {weight.stride()}")
    has_norms = "q_norm" in shapes
    if (layer.q_norm is not None) != has_norms or (layer.k_norm is not None) != has_norms:
        raise ValueError(f"{op}: q_norm and k_norm must be in all layers or in none, see {at}")
    if len({layer.q_bias is None, layer.k_bias is None, layer.v_bias is None}) == 2:
        raise ValueError(f"{op}: q_bias, k_bias and v_bias come together, got some of them in {at}")
    if layer.window < 0:
        raise ValueError(f"{op}: {at}.window must be positive, or 0 for none, got {layer.window}")
    if layer.sinks is not None and (layer.sinks.dim() != 1 or not layer.sinks.is_contiguous()):
        raise ValueError(f"{op}: {at}.sinks must be [num_heads], contiguous, got {list(layer.sinks.shape)}")


def _check_memory(packed: PackedLayers) -> None:
    """Check that the addresses of the weights may be kept, and are those of their values."""
    op, named = "decoder_layers", [("norm", packed.norm)]
    for i, layer in enumerate(packed.layers):
        named += [(f"layers[{i}].{name}", x) for name, x in layer._asdict().items() if isinstance(x, Tensor)]
    for name, tensor in named:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{op}: {name} must be a torch.Tensor or Parameter itself, got {type(tensor).__name__}")
        expect_strided(op, [name], [tensor])
        expect_memory(op, name, tensor)
        if tensor.is_neg():
            raise ValueError(f"{op}: {name} must not be a negative view, whose sign is not in memory: resolve_neg() it")


def _twin(*arguments: object) -> tuple[Tensor, Tensor]:
    """Run `decoder_layers` in plain torch."""
    *varying, handle = arguments
    packed = _packed(handle)
    return reference.decoder_layers(*varying, packed.layers, packed.norm, packed.eps, packed.scale, packed.taps)


@op(mutates=("k_caches", "v_caches"), twin=_twin, cuda_kernel=False)
def decoder_layers(
    launch: Launcher,
    hidden: Tensor,
    context: Tensor | None,
    num_context: Tensor | None,
    lengths: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_caches: list[Tensor],
    v_caches: list[Tensor],
    layers: str,
) -> tuple[Tensor, Tensor]:
    """Run the pre-norm decoder layers of a model (Qwen3, Qwen2, Llama, Mistral) and its final norm, in one call.

    Per layer: RMSNorm, q, k, v, head norms, RoPE, append, attention over the cache, output projection, residual,
    RMSNorm, ``silu(gate) * up``, down projection, residual. K and V also come from the live context rows, as they are
    and without the input norm; those rows have no query. A row's bits depend neither on its place nor on the others.

    Args:
        hidden: ``[batch, rows, hidden]``, float32 or bfloat16; row i of sequence b is at ``lengths[b] + i``.
        context: ``[batch, context_rows, hidden]`` or None: row i is at ``lengths[b] - num_context[b] + i``.
        num_context: ``[batch]`` int64; rows at or past it are never read.
        lengths: ``[batch]`` int64, as in `block_attention`.
        cos: ``[positions, rotary / 2]`` float32, one row per position; positions past the end take the last.
        sin: like ``cos``.
        k_caches: per layer ``[batch, num_kv_heads, capacity, head_dim]``, contiguous; written.
        v_caches: like ``k_caches``.
        layers: the handle of the layers, see `dflash.ops.layers.PackedLayers`.

    Returns:
        ``(out [batch, rows, hidden], tapped [batch, rows, taps * hidden])``, ``out`` after the final norm.

    Raises:
        ValueError: a shape does not fit, a tensor is not contiguous, or no layers have this handle.
        TypeError: a dtype does not fit.
    """
    # 1. Check what varies between calls, and allocate
    packed = _packed(layers)
    if launch.is_cpu:
        packed.refresh(signs=False)
    if packed.norm.device != hidden.device:
        raise ValueError(
            f"decoder_layers: the layers must be on {hidden.device} as hidden is, got weights on {packed.norm.device}"
        )
    if not _call_fits(packed, hidden, lengths, k_caches, v_caches):
        _check_call(packed, hidden, lengths, k_caches, v_caches)
    _check_context(packed, hidden, context, num_context)
    _check_heads(packed, k_caches[0])
    _check_rotary(cos, sin, k_caches[0].shape[3])
    dtype = launch.dtype("decoder_layers", "hidden", hidden)
    hidden, lengths, context, num_context = (
        hidden.contiguous(),
        lengths.contiguous(),
        dense(context),
        dense(num_context),
    )
    batch, rows, size = hidden.shape
    num_taps = len(packed.taps)
    out, tapped = torch.empty_like(hidden), hidden.new_empty(batch, rows, num_taps * size)
    if launch.is_fake:
        return out, tapped
    # 2. Run
    _, num_kv_heads, capacity, head_dim = k_caches[0].shape
    first = packed.layers[0]
    positions, half = cos.shape
    launch(
        "decoder_layers", packed.records(), k_caches, v_caches, hidden, context, num_context, lengths, cos, sin,
        packed.norm, out, tapped, len(packed.layers), batch, rows, 0 if context is None else context.shape[1], size,
        first.gate.shape[0], first.q.shape[0] // head_dim, num_kv_heads, head_dim, half, positions, capacity, num_taps,
        packed.scale, packed.eps, dtype,
    )  # fmt: skip
    return out, tapped


def _call_fits(
    packed: PackedLayers, hidden: Tensor, lengths: Tensor, k_caches: list[Tensor], v_caches: list[Tensor]
) -> bool:
    """Return True if a call without context is right: the short way past `_check_call`."""
    if len(k_caches) != len(packed.layers) or len(v_caches) != len(packed.layers) or hidden.dim() != 3:
        return False
    (batch, rows, _), shape, dtype = hidden.shape, k_caches[0].shape, packed.norm.dtype
    return (
        len(shape) == 4
        and shape[0] == batch
        and shape[2] > 0
        and _C.fits(False, hidden, (batch, rows, packed.norm.shape[0]), dtype, lengths, (batch,), torch.int64)
        and _C.fits(True, k_caches, shape, dtype, v_caches, shape, dtype)
    )


def _check_call(
    packed: PackedLayers, hidden: Tensor, lengths: Tensor, k_caches: list[Tensor], v_caches: list[Tensor]
) -> None:
    op, num_layers, dtype = "decoder_layers", len(packed.layers), packed.norm.dtype
    size = packed.norm.shape[0]
    expect(op, "hidden", hidden, (None, None, size), dtype, "batch, rows, hidden")
    batch = hidden.shape[0]
    expect(op, "lengths", lengths, (batch,), torch.int64, "batch")
    for name, caches in (("k_caches", k_caches), ("v_caches", v_caches)):
        if len(caches) != num_layers:
            raise ValueError(f"{op}: {name} must have one tensor for each of {num_layers} layers, got {len(caches)}")
    expect_caches(op, k_caches, v_caches, batch, dtype)


def _check_context(packed: PackedLayers, hidden: Tensor, context: Tensor | None, num_context: Tensor | None) -> None:
    op, batch, size = "decoder_layers", hidden.shape[0], hidden.shape[2]
    if (context is None) != (num_context is None):
        raise ValueError(f"{op}: context and num_context come together, got one of them")
    rows = context.shape[1] if context is not None and context.dim() == 3 else 0
    dtype = packed.norm.dtype
    if context is not None and not _C.fits(
        False, context, (batch, rows, size), dtype, num_context, (batch,), torch.int64
    ):  # fmt: skip
        expect(op, "context", context, (batch, None, size), packed.norm.dtype, "batch, context_rows, hidden")
        expect(op, "num_context", num_context, (batch,), torch.int64, "batch")


def _check_heads(packed: PackedLayers, k_cache: Tensor) -> None:
    """Check that the heads of the cache are those of the layers."""
    op, first, (_, kv_heads, _, head_dim) = "decoder_layers", packed.layers[0], k_cache.shape
    if packed.checked_heads == (kv_heads, head_dim):
        return
    q_size, kv_size = first.q.shape[0], first.k.shape[0]
    heads = q_size // max(head_dim, 1)
    fits = kv_size > 0 and kv_heads * head_dim == kv_size and heads * head_dim == q_size and heads % kv_heads == 0
    if not fits or (first.q_norm is not None and first.q_norm.shape[0] != head_dim):
        raise ValueError(
            f"{op}: k_caches[0] must have heads that fit the rows of layers[0].q ({q_size}) and .k ({kv_size}) and its "
            f"head norms, got {kv_heads} heads of {head_dim}"
        )
    for i, layer in enumerate(packed.layers):
        if layer.sinks is not None and layer.sinks.shape[0] != heads:
            raise ValueError(f"{op}: layers[{i}].sinks must be [num_heads] = [{heads}], got {list(layer.sinks.shape)}")
    packed.checked_heads = kv_heads, head_dim


def _check_rotary(cos: Tensor, sin: Tensor, head_dim: int) -> None:
    op = "decoder_layers"
    if not (cos.dim() == 2 and cos.shape == sin.shape and cos.dtype is sin.dtype is torch.float32):
        expect(op, "cos", cos, (None, None), torch.float32, "positions, rotary / 2")
        expect(op, "sin", sin, tuple(cos.shape), torch.float32, "positions, rotary / 2")
    if cos.shape[0] == 0 or 2 * cos.shape[1] > head_dim:
        raise ValueError(
            f"{op}: cos must be [positions, at most head_dim / 2 = {head_dim // 2}], got {list(cos.shape)}"
        )
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"{op}: cos and sin must be contiguous")
