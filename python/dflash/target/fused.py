"""A decoder on :mod:`dflash.ops`: recognises the plain pre-norm models of transformers and runs their layers on the
same parameters, on CPU through :func:`dflash.ops.decoder_layers`, on a GPU op by op.

Recognition is by the exact classes, module for module: a subclass, an adapter, a quantised layer or a hook changes what
a model computes, and such a model keeps its own forward. So does every family that is not listed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from .. import ops
from ..cache import LazyKVCache

__all__ = ["FusedDecoder", "FusedLayers", "rotary_table"]

# What their attention does beside the common: which modules have a window, head norms, biases is read off the modules.
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_KINDS = {
    *(("cpu", dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
}
_MOST_ROWS = 256  # of a pass that goes op by op: a block of every row of a batch, and no chunk of a long prompt


def rotary_table(inv_freq: Tensor, scaling: float, positions: int) -> tuple[Tensor, Tensor]:
    """``(cos, sin)``, each ``[positions, len(inv_freq)]`` float32, of positions 0, 1, ..."""
    angles = torch.arange(positions, device=inv_freq.device)[:, None].float() * inv_freq.float()
    return angles.cos() * scaling, angles.sin() * scaling


def _plain(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, getattr(module, "parametrizations", None))
    return not any(hooks) and "forward" not in module.__dict__


def _recognised(model: nn.Module, head: nn.Module | None) -> bool:
    """Whether the model is exactly a decoder that :class:`FusedDecoder` computes."""
    family = model.config.model_type
    prefix = _FAMILIES.get(family)
    if prefix is None:
        return False

    def is_a(module: object, name: str) -> bool:
        kind = type(module)
        return (kind.__module__, kind.__name__) == (f"transformers.models.{family}.modeling_{family}", prefix + name)

    decoder = getattr(model, "model", None)
    if not (is_a(model, "ForCausalLM") and is_a(decoder, "Model") and all(map(_plain, model.modules()))):
        return False
    if type(head) is not nn.Linear or type(decoder.embed_tokens) is not nn.Embedding or not len(decoder.layers):
        return False
    if not (is_a(decoder.norm, "RMSNorm") and is_a(decoder.rotary_emb, "RotaryEmbedding")):
        return False
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        parts = dict(attention.named_children())
        linears = [parts.pop(name, None) for name in sorted(_ATTENTION)]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj] if is_a(mlp, "MLP") else [None]
        norms = [layer.input_layernorm, layer.post_attention_layernorm, *parts.values()]
        if not (
            is_a(layer, "DecoderLayer")
            and is_a(attention, "Attention")
            and {name for name, _ in layer.named_children()} == _LAYER
            and parts.keys() in (set(), {"q_norm", "k_norm"})
            and all(type(linear) is nn.Linear for linear in linears)
            and all(is_a(norm, "RMSNorm") for norm in norms)
            and {norm.variance_epsilon for norm in norms} == {decoder.norm.variance_epsilon}
            and len({attention.q_proj.bias is None, attention.k_proj.bias is None, attention.v_proj.bias is None}) == 1
            and all(linear.bias is None for linear in linears[4:])
            and type(mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
            and decoder.rotary_emb.inv_freq.numel() * 2 == attention.head_dim
            and attention.scaling == decoder.layers[0].self_attn.scaling
        ):
            return False
    parameters = list(model.parameters())
    kinds = {(p.device.type, p.dtype) for p in parameters}
    return all(p.is_contiguous() for p in parameters) and len(kinds) == 1 and kinds <= _KINDS


class FusedDecoder:
    """Embedding, layers, norm and head of a recognised model, with the taps of a drafter; on CPU in one op.

    Args:
        model: the twin of the user's model; its parameters are used where they are.
        target_layer_ids: whose outputs are tapped.
    """

    def __init__(self, model: nn.Module, target_layer_ids: tuple[int, ...]) -> None:
        decoder = model.model
        self.embedding = decoder.embed_tokens.weight
        self.head = model.get_output_embeddings()
        self.norm, self.eps = decoder.norm.weight, decoder.norm.variance_epsilon
        self.taps = list(target_layer_ids)
        self.rotary, self._tables = decoder.rotary_emb, {}
        self.weights, self.head_norms, self.biases, self.windows = [], [], [], []
        for layer in decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
            q, k, v, o = (projection.weight for projection in projections)
            self.weights += [layer.input_layernorm.weight, q, k, v, o, layer.post_attention_layernorm.weight]
            self.weights += [mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight]
            if hasattr(attention, "q_norm"):
                self.head_norms += [attention.q_norm.weight, attention.k_norm.weight]
            self.biases += [q.new_empty(0) if p.bias is None else p.bias for p in projections]
            # Mistral reads its window off the config, Llama has none, the others keep it per layer.
            window = getattr(attention, "sliding_window", None)
            if model.config.model_type == "mistral":
                window = getattr(model.config, "sliding_window", None)
            self.windows.append(window or 0)
        if not any(bias.numel() for bias in self.biases):
            self.biases = []
        self.scale, self.head_dim = float(attention.scaling), attention.head_dim
        self.causal = [1] * len(self.windows)

    @classmethod
    def of(cls, model: nn.Module, target_layer_ids: tuple[int, ...]) -> FusedDecoder | None:
        """The model's decoder for its device, or None where it must keep its own forward."""
        if not _recognised(model, model.get_output_embeddings()) or len(set(target_layer_ids)) < len(target_layer_ids):
            return None
        kind = FusedLayers if model.device.type == "cuda" else FusedDecoder
        return kind(model, target_layer_ids)

    def takes(self, ids: Tensor) -> bool:
        """Whether a pass over this many rows is faster here than through torch's GEMMs."""
        return ops.skinny(ids.numel(), self.embedding.dtype)

    def table(self, positions: int) -> tuple[Tensor, Tensor]:
        if positions not in self._tables:
            self._tables[positions] = rotary_table(self.rotary.inv_freq, self.rotary.attention_scaling, positions)
        return self._tables[positions]

    def forward(
        self, ids: Tensor, lengths: Tensor, cache: LazyKVCache, logits_to_keep: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`dflash.target.Target.forward`, with all taps side by side, ``[batch, rows, taps * hidden]``."""
        caches = self._caches(cache)
        cos, sin = self.table(cache.capacity)
        out, tapped = ops.decoder_layers(
            nn.functional.embedding(ids, self.embedding), None, None, lengths, cos, sin, self.weights,
            self.head_norms, self.biases, [], self.norm, self.eps, self.scale, self.causal, self.windows, self.taps,
            [keys for keys, _ in caches], [values for _, values in caches],
        )  # fmt: skip
        return self._logits(out, logits_to_keep), tapped

    def _caches(self, cache: LazyKVCache) -> list[tuple[Tensor, Tensor]]:
        kv_heads = self.weights[2].shape[0] // self.head_dim
        like = self.embedding.new_empty(1, kv_heads, 0, self.head_dim)
        return [cache.layer(index, like, like) for index in range(len(self.windows))]

    def _logits(self, hidden: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden.index_select(1, logits_to_keep)
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        return self.product(hidden)

    def product(self, hidden: Tensor) -> Tensor:
        """The head's product of any rows ``[..., hidden]``."""
        return ops.linear(hidden, self.head.weight, self.head.bias, prefetch=True)


class FusedLayers(FusedDecoder):
    """The same on a GPU, 9 launches a layer: residual, RMSNorm and tap in one, SiLU x mul, norm + RoPE + append.

    The weights stay the user's, unpacked: q, k and v, and gate and up, are products of one launch each.
    """

    def takes(self, ids: Tensor) -> bool:
        """Whether this many rows go op by op; the products of more are better left to torch's GEMMs."""
        return ids.numel() <= _MOST_ROWS

    def forward(
        self, ids: Tensor, lengths: Tensor, cache: LazyKVCache, logits_to_keep: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`FusedDecoder.forward`."""
        (batch, rows), eps, width = ids.shape, self.eps, self.embedding.shape[1]
        # parameters, which nothing in a step writes
        linear, linears = (functools.partial(op, prefetch=True) for op in (ops.linear, ops.linears))
        positions = lengths[:, None] + torch.arange(rows, device=ids.device)
        at = positions.clamp(max=cache.capacity - 1)  # rows past the end append nothing
        cos, sin = (table[at] for table in self.table(cache.capacity))
        tapped = self.embedding.new_empty(batch, rows, len(self.taps) * width)
        columns = {tap: tapped[..., i * width : (i + 1) * width] for i, tap in enumerate(self.taps)}
        residual = nn.functional.embedding(ids, self.embedding)
        hidden = ops.rms_norm(residual, self.weights[0], eps)
        for i, (keys, values) in enumerate(self._caches(cache)):
            q, k, v, o, post_norm, gate, up, down = self.weights[9 * i + 1 : 9 * i + 9]
            biases = self.biases[4 * i : 4 * i + 4]
            qkv_bias = [bias for bias in biases[:3] if bias.numel()]
            o_bias = biases[3] if biases and biases[3].numel() else None
            norms = self.head_norms[2 * i : 2 * i + 2] or (None, None)
            qkv = linears(hidden, (q, k, v), qkv_bias)
            query = qkv.new_empty(batch, rows, q.shape[0] // self.head_dim, self.head_dim)
            ops.qkv_norm_rope_append_(qkv, positions, cos, sin, *norms, eps, query, keys, values)
            out = ops.block_attention(query, keys, values, lengths, self.scale, True, self.windows[i])
            out = linear(out.flatten(2), o, o_bias)
            hidden, residual = ops.add_rms_norm(out, residual, post_norm, eps)
            out = linear(ops.silu_mul(linears(hidden, (gate, up))), down)
            last = i + 1 == len(self.windows)
            following = self.norm if last else self.weights[9 * i + 9]
            hidden, residual = ops.add_rms_norm(out, residual, following, eps, None if last else columns.get(i))
        if i in columns:
            columns[i].copy_(hidden)
        return self._logits(hidden, logits_to_keep), tapped
