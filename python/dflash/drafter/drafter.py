"""The drafter: one denoising pass over a block of masks, on :mod:`dflash.ops`, from a published checkpoint.

:class:`Drafter` carries the parameter names of published checkpoints; :func:`load_draft` reads one, or takes over a
module that holds one. After the DFlash paper (arXiv 2602.06036, section 4).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import ops
from ..cache import KVCache
from ..target import rotary_table
from .config import DraftConfig

__all__ = ["Drafter"]


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear module whose parameters are (views of) these tensors."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class Drafter(nn.Module):
    """The draft model. Rows of a batch never meet; no shape and no branch depends on the values of a tensor.

    The q, k and v projections are views of ``qkv_weight [layers, (heads + 2 * kv_heads) * head_dim, hidden]`` and
    ``qkv_bias``, gate and up of ``gate_up_weight [layers, 2 * intermediate, hidden]``: one GEMM a layer, and one for
    the K/V of all layers in prefill. The packed tensors are buffers outside the state dict, which keeps the names of
    published checkpoints; moves, copies and loads keep the views.

    A new drafter's parameters hold whatever memory held; they ask for no gradient. See :func:`load_draft`.

    Args:
        config: its shape and rules.
        dtype: of every parameter.
        device: of every parameter.
    """

    def __init__(
        self, config: DraftConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        layers, hidden, width = config.num_hidden_layers, config.hidden_size, config.intermediate_size
        heads, head_dim = config.num_attention_heads, config.head_dim
        packed = (heads + 2 * config.num_kv_heads) * head_dim
        self._query = heads * head_dim

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def norm(size: int) -> nn.RMSNorm:
            module = nn.RMSNorm(size, config.rms_norm_eps, device="meta")
            module.weight = nn.Parameter(empty(size), requires_grad=False)
            return module

        self.fc = _linear(empty(hidden, len(config.target_layer_ids) * hidden))
        self.hidden_norm = norm(hidden)
        self.register_buffer("qkv_weight", empty(layers, packed, hidden), persistent=False)
        bias = empty(layers, packed) if config.attention_bias else None
        self.register_buffer("qkv_bias", bias, persistent=False)
        self.register_buffer("gate_up_weight", empty(layers, 2 * width, hidden), persistent=False)
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self.layers = nn.ModuleList()
        for index in range(layers):
            layer = nn.Module()
            layer.input_layernorm = norm(hidden)
            layer.self_attn = nn.Module()
            weights = self._split(self.qkv_weight[index])
            biases = (None,) * 3 if bias is None else self._split(bias[index])
            for name, weight, part in zip(("q_proj", "k_proj", "v_proj"), weights, biases, strict=True):
                layer.self_attn.add_module(name, _linear(weight, part))
            layer.self_attn.o_proj = _linear(empty(hidden, heads * head_dim), None if bias is None else empty(hidden))
            layer.self_attn.q_norm = norm(head_dim)
            layer.self_attn.k_norm = norm(head_dim)
            if config.attention_sinks:
                layer.self_attn.attention_sink_bias = nn.Parameter(empty(heads), requires_grad=False)
            layer.post_attention_layernorm = norm(hidden)
            layer.mlp = nn.Module()
            layer.mlp.gate_proj, layer.mlp.up_proj = map(_linear, self.gate_up_weight[index].chunk(2))
            layer.mlp.down_proj = _linear(empty(hidden, width))
            self.layers.append(layer)
        self.norm = norm(hidden)
        self._parameter_lists = self._lists()

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """An empty cache for ``batch_size`` sequences of ``capacity`` positions, lookahead counted."""
        c = self.config
        rotary = rotary_table(self.inv_freq, c.rope.attention_scaling, capacity)
        sizes = (c.num_hidden_layers, batch_size, c.num_kv_heads, capacity, c.head_dim)
        return KVCache(*sizes, rotary=rotary, dtype=self.dtype, device=self.device)

    # ------------------------------------------------------------------------------------------ the forward pass

    def fuse(self, context: Tensor, num_context: Tensor) -> Tensor:
        """Context features of the tapped target states: ``hidden_norm(fc(context))``.

        Args:
            context: ``[batch, rows, taps * hidden]``, the taps in the order of ``target_layer_ids``.
            num_context: ``[batch]`` int64; rows at or past it may hold anything and come back as zeros.

        Returns:
            ``[batch, rows, hidden]``.
        """
        return ops.fuse_features(
            context, num_context, self.fc.weight, self.hidden_norm.weight, self.config.rms_norm_eps
        )

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``(cos, sin)``, each ``[batch, rows, head_dim / 2]`` float32, of ``positions [batch, rows]``."""
        angles = positions[..., None].float() * self.inv_freq
        scaling = self.config.rope.attention_scaling
        return angles.cos() * scaling, angles.sin() * scaling

    def inject_(self, features: Tensor, positions: Tensor, cache: KVCache) -> None:
        """Append the K/V of context rows in every layer at once (prefill).

        Args:
            features: ``[batch, rows, hidden]``, from :meth:`fuse`.
            positions: ``[batch, rows]`` int64, absolute; a negative one switches its row off.
            cache: written at ``positions``.
        """
        weight = self.qkv_weight[:, self._query :].transpose(1, 2)
        kv = torch.matmul(features.flatten(0, 1), weight)
        if self.qkv_bias is not None:
            kv = kv + self.qkv_bias[:, None, self._query :]
        cos, sin = self.rotary(positions)
        norms = torch.stack([layer.self_attn.k_norm.weight for layer in self.layers])
        ops.append_context_kv_(
            kv.unflatten(1, features.shape[:2]),
            positions, cos, sin, norms, self.config.rms_norm_eps, cache.keys, cache.values,
        )  # fmt: skip

    def forward(
        self, features: Tensor, num_context: Tensor, block_embeds: Tensor, length: Tensor, cache: KVCache
    ) -> Tensor:
        """One draft pass: append the context rows for good, the block's rows until the next pass overwrites them.

        Args:
            features: ``[batch, context_rows, hidden]``, from :meth:`fuse`. Row i stands at position
                ``length - num_context + i``; rows at or past ``num_context`` are off. Every layer takes K/V from these
                features as they are, without its input norm.
            num_context: ``[batch]`` int64.
            block_embeds: ``[batch, rows, hidden]``, scaled embeddings of the anchor and the masks, at ``length + j``.
            length: ``[batch]`` int64, the anchor's position; the cache holds ``length - num_context`` positions.
            cache: from :meth:`new_cache`; ``length + rows`` positions must fit.

        Returns:
            ``[batch, rows, hidden]`` past the final norm; row j > 0 predicts the token at ``length + j``.
        """
        config, eps = self.config, self.config.rms_norm_eps
        (batch, rows, _), context_rows = block_embeds.shape, features.shape[1]
        if features.device.type == "cpu" and ops.skinny(batch * (rows + context_rows), self.dtype):
            return self._forward_fused(features, num_context, block_embeds, length, cache)
        index = torch.arange(context_rows, device=length.device)
        before = torch.where(index < num_context[:, None], (length - num_context)[:, None] + index, -1)
        ahead = length[:, None] + torch.arange(rows, device=length.device)
        positions = torch.cat([before, ahead], 1)
        at = positions.clamp(0, cache.capacity - 1)  # rows that are off, or past the end, append nothing
        cos, sin = (table[at] for table in cache.rotary)
        scale = config.head_dim**-0.5
        linear = functools.partial(ops.linear, prefetch=True)  # parameters, which nothing in a step writes
        residual, hidden = block_embeds, ops.rms_norm(block_embeds, self.layers[0].input_layernorm.weight, eps)
        for i, layer in enumerate(self.layers):
            attention, keys, values = layer.self_attn, cache.keys[i], cache.values[i]
            bias = None if self.qkv_bias is None else self.qkv_bias[i]
            qkv = linear(torch.cat([features, hidden], 1), self.qkv_weight[i], bias)
            q = qkv.new_empty(batch, rows, config.num_attention_heads, config.head_dim)
            ops.qkv_norm_rope_append_(
                qkv, positions, cos, sin, attention.q_norm.weight, attention.k_norm.weight, eps, q, keys, values
            )
            sinks = attention.attention_sink_bias if config.attention_sinks else None
            out = ops.block_attention(
                q, keys, values, length, scale, config.causal[i], config.window[i], 0.0, sinks, None
            )
            out = linear(out.flatten(2), attention.o_proj.weight, attention.o_proj.bias)
            hidden, residual = ops.add_rms_norm(out, residual, layer.post_attention_layernorm.weight, eps)
            out = linear(ops.silu_mul(linear(hidden, self.gate_up_weight[i])), layer.mlp.down_proj.weight)
            following = self.layers[i + 1].input_layernorm if i + 1 < len(self.layers) else self.norm
            hidden, residual = ops.add_rms_norm(out, residual, following.weight, eps)
        return hidden

    def _forward_fused(
        self, features: Tensor, num_context: Tensor, block_embeds: Tensor, length: Tensor, cache: KVCache
    ) -> Tensor:
        """:meth:`forward` in one op."""
        config = self.config
        weights, head_norms, biases, sinks = self._parameter_lists
        cos, sin = cache.rotary
        out, _ = ops.decoder_layers(
            block_embeds, features, num_context, length, cos, sin, weights, head_norms, biases, sinks,
            self.norm.weight, config.rms_norm_eps, config.head_dim**-0.5, [int(c) for c in config.causal],
            list(config.window), [], cache.keys, cache.values,
        )  # fmt: skip
        return out

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Tensor:
        """Draft logits through the target's head, with the drafter's own multiplier and softcap.

        Args:
            hidden: ``[..., hidden]``, rows from :meth:`forward`.
            head: ``[..., hidden] -> [..., vocab]``, the target's.

        Returns:
            ``[..., vocab]``.
        """
        logits, cap = head(hidden), self.config.final_logit_softcapping
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        return torch.tanh(logits / cap) * cap if cap else logits

    def scale_embeddings(self, embeds: Tensor) -> Tensor:
        """The target's raw embeddings ``[..., hidden]`` as the drafter takes them: times ``input_embedding_scale``."""
        scale = self.config.input_embedding_scale
        return embeds if scale == 1.0 else embeds * scale

    # ------------------------------------------------------------------------------------------ packed parameters

    def _frequencies(self, device: torch.device | str) -> Tensor:
        return self.config.rope.inverse_frequencies(self.config.head_dim).to(device)

    def _split(self, packed: Tensor) -> tuple[Tensor, ...]:
        key = self.config.num_kv_heads * self.config.head_dim
        return packed.split([self._query, key, key])

    def _packed(self) -> Iterator[tuple[str, Tensor, dict[nn.Parameter, Tensor]]]:
        """Per fused tensor: its checkpoint name, the packed tensor, and its parameters with the view each should be."""
        for i, layer in enumerate(self.layers):
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            for kind, packed in (("weight", self.qkv_weight), ("bias", self.qkv_bias)):
                if packed is not None:
                    parameters = (getattr(projection, kind) for projection in projections)
                    views = dict(zip(parameters, self._split(packed[i]), strict=True))
                    yield f"layers.{i}.self_attn.qkv_proj.{kind}", packed[i], views
            gate, up = self.gate_up_weight[i].chunk(2)
            views = {mlp.gate_proj.weight: gate, mlp.up_proj.weight: up}
            yield f"layers.{i}.mlp.gate_up_proj.weight", self.gate_up_weight[i], views

    def _lists(self) -> tuple[list[Tensor], ...]:
        """The parameters as :func:`dflash.ops.decoder_layers` takes them."""
        config, (weights, head_norms, biases, sinks) = self.config, ([], [], [], [])
        for layer in self.layers:
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
            weights += [layer.input_layernorm.weight, *(p.weight for p in projections)]
            weights += [layer.post_attention_layernorm.weight]
            weights += [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
            head_norms += [attention.q_norm.weight, attention.k_norm.weight]
            if config.attention_bias:
                biases += [p.bias for p in projections]
            if config.attention_sinks:
                sinks.append(attention.attention_sink_bias)
        return weights, head_norms, biases, sinks

    @torch.no_grad()
    def _pack(self) -> None:
        """Make the parameters views of the packed tensors again, with the parameters' values, dtype and device."""
        for name in ("qkv_weight", "qkv_bias", "gate_up_weight"):
            packed = getattr(self, name)
            if packed is not None and (packed.dtype, packed.device) != (self.dtype, self.device):
                self._buffers[name] = torch.empty_like(packed, dtype=self.dtype, device=self.device)
        for _, _, views in self._packed():
            for parameter, view in views.items():
                if parameter.data_ptr() != view.data_ptr() or parameter.is_meta:
                    view.copy_(parameter)
                    parameter.data = view
        self._parameter_lists = self._lists()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drafter:
        frequencies = self.inv_freq
        super()._apply(fn, recurse)
        if frequencies.device != self.device:
            frequencies = self._frequencies(self.device)
        self._buffers["inv_freq"] = frequencies  # float32 whatever the parameters are
        self._pack()
        return self

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        self._pack()
        return result

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()
