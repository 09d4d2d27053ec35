"""Recognize the models whose layers `dflash.targets.fused` runs on `dflash.ops`, and read their weights.

A model is recognized by its exact classes, module by module, and by every setting that changes what they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from ..decoder import DecoderLayer, DeltaNetLayer
from .weights import is_plain_module, is_plain_tensor

__all__ = ["Recognizer", "recognizer_of"]

_ATTENTION, _PROJECTIONS = "self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")
_DELTA_NET = "linear_attn"
_INPUTS = ({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}, {"in_proj_qkvz", "in_proj_ba"})
_OTHER_MODULES = {"mlp", "input_layernorm", "post_attention_layernorm"}
_HEAD_NORMS = ({"q_norm", "k_norm"}, set())
_STORAGE = {
    *(("cpu", dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
}


class _Family(NamedTuple):
    """The names of a family's classes."""

    package: str  # in transformers.models
    prefix: str  # of all its classes
    text: str = ""  # in the names of the decoder's and of the rotary embedding's class


_FAMILIES = {  # model_type -> its family; windows, head norms and biases are read off the modules
    "llama": _Family("llama", "Llama"),
    "mistral": _Family("mistral", "Mistral"),
    "qwen2": _Family("qwen2", "Qwen2"),
    "qwen3": _Family("qwen3", "Qwen3"),
    "qwen3_moe": _Family("qwen3_moe", "Qwen3Moe"),
}
_GATED_FAMILIES = {  # full attention with output gates next to Gated DeltaNets
    "qwen3_next": _Family("qwen3_next", "Qwen3Next"),
    "qwen3_5_text": _Family("qwen3_5", "Qwen3_5", "Text"),
    "qwen3_5": _Family("qwen3_5", "Qwen3_5", "Text"),
    "qwen3_5_moe_text": _Family("qwen3_5_moe", "Qwen3_5Moe", "Text"),
    "qwen3_5_moe": _Family("qwen3_5_moe", "Qwen3_5Moe", "Text"),
}


def recognizer_of(model: nn.Module) -> Recognizer | None:
    """Return what judges the models of this type; None if no such model is recognized."""
    kind = model.config.model_type
    if kind in _FAMILIES:
        return Recognizer(_FAMILIES[kind])
    return GatedRecognizer(_GATED_FAMILIES[kind]) if kind in _GATED_FAMILIES else None


