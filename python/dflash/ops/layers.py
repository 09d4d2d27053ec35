"""Whole decoder layers in one op: their weights, checked and packed once, and the op that runs them."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C
from .contract import Scope
from .formats import PackedWeight
from .registry import Launcher, op
from .weights import BlockConv, DecoderLayer, DeltaNetLayer, check_layers, check_memory, named_tensors

_OP = "decoder_layers"


class PackedLayers:
    """Decoder layers and a final norm for `decoder_layers`: checked once, their addresses packed once.

    The op names them by ``handle``, which is valid as long as they live. It notices at every call which of them were
    changed since (``parameter.data = ...``, transposed, resized, freed), and checks and packs those again.

    Args:
        layers: the weights, contiguous, used where they are; ``norm [hidden]`` is the final norm.
        eps: of every norm; with ``zero_centered`` those over hidden states and heads multiply by ``1 + weight``.
        scale: the factor on the attention scores.
        taps: layers whose outputs are returned; the last layer's is read after the final norm.

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

    def refresh(self, signs: bool = True) -> None:
        """Check the weights again if one has another address, shape, dtype or storage; with ``signs`` also for negative
        views."""
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
        self.takes_trees = all(x.causal and not (x.attention_conv or x.mlp_conv) for x in self.attention)

    def _check(self) -> None:
        check_layers(self.layers, self.norm, self.taps)
        # (key_heads, heads, key_dim, value_dim, conv_width), which all recurrent layers have in common
        self.sizes = next((layer.sizes for layer in self.layers if layer.is_recurrent), (0, 0, 0, 0, 0))

    def _forget(self) -> None:
        """Drop what was packed, so that the storages may be freed."""
        self._records: _C.DecoderLayers | None = None  # keeps the storages
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._checked_heads: tuple[int, int] | None = None  # (num_kv_heads, head_dim) that these weights fit

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
            record = layer._asdict() | {"tap": self.taps.index(i) if i in self.taps else -1}
            record["gate_kind"] = _C.GATES[layer.gate_kind]
            record |= {name: x.record() for name, x in record.items() if isinstance(x, (BlockConv, PackedWeight))}
            record["delta_net" if layer.is_recurrent else "attention"] = dict(record)  # by name, as in params.h
            records.append(record)
        self._records = _C.DecoderLayers(records, [tensor for _, tensor in named_tensors(self.layers, self.norm)])

    def check_call(self, s: Scope) -> None:
        """Raise unless the sizes of a call are those of the layers."""
        if self.norm.device != s.hidden.device:
            raise ValueError(f"{_OP}: hidden must be on {self.norm.device} as the layers are, got {s.hidden.device}")
        if self.norm.dtype != s.hidden.dtype:
            raise TypeError(f"{_OP}: hidden must be {self.norm.dtype} as the layers are, got {s.hidden.dtype}")
        wanted = {"hidden_size": self.norm.shape[0], "attention_layers": len(self.attention)}
        wanted["recurrent_layers"] = len(self.recurrent)
        if self.recurrent:
            key_heads, heads, key_dim, value_dim, width = self.sizes
            wanted |= {"key_heads": key_heads, "delta_heads": heads, "key_dim": key_dim, "value_dim": value_dim}
            wanted |= {"channels": 2 * key_heads * key_dim + heads * value_dim, "slots": width - 1 + s.block}
        for name, want in wanted.items():
            if getattr(s, name) != want:
                raise ValueError(f"{_OP}: {name} must be {want} as the layers say, got {getattr(s, name)}")
        if s.ancestors is not None and not self.takes_trees:
            raise ValueError(f"{_OP}: ancestors need causal attention and no convolutions in every layer: pass None")
        if self._checked_heads != (s.num_kv_heads, s.head_dim):
            self._check_heads(s.num_kv_heads, s.head_dim)

    def _check_heads(self, kv_heads: int, head_dim: int) -> None:
        """Raise unless the heads of the cache are those of the layers."""
        first = self.attention[0]
        at = f"layers[{next(i for i, layer in enumerate(self.layers) if layer is first)}]"
        q_size, kv_size = first.o.shape[1], first.k.shape[0]
        heads = q_size // max(head_dim, 1)
        fits = kv_size > 0 and kv_heads * head_dim == kv_size and heads * head_dim == q_size and heads % kv_heads == 0
        if not fits or (first.q_norm is not None and first.q_norm.shape[0] != head_dim):
            raise ValueError(
                f"{_OP}: k_caches[0] must have heads that fit {at}.o ({q_size} columns), .k ({kv_size} rows) and its "
                f"head norms, got {kv_heads} heads of {head_dim}"
            )
        for i, layer in enumerate(self.layers):
            if not layer.is_recurrent and layer.sinks is not None and layer.sinks.shape[0] != heads:
                found = list(layer.sinks.shape)
                raise ValueError(f"{_OP}: layers[{i}].sinks must be [num_heads] = [{heads}], got {found}")
        self._checked_heads = kv_heads, head_dim


_live: weakref.WeakValueDictionary[str, PackedLayers] = weakref.WeakValueDictionary()


