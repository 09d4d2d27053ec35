"""Whole decoder layers in one op: their weights, checked and packed once, and the op that runs them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import _C
from . import reference
from .checks import dense, expect, expect_contiguous, expect_rope_table
from .kv_cache import expect_caches
from .registry import Launcher, op
from .weights import DecoderLayer, DeltaNetLayer, check_layers, check_memory, linear_weight, named_tensors


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
        zero_centered: the norms over hidden states and heads multiply by ``1 + weight``.

    Raises:
        ValueError: a shape does not fit, or a tensor is not contiguous. TypeError: a dtype does not fit.
    """

    _handles = itertools.count()

    def __init__(
        self, layers: Sequence[DecoderLayer | DeltaNetLayer], norm: Tensor, *, eps: float, scale: float,
        taps: Sequence[int] = (), zero_centered: bool = False,
    ) -> None:  # fmt: skip
        self.eps, self.scale, self.taps, self.zero_centered = eps, scale, tuple(taps), zero_centered
        self.replace(layers, norm)
        self.handle = f"layers {next(self._handles)}"
        _live[self.handle] = self

    def tensors(self) -> Iterator[Tensor]:
        """Yield every weight."""
        yield from (tensor for _, tensor in named_tensors(self.layers, self.norm))

    def refresh(self, signs: bool = True) -> None:
        """Check the weights again if one has another address, shape, dtype or storage. Takes 0.1 us per weight.

        Args:
            signs: see whether one became a negative view too (`torch.Tensor.is_neg`), which takes as long again.
        """
        if self._records is not None and not self._records.unchanged(signs):
            self._check()
            check_memory(self.layers, self.norm)
            self._forget()

    def replace(self, layers: Sequence[DecoderLayer | DeltaNetLayer], norm: Tensor) -> None:
        """Use other tensors under the same handle, which a compiled step holds as a constant."""
        self.layers, self.norm = tuple(layers), norm
        self._forget()
        self._check()
        self.attention = [layer for layer in self.layers if not layer.is_recurrent]
        self.recurrent = [layer for layer in self.layers if layer.is_recurrent]

    def _check(self) -> None:
        check_layers(self.layers, self.norm, self.taps)
        # (key_heads, heads, key_dim, value_dim, conv_width), which all recurrent layers have in common
        self.sizes = next((layer.sizes for layer in self.layers if layer.is_recurrent), (0, 0, 0, 0, 0))

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
        self._check()
        check_memory(self.layers, self.norm)
        self._copies, records = [], []
        for i, layer in enumerate(self.layers):
            if not layer.is_recurrent and layer.sinks is not None:
                # The kernel reads sinks in float32; copies of others get their values again at every call.
                wide = layer.sinks.detach().float()
                self._copies += [] if wide.dtype == layer.sinks.dtype else [(wide, layer.sinks)]
                layer = layer._replace(sinks=wide)
            mixers = (None, layer.mixer()) if layer.is_recurrent else (layer.mixer(), None)
            tap = self.taps.index(i) if i in self.taps else -1
            convs = (conv and conv.record() for conv in (layer.attention_conv, layer.mlp_conv))
            mlp = map(linear_weight, (layer.gate, layer.up, layer.down))
            records.append((layer.input_norm, layer.post_norm, *mlp, *mixers, *convs, tap))
        self._records = _C.DecoderLayers(records, [*self.tensors()])


_live: weakref.WeakValueDictionary[str, PackedLayers] = weakref.WeakValueDictionary()


def _packed(handle: str) -> PackedLayers:
    packed = _live.get(handle)
    if packed is None:
        raise ValueError(f"decoder_layers: layers must be the handle of living PackedLayers, got {handle!r}")
    return packed


def _twin(*arguments: object) -> tuple[Tensor, Tensor]:
    """Run `decoder_layers` in plain torch."""
    *varying, handle = arguments[:9]
    packed = _packed(handle)
    fixed = (packed.layers, packed.norm, packed.eps, packed.scale, packed.taps)
    return reference.decoder_layers(*varying, *fixed, *arguments[9:], zero_centered=packed.zero_centered)


_WRITTEN = ("k_caches", "v_caches", "windows", "states", "saved_k", "saved_d", "saved_a")