class Recognizer:
    """Recognizes Llama, Mistral, Qwen2 and Qwen3, which may have sparse MLPs.

    Attributes:
        zero_centered: the norms multiply by ``1 + weight``.
    """

    zero_centered = False

    def __init__(self, family: _Family) -> None:
        self.module = f"transformers.models.{family.package}.modeling_{family.package}"
        self.prefix, self.text = family.prefix, family.text

    def is_a(self, module: object, name: str) -> bool:
        """Return True if the class is exactly the family's own class of this name."""
        kind = type(module)
        return (kind.__module__, kind.__name__) == (self.module, self.prefix + name)

    def decoder(self, model: nn.Module) -> nn.Module | None:
        """Return the module that holds the layers, if the model has the family's class."""
        return getattr(model, "model", None) if self.is_a(model, "ForCausalLM") else None

    def accepts(self, model: nn.Module) -> bool:
        """Return True if every module, parameter and setting of the model is as expected."""
        decoder = self.decoder(model)
        if not (self.is_a(decoder, f"{self.text}Model") and all(map(is_plain_module, model.modules()))):
            return False
        embedding = decoder.embed_tokens
        if type(model.get_output_embeddings()) is not nn.Linear or type(embedding) is not nn.Embedding:
            return False
        if embedding.max_norm is not None or decoder.config is not model.config.get_text_config(decoder=True):
            return False
        if not (self.is_a(decoder.norm, "RMSNorm") and self.is_a(decoder.rotary_emb, f"{self.text}RotaryEmbedding")):
            return False
        layers = layers_of(decoder)
        if not 0 < len(layers) == decoder.config.num_hidden_layers or not self._accepts_layers(layers, decoder):
            return False
        parameters = [*decoder.parameters(), *model.get_output_embeddings().parameters()]
        storage = {(parameter.device.type, parameter.dtype) for parameter in parameters}
        is_dense = all(is_plain_tensor(p) and p.is_contiguous() for p in parameters)
        return is_dense and len(storage) == 1 and storage <= _STORAGE

    def eps(self, norm: nn.Module) -> float:
        """Return what a norm adds to the mean square."""
        return norm.variance_epsilon

    def layer(self, layer: nn.Module) -> DecoderLayer | DeltaNetLayer:
        """Return the weights of an accepted layer."""
        attention = layer.self_attn
        # Mistral reads its window off the config, Llama has none, the others keep it per layer.
        owner = attention.config if self.prefix == "Mistral" else attention
        window = getattr(owner, "sliding_window", None) or 0
        return DecoderLayer(**self._around(layer), **_attention(attention), window=window)

    def _around(self, layer: nn.Module) -> dict[str, Tensor | Callable | None]:
        """Return what is around the mixer. A sparse MLP runs as the module that it is."""
        norms = {"input_norm": layer.input_layernorm.weight, "post_norm": layer.post_attention_layernorm.weight}
        mlp = layer.mlp
        if self.is_a(mlp, "MLP"):
            return {**norms, "gate": mlp.gate_proj.weight, "up": mlp.up_proj.weight, "down": mlp.down_proj.weight}

        def experts(hidden: Tensor) -> Tensor:
            out = mlp(hidden)
            return out[0] if isinstance(out, tuple) else out

        return {**norms, "gate": None, "up": None, "down": None, "experts": experts}

    def _accepts_layers(self, layers: nn.ModuleList, decoder: nn.Module) -> bool:
        return all(
            self.is_a(layer, "DecoderLayer")
            and {name for name, _ in layer.named_children()} == {_ATTENTION, *_OTHER_MODULES}
            and self._accepts_around(layer, decoder)
            and self._accepts_attention(layer.self_attn, i, layers[0].self_attn, decoder)
            for i, layer in enumerate(layers)
        )

    def _accepts_around(self, layer: nn.Module, decoder: nn.Module) -> bool:
        """Judge the norms and the MLP."""
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        return self._accepts_norms(norms, decoder) and self._accepts_mlp(layer.mlp)

    def _accepts_norms(self, norms: tuple[nn.Module, ...], decoder: nn.Module) -> bool:
        eps = self.eps(decoder.norm)
        return all(self.is_a(norm, "RMSNorm") and self.eps(norm) == eps for norm in norms)

    def _accepts_mlp(self, mlp: nn.Module) -> bool:
        if not self.is_a(mlp, "MLP"):
            return self.is_a(mlp, "SparseMoeBlock")  # runs as it is
        linears = [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        return type(mlp.act_fn) in (nn.SiLU, SiLUActivation) and all(map(_is_linear_without_bias, linears))

    def _accepts_attention(self, attention: nn.Module, index: int, first: nn.Module, decoder: nn.Module) -> bool:
        if not self.is_a(attention, "Attention"):
            return False
        parts = dict(attention.named_children())
        projections = [parts.pop(name, None) for name in _PROJECTIONS]
        if parts.keys() not in _HEAD_NORMS or any(type(linear) is not nn.Linear for linear in projections):
            return False
        has_qkv_bias = {projection.bias is not None for projection in projections[:3]}
        return (
            self._accepts_norms(tuple(parts.values()), decoder)
            and len(has_qkv_bias) == 1
            and attention.config is decoder.config
            and self._fits_rotary(2 * decoder.rotary_emb.inv_freq.numel(), attention.head_dim)
            and attention.scaling == first.scaling
            and attention.layer_idx == index
        )

    def _fits_rotary(self, rotary: int, head_dim: int) -> bool:
        return rotary == head_dim


class GatedRecognizer(Recognizer):
    """Recognizes Qwen3-Next and Qwen3.5, also inside its multimodal wrapper, with dense or sparse MLPs."""

    zero_centered = True

    def decoder(self, model: nn.Module) -> nn.Module | None:
        """Return the module that holds the layers, if the model has the family's class."""
        if self.text and self.is_a(model, "ForConditionalGeneration") and self.is_a(model.model, "Model"):
            return model.model.language_model
        return super().decoder(model)

    def eps(self, norm: nn.Module) -> float:
        """Return what a norm adds to the mean square."""
        return norm.eps

    def layer(self, layer: nn.Module) -> DecoderLayer | DeltaNetLayer:
        """Return the weights of an accepted layer."""
        shared = self._around(layer)
        if hasattr(layer, _ATTENTION):
            return DecoderLayer(**shared, **_attention(layer.self_attn), gated=True)
        mixer = layer.linear_attn
        together = hasattr(mixer, "in_proj_qkvz")
        return DeltaNetLayer(
            **shared,
            qkv=(mixer.in_proj_qkvz if together else mixer.in_proj_qkv).weight,
            z=None if together else mixer.in_proj_z.weight,
            b=(mixer.in_proj_ba if together else mixer.in_proj_b).weight,
            a=None if together else mixer.in_proj_a.weight,
            conv=mixer.conv1d.weight,
            a_log=mixer.A_log,
            dt_bias=mixer.dt_bias,
            norm=mixer.norm.weight,
            out=mixer.out_proj.weight,
            key_heads=mixer.num_k_heads,
        )

    def _accepts_layers(self, layers: nn.ModuleList, decoder: nn.Module) -> bool:
        with_attention = [layer for layer in layers if hasattr(layer, _ATTENTION)]
        recurrent = [layer.linear_attn for layer in layers if hasattr(layer, _DELTA_NET)]
        if not with_attention or len(with_attention) + len(recurrent) != len(layers):
            return False
        first = with_attention[0].self_attn
        return len({tuple(map(mixer.__dict__.get, _SIZES)) for mixer in recurrent}) < 2 and all(
            self.is_a(layer, "DecoderLayer") and self._accepts_layer(layer, i, first, decoder)
            for i, layer in enumerate(layers)
        )

    def _accepts_layer(self, layer: nn.Module, index: int, first: nn.Module, decoder: nn.Module) -> bool:
        names, kind = {name for name, _ in layer.named_children()}, getattr(layer, "block_type", None)
        if not self._accepts_around(layer, decoder):
            return False
        if kind == "full_attention":
            return names == {_ATTENTION, *_OTHER_MODULES} and self._accepts_attention(
                layer.self_attn, index, first, decoder
            )
        return (
            kind == "linear_attention"
            and names == {_DELTA_NET, *_OTHER_MODULES}
            and self._accepts_delta_net(layer.linear_attn, index, decoder)
        )

    def _fits_rotary(self, rotary: int, head_dim: int) -> bool:
        return rotary <= head_dim

    def _accepts_delta_net(self, mixer: nn.Module, index: int, decoder: nn.Module) -> bool:
        parts = dict(mixer.named_children())
        if not self.is_a(mixer, "GatedDeltaNet") or parts.keys() - {"conv1d", "norm", "out_proj"} not in _INPUTS:
            return False
        conv, norm = parts.pop("conv1d"), parts.pop("norm")
        heads, key_heads, key_dim, value_dim = (getattr(mixer, name) for name in _SIZES)
        keys, values = key_heads * key_dim, heads * value_dim
        rows = {
            "in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads,
            "in_proj_qkvz": 2 * (keys + values), "in_proj_ba": 2 * heads, "out_proj": decoder.config.hidden_size,
        }  # fmt: skip
        return (
            all(_is_linear_without_bias(part) and part.weight.shape[0] == rows[name] for name, part in parts.items())
            and type(conv) is nn.Conv1d
            and (conv.bias, conv.groups, conv.weight.shape[:2]) == (None, 2 * keys + values, (2 * keys + values, 1))
            and self.is_a(norm, "RMSNormGated")
            and (norm.variance_epsilon, norm.weight.shape) == (self.eps(decoder.norm), (value_dim,))
            and norm.activation == mixer.activation == "silu"
            and mixer.conv_kernel_size == conv.weight.shape[2]
            and (mixer.key_dim, mixer.value_dim, mixer.layer_idx) == (keys, values, index)
            and mixer.A_log.shape == mixer.dt_bias.shape == (heads,)
            and heads % key_heads == 0
        )


_SIZES = ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim")


def layers_of(decoder: nn.Module) -> nn.ModuleList:
    """Return the layers that run: transformers runs the first ones if the config asks for fewer."""
    return decoder.layers[: decoder.config.num_hidden_layers]


def _attention(attention: nn.Module) -> dict[str, Tensor | None]:
    q, k, v, o = (getattr(attention, name) for name in _PROJECTIONS)
    has_head_norms = hasattr(attention, "q_norm")
    return {
        "q": q.weight, "k": k.weight, "v": v.weight, "o": o.weight,
        "q_norm": attention.q_norm.weight if has_head_norms else None,
        "k_norm": attention.k_norm.weight if has_head_norms else None,
        "q_bias": q.bias, "k_bias": k.bias, "v_bias": v.bias, "o_bias": o.bias,
    }  # fmt: skip


def _is_linear_without_bias(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.bias is None