def _run(launch: Launcher, s: Scope) -> tuple[Tensor, Tensor]:
    # 1. Check the call against the layers
    if (packed := _live.get(s.layers)) is None:
        raise ValueError(f"{_OP}: layers must be the handle of living PackedLayers, got {s.layers!r}")
    if launch.is_cpu:
        packed.refresh(signs=False)
    packed.check_call(s)
    out, tapped = torch.empty_like(s.hidden), s.hidden.new_empty(s.batch, s.rows, len(packed.taps) * s.hidden_size)
    if launch.is_fake:
        return out, tapped
    if not launch.is_cpu:
        raise ValueError(f"{_OP}: hidden must be on the CPU, got {s.hidden.device}. DecoderStack goes op by op")
    # 2. Run
    s.layers, s.norm, s.out, s.taps = packed.records(), packed.norm, out, tapped
    s.num_layers, s.num_taps, s.width = len(packed.layers), len(packed.taps), packed.layers[0].gate.shape[0]
    s.num_heads = packed.attention[0].o.shape[1] // s.head_dim
    s.key_heads, s.delta_heads, s.key_dim, s.value_dim, s.conv_width = packed.sizes
    s.scale, s.eps, s.zero_centered = packed.scale, packed.eps, packed.zero_centered
    launch("decoder_layers", s)
    return out, tapped


@op(
    "hidden[batch, rows, hidden_size] context[batch, context_rows, hidden_size] num_context[batch]:i64 "
    "lengths[batch]:i64 cos[positions, half]:f32 sin[positions, half]:f32 "
    "k_caches{attention_layers}[held, num_kv_heads, capacity, head_dim]! "
    "v_caches{attention_layers}[held, num_kv_heads, capacity, head_dim]! "
    "windows{recurrent_layers}[batch, slots, channels]! "
    "states{recurrent_layers}[batch, delta_heads, key_dim, value_dim]:f32! "
    "saved_k{recurrent_layers}[batch, block, key_heads, key_dim]:f32! "
    "saved_d{recurrent_layers}[batch, block, delta_heads, value_dim]:f32! "
    "saved_a{recurrent_layers}[batch, block, delta_heads]:f32! pending[batch]:i64 keep[batch]:i64 "
    "ancestors[batch, rows, (rows + 63) // 64]:i64 sequences[batch]:i64 "
    "origin[batch]:i64 local_cos[positions, half]:f32 local_sin[positions, half]:f32",
    where="capacity >= 1; positions >= 1; 2 * half <= head_dim; "
    "has(context) == has(num_context): context and num_context come together; "
    "has(pending) == has(keep) == (recurrent_layers > 0): pending and keep must be given exactly where layers are "
    "recurrent; recurrent_layers == 0 or not has(context): context must be None where layers are recurrent; "
    f"not has(ancestors) or rows <= {_C.MAX_TREE_ROWS}: a tree has at most {_C.MAX_TREE_ROWS} rows; "
    "recurrent_layers == 0 or not has(ancestors): ancestors must be None unless every layer has causal attention; "
    "held == batch or has(sequences): sequences must say which of the caches' the block's are; "
    "recurrent_layers == 0 or not has(sequences): sequences must be None where layers are recurrent; "
    "has(local_cos) == has(local_sin): local_cos and local_sin come together",
    body=_run,
    twin=_run,
)
def decoder_layers(
    hidden: Tensor, context: Tensor | None, num_context: Tensor | None, lengths: Tensor, cos: Tensor, sin: Tensor,
    k_caches: list[Tensor], v_caches: list[Tensor], layers: str, windows: list[Tensor] = (),
    states: list[Tensor] = (), saved_k: list[Tensor] = (), saved_d: list[Tensor] = (), saved_a: list[Tensor] = (),
    pending: Tensor | None = None, keep: Tensor | None = None, ancestors: Tensor | None = None,
    sequences: Tensor | None = None, origin: Tensor | None = None, local_cos: Tensor | None = None,
    local_sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the pre-norm decoder layers of a model (Qwen3.5, Gemma 3, Llama, ...) and its final norm, in one call.

    The result is that of the ops of `dflash.decoder` one by one: `rms_norm`, `linears`, `qkv_norm_rope_append_`,
    `block_attention`, `swiglu` and so on, and for recurrent layers those of a Gated DeltaNet. K and V also come from
    the live context rows, which have no query and are not normed. Only layers with convolutions (`BlockConv`) let rows
    of a block meet.

    Args:
        hidden: ``[batch, rows, hidden]``; row i of sequence b is at ``lengths[b] + i``.
        context: ``[batch, context_rows, hidden]`` or None: row i is at ``lengths[b] - num_context[b] + i``.
        num_context: ``[batch]``, clamped to 0 .. ``context_rows``; rows at or past it are never read.
        lengths: ``[batch]``, as in `block_attention`.
        cos, sin: ``[positions, rotary / 2]``; positions past the end take the last.
        k_caches, v_caches: per layer of attention ``[batch, num_kv_heads, capacity, head_dim]``; written. With
            ``sequences`` they may hold more.
        layers: the handle of `PackedLayers`.
        windows: per recurrent layer, as in `causal_conv_`; written, as are ``states`` and ``saved_k``, ``saved_d`` and
            ``saved_a``, which are as in `gated_recurrence_`.
        pending, keep: as in `gated_recurrence_`; None without recurrent layers.
        ancestors: as in `block_attention`. Every layer must have causal attention and no convolutions then.
        sequences: ``[batch]``, each sequence's place in the caches, clamped to them; no two may be the same. None for
            their order. There must be no recurrent layers then.
        origin: as in `qkv_norm_rope_append_`.
        local_cos, local_sin: as ``cos`` and ``sin``, of layers with a window; None if theirs are the same.

    Returns:
        ``(out [batch, rows, hidden], tapped [batch, rows, taps * hidden])``, ``out`` after the final norm.

    Raises:
        ValueError: no layers have this handle, or the tensors do not fit the layers.
    """