@op(mutates=_WRITTEN, twin=_twin, cuda_kernel=False)
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
    windows: list[Tensor] = (),
    states: list[Tensor] = (),
    saved_k: list[Tensor] = (),
    saved_d: list[Tensor] = (),
    saved_a: list[Tensor] = (),
    pending: Tensor | None = None,
    keep: Tensor | None = None,
    ancestors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the pre-norm decoder layers of a model (Qwen3.5, Qwen3, Llama, ...) and its final norm, in one call.

    Per layer: RMSNorm, q, k, v, head norms, RoPE, append, attention over the cache, output gate, output projection,
    residual, RMSNorm, ``silu(gate) * up``, down projection, residual. A recurrent layer has a Gated DeltaNet in place
    of attention: `causal_conv_`, `delta_net_inputs`, `gated_recurrence_`, `gated_rms_norm`. K and V also come from the
    live context rows, as they are and without the input norm; those rows have no query. A layer with convolutions
    (`BlockConv`) has `dynamic_conv` in front of each sublayer, over the block's rows only, and `conv_add_rms_norm`
    after it. Without them a row's bits depend neither on its place nor on the others.

    Args:
        hidden: ``[batch, rows, hidden]``, float32 or bfloat16; row i of sequence b is at ``lengths[b] + i``.
        context: ``[batch, context_rows, hidden]`` or None: row i is at ``lengths[b] - num_context[b] + i``.
        num_context: ``[batch]`` int64, clamped to 0 .. ``context_rows``; rows at or past it are never read.
        lengths: ``[batch]`` int64, as in `block_attention`.
        cos: ``[positions, rotary / 2]`` float32, one row per position; positions past the end take the last.
        sin: like ``cos``.
        k_caches: per layer of attention ``[batch, num_kv_heads, capacity, head_dim]``, contiguous; written.
        v_caches: like ``k_caches``.
        layers: the handle of the layers, see `dflash.ops.layers.PackedLayers`.
        windows: per recurrent layer, as in `causal_conv_`; written.
        states: per recurrent layer, as in `gated_recurrence_`; written.
        saved_k: like ``states``.
        saved_d: like ``states``.
        saved_a: like ``states``.
        pending: ``[batch]`` int64, as in `gated_recurrence_`; None without recurrent layers.
        keep: like ``pending``.
        ancestors: ``[batch, rows, ceil(rows / 64)]`` int64, or None for a chain, as in `block_attention`: row i is
            appended to slot ``lengths[b] + i`` and rotates by position ``lengths[b]`` plus its depth. Every layer must
            have causal attention and no convolutions.

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
    recurrent = (windows, states, saved_k, saved_d, saved_a)
    if packed.recurrent or any(recurrent) or pending is not None or keep is not None:
        _check_recurrent(packed, hidden.shape[0], recurrent, pending, keep)
    _check_tree(packed, hidden, ancestors)
    _check_heads(packed, k_caches[0])
    expect_rope_table("decoder_layers", cos, sin, k_caches[0].shape[3])
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("decoder_layers: cos and sin must be contiguous")
    dtype = launch.dtype("decoder_layers", "hidden", hidden)
    hidden, lengths, context, num_context, ancestors = map(dense, (hidden, lengths, context, num_context, ancestors))
    batch, rows, size = hidden.shape
    num_taps = len(packed.taps)
    out, tapped = torch.empty_like(hidden), hidden.new_empty(batch, rows, num_taps * size)
    if launch.is_fake:
        return out, tapped
    # 2. Run
    _, num_kv_heads, capacity, head_dim = k_caches[0].shape
    key_heads, delta_heads, key_dim, value_dim, conv_width = packed.sizes
    positions, half = cos.shape
    launch(
        "decoder_layers", packed.records(), k_caches, v_caches, windows, states, saved_k, saved_d, saved_a,
        dense(pending), dense(keep), hidden, context, num_context, lengths, ancestors, cos, sin, packed.norm,
        out, tapped, len(packed.layers), batch, rows, 0 if context is None else context.shape[1], size,
        packed.layers[0].gate.shape[0], packed.attention[0].o.shape[1] // head_dim, num_kv_heads, head_dim, half,
        positions, capacity, num_taps, key_heads, delta_heads, key_dim, value_dim, conv_width,
        saved_k[0].shape[1] if saved_k else 0, packed.scale, packed.eps, packed.zero_centered, dtype,
    )  # fmt: skip
    return out, tapped


def _call_fits(
    packed: PackedLayers, hidden: Tensor, lengths: Tensor, k_caches: list[Tensor], v_caches: list[Tensor]
) -> bool:
    """Return True if a call without context is right: the short way past `_check_call`."""
    if len(k_caches) != len(packed.attention) or len(v_caches) != len(packed.attention) or hidden.dim() != 3:
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
    op, num_layers, dtype = "decoder_layers", len(packed.attention), packed.norm.dtype
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
    if context is not None and packed.recurrent:
        raise ValueError(f"{op}: context must be None where layers are recurrent, got {list(context.shape)}")
    rows = context.shape[1] if context is not None and context.dim() == 3 else 0
    dtype = packed.norm.dtype
    if context is not None and not _C.fits(
        False, context, (batch, rows, size), dtype, num_context, (batch,), torch.int64
    ):  # fmt: skip
        expect(op, "context", context, (batch, None, size), packed.norm.dtype, "batch, context_rows, hidden")
        expect(op, "num_context", num_context, (batch,), torch.int64, "batch")


