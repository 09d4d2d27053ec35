"""Run the layers of plain pre-norm models on `dflash.ops` instead of their modules, on the same parameters.

A model is recognized by its exact classes, module by module, and by the functions that they would run (see
`dflash.target.functions`). A subclass, an adapter, a quantized layer, a hook or a replaced function changes what a
model computes, so such a model keeps its own forward. So does every family that is not listed here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from .. import ops
from ..cache import KVCache
from ..decoder import DecoderLayer, DecoderStack, rotary_table
from .weights import is_plain_tensor

__all__ = ["FusedTarget", "recognize"]

# model_type -> the prefix of its class names. Windows, head norms and biases are read off the modules.
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_LAYER_MODULES = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ({"q_norm", "k_norm"}, set())
_STORAGE = {
    *(("cpu", dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
}
_MAX_CUDA_ROWS = 256  # of one pass: a block for each row of a batch, but not a chunk of a long prompt


def recognize(model: nn.Module, target_layer_ids: tuple[int, ...]) -> FusedTarget | None:
    """Return the fused form of a model, or None if the model must keep its own forward."""
    if model.config.model_type not in _FAMILIES or len(set(target_layer_ids)) < len(target_layer_ids):
        return None
    return FusedTarget(model, target_layer_ids) if _Recognizer(model.config.model_type).accepts(model) else None


class FusedTarget:
    """Embedding, decoder stack and head of a recognized model.

    Args:
        model: a twin of the user's model. Its parameters are used where they are.
        target_layer_ids: the tapped layers.
    """

    def __init__(self, model: nn.Module, target_layer_ids: tuple[int, ...]) -> None:
        decoder = model.model
        self.embedding, self.head = decoder.embed_tokens.weight, model.get_output_embeddings()
        attention = decoder.layers[0].self_attn
        self.num_kv_heads, self.head_dim = attention.k_proj.weight.shape[0] // attention.head_dim, attention.head_dim
        self.stack = DecoderStack(
            [_decoder_layer(model, layer) for layer in _layers(decoder)],
            decoder.norm.weight,
            eps=decoder.norm.variance_epsilon,
            scale=float(attention.scaling),
            taps=target_layer_ids,
        )
        self._rotary = decoder.rotary_emb
        self._inv_freq = self._rotary.inv_freq.detach().clone()  # what the tables were made of
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def refresh(self, cache: KVCache) -> None:
        """Notice replaced weights and changed frequencies, and fit a cache that another target has made."""
        self.stack.refresh()
        if not torch.equal(self._inv_freq, self._rotary.inv_freq):
            self._inv_freq = self._rotary.inv_freq.detach().clone()
            for positions, tables in self._tables.items():  # in place: compiled and captured steps hold their addresses
                for table, new in zip(tables, self._table(positions), strict=True):
                    table.copy_(new)
        self.prepare_(cache)

    def prepare_(self, cache: KVCache) -> None:
        """Give a cache its rotary table and the buffers of all layers."""
        positions = cache.capacity
        if positions not in self._tables:
            self._tables[positions] = self._table(positions)
        cache.rotary = self._tables[positions]
        like = self.embedding
        cache.allocate(len(self.stack.layers), self.num_kv_heads, self.head_dim, dtype=like.dtype, device=like.device)

    def _table(self, positions: int) -> tuple[Tensor, Tensor]:
        return rotary_table(self._inv_freq, self._rotary.attention_scaling, positions)

    def handles(self, ids: Tensor) -> bool:
        """Return True if a pass over these rows runs here. torch's matrix products are faster for more rows."""
        if ids.device.type == "cpu":
            return ops.skinny(ids.numel(), self.embedding.dtype)
        return ids.numel() <= _MAX_CUDA_ROWS

    def forward(
        self, ids: Tensor, lengths: Tensor, cache: KVCache, logits_to_keep: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run as `dflash.target.Target.forward`, with all taps in one ``[batch, rows, taps * hidden]``."""
        hidden, tapped = self.stack(nn.functional.embedding(ids, self.embedding), lengths, cache)
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden.index_select(1, logits_to_keep)
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        return self.logits(hidden), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the head's logits of any rows ``[..., hidden]``."""
        return ops.linear(hidden, self.head.weight, self.head.bias, prefetch=True)


def _layers(decoder: nn.Module) -> nn.ModuleList:
    """Return the layers that run: transformers runs the first ones if the config asks for fewer."""
    return decoder.layers[: decoder.config.num_hidden_layers]


def _decoder_layer(model: nn.Module, layer: nn.Module) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v, o = (getattr(attention, name) for name in _PROJECTIONS)
    # Mistral reads its window off the config, Llama has none, the others keep it per layer.
    owner = model.config if model.config.model_type == "mistral" else attention
    has_head_norms = hasattr(attention, "q_norm")
    return DecoderLayer(
        input_norm=layer.input_layernorm.weight,
        q=q.weight,
        k=k.weight,
        v=v.weight,
        o=o.weight,
        post_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
        q_norm=attention.q_norm.weight if has_head_norms else None,
        k_norm=attention.k_norm.weight if has_head_norms else None,
        q_bias=q.bias,
        k_bias=k.bias,
        v_bias=v.bias,
        o_bias=o.bias,
        window=getattr(owner, "sliding_window", None) or 0,
    )


class _Recognizer:
    """Recognizes the models of one family that are exactly what `FusedTarget` computes."""

    def __init__(self, family: str) -> None:
        self.module, self.prefix = f"transformers.models.{family}.modeling_{family}", _FAMILIES[family]

    def is_a(self, module: object, name: str) -> bool:
        """Return True if the class is exactly the family's own class of this name."""
        kind = type(module)
        return (kind.__module__, kind.__name__) == (self.module, self.prefix + name)

    def accepts(self, model: nn.Module) -> bool:
        """Return True if every module, parameter and setting of the model is as expected."""
        decoder = getattr(model, "model", None)
        if not (
            self.is_a(model, "ForCausalLM") and self.is_a(decoder, "Model") and all(map(_is_plain, model.modules()))
        ):
            return False
        embedding = decoder.embed_tokens
        if type(model.get_output_embeddings()) is not nn.Linear or type(embedding) is not nn.Embedding:
            return False
        if embedding.max_norm is not None or model.config is not decoder.config:
            return False
        if not (self.is_a(decoder.norm, "RMSNorm") and self.is_a(decoder.rotary_emb, "RotaryEmbedding")):
            return False
        layers = _layers(decoder)
        if not 0 < len(layers) == decoder.config.num_hidden_layers or not all(
            self._accepts_layer(layer, decoder) for layer in layers
        ):
            return False
        if [layer.self_attn.layer_idx for layer in layers] != list(range(len(layers))):
            return False
        parameters = list(model.parameters())
        storage = {(parameter.device.type, parameter.dtype) for parameter in parameters}
        is_dense = all(is_plain_tensor(p) and p.is_contiguous() for p in parameters)
        return is_dense and len(storage) == 1 and storage <= _STORAGE

    def _accepts_layer(self, layer: nn.Module, decoder: nn.Module) -> bool:
        if not self.is_a(layer, "DecoderLayer") or {name for name, _ in layer.named_children()} != _LAYER_MODULES:
            return False
        attention, mlp = layer.self_attn, layer.mlp
        if not (self.is_a(attention, "Attention") and self.is_a(mlp, "MLP")):
            return False
        parts = dict(attention.named_children())
        projections = [parts.pop(name, None) for name in _PROJECTIONS]
        mlp_linears = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if parts.keys() not in _HEAD_NORMS or any(
            type(linear) is not nn.Linear for linear in projections + mlp_linears
        ):
            return False
        norms = [layer.input_layernorm, layer.post_attention_layernorm, *parts.values()]
        has_qkv_bias = {projection.bias is not None for projection in projections[:3]}
        return (
            all(self.is_a(norm, "RMSNorm") for norm in norms)
            and {norm.variance_epsilon for norm in norms} == {decoder.norm.variance_epsilon}
            and len(has_qkv_bias) == 1
            and all(linear.bias is None for linear in mlp_linears)
            and type(mlp.act_fn) in (nn.SiLU, SiLUActivation)
            and attention.config is decoder.config
            and decoder.rotary_emb.inv_freq.numel() * 2 == attention.head_dim
            and attention.scaling == decoder.layers[0].self_attn.scaling
        )


def _is_plain(module: nn.Module) -> bool:
    """Return True for a module without hooks, parametrizations or a replaced forward."""
    changes = (module._forward_hooks, module._forward_pre_hooks, getattr(module, "parametrizations", None))
    return not any(changes) and "forward" not in module.__dict__