def _check_recurrent(
    packed: PackedLayers, batch: int, recurrent: tuple, pending: Tensor | None, keep: Tensor | None
) -> None:
    op, num_layers, names = "decoder_layers", len(packed.recurrent), _WRITTEN[2:]
    for name, tensors in zip(names, recurrent, strict=True):
        if len(tensors) != num_layers:
            raise ValueError(
                f"{op}: {name} must have one tensor for each of {num_layers} recurrent layers, got {len(tensors)}"
            )
    for name, counts in (("pending", pending), ("keep", keep)):
        if (counts is None) != (num_layers == 0):
            raise ValueError(f"{op}: {name} must be [batch] where layers are recurrent, and None elsewhere")
    if num_layers == 0:
        return
    key_heads, heads, key_dim, value_dim, width = packed.sizes
    channels = 2 * key_heads * key_dim + heads * value_dim
    block = recurrent[2][0].shape[1] if recurrent[2][0].dim() == 4 else 0
    wide, narrow = torch.float32, packed.norm.dtype
    shapes = [
        ((batch, width - 1 + block, channels), narrow, "batch, conv_width - 1 + block, channels"),
        ((batch, heads, key_dim, value_dim), wide, "batch, heads, key_dim, value_dim"),
        ((batch, block, key_heads, key_dim), wide, "batch, block, key_heads, key_dim"),
        ((batch, block, heads, value_dim), wide, "batch, block, heads, value_dim"),
        ((batch, block, heads), wide, "batch, block, heads"),
    ]
    counted = (pending, (batch,), torch.int64, keep, (batch,), torch.int64)
    flat = [
        part for tensors, (shape, dtype, _) in zip(recurrent, shapes, strict=True) for part in (tensors, shape, dtype)
    ]
    if _C.fits(True, *flat) and _C.fits(False, *counted):
        return
    for name, tensors, (shape, dtype, words) in zip(names, recurrent, shapes, strict=True):
        for i, tensor in enumerate(tensors):
            expect(op, f"{name}[{i}]", tensor, shape, dtype, words)
            expect_contiguous(op, f"{name}[{i}]", tensor)
    expect(op, "pending", pending, (batch,), torch.int64, "batch")
    expect(op, "keep", keep, (batch,), torch.int64, "batch")


def _check_tree(packed: PackedLayers, hidden: Tensor, ancestors: Tensor | None) -> None:
    op, (batch, rows, _) = "decoder_layers", hidden.shape
    if ancestors is None:
        return
    if packed.recurrent or not all(layer.causal for layer in packed.attention):
        raise ValueError(f"{op}: ancestors must be None unless every layer has causal attention")
    if any(layer.attention_conv or layer.mlp_conv for layer in packed.attention):
        raise ValueError(f"{op}: ancestors must be None where layers have convolutions")
    if rows > _C.MAX_TREE_ROWS:
        raise ValueError(f"{op}: a tree has at most {_C.MAX_TREE_ROWS} rows, got {rows}")
    shape = (batch, rows, -(-rows // 64))
    if not _C.fits(False, ancestors, shape, torch.int64):
        expect(op, "ancestors", ancestors, shape, torch.int64, "batch, rows, ceil(rows / 64)")


def _check_heads(packed: PackedLayers, k_cache: Tensor) -> None:
    """Check that the heads of the cache are those of the layers."""
    op, first, (_, kv_heads, _, head_dim) = "decoder_layers", packed.attention[0], k_cache.shape
    if packed.checked_heads == (kv_heads, head_dim):
        return
    at = f"layers[{next(i for i, layer in enumerate(packed.layers) if layer is first)}]"
    q_size, kv_size = first.o.shape[1], first.k.shape[0]
    heads = q_size // max(head_dim, 1)
    fits = kv_size > 0 and kv_heads * head_dim == kv_size and heads * head_dim == q_size and heads % kv_heads == 0
    if not fits or (first.q_norm is not None and first.q_norm.shape[0] != head_dim):
        raise ValueError(
            f"{op}: k_caches[0] must have heads that fit {at}.o ({q_size} columns), .k ({kv_size} rows) and its "
            f"head norms, got {kv_heads} heads of {head_dim}"
        )
    for i, layer in enumerate(packed.layers):
        if not layer.is_recurrent and layer.sinks is not None and layer.sinks.shape[0] != heads:
            raise ValueError(f"{op}: layers[{i}].sinks must be [num_heads] = [{heads}], got {list(layer.sinks.shape)}")
    packed.checked_heads = kv_heads, head_dim
