"""Run the layers of plain pre-norm models on `dflash.ops` instead of their modules, on the same parameters.

A model is recognized by its exact classes, module by module: one with a subclass, an adapter, a quantized layer or a
hook keeps its own forward, and so does every family that is not listed. `dflash.targets.trial` compares the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation

from .. import ops
from ..decoder import DecoderLayer, DecoderStack, DeltaNetLayer, rotary_table
from ..ops import Int8Weight, NotFiniteError, int8_layer, split_weights
from ..state import KVCache, Tree
from .fingerprint import ValuesFingerprint
from .quantized import is_quantized
from .support import UnsupportedTargetError, embedding_table
from .weights import is_plain_module, is_plain_tensor, kernel_obstacle, name_of

__all__ = ["FusedTarget", "not_finite", "obstacle_to_int8", "recognize", "refuse_int8"]

_MAX_CUDA_ROWS = 256  # of one pass: a block for each row of a batch, but not a chunk of a long prompt
_STORAGE = {
    *(("cpu", dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
}


# ---------------------------------------------------------------------------------------------- recognizing models


class _Family(NamedTuple):
    """The names of a family's classes, and what its layers may hold.

    Attributes:
        package: in transformers.models.
        prefix: of all its classes.
        text: in the names of the decoder's and of the rotary embedding's class.
        gated: full attention has output gates, next to Gated DeltaNets; norms multiply by ``1 + weight``.
    """

    package: str
    prefix: str
    text: str = ""
    gated: bool = False

    def is_a(self, module: object, name: str) -> bool:
        """Return True if the class is exactly the family's own class of this name, or torch's."""
        kind = type(module)
        if name in _PLAIN:
            return kind in _PLAIN[name] and getattr(module, "bias", None) is None
        own = f"transformers.models.{self.package}.modeling_{self.package}"
        is_linear = name == "BiasedLinear" and kind is nn.Linear
        return is_linear or (kind.__module__, kind.__name__) == (own, self.prefix + name)

    def fits(self, module: nn.Module, names: str) -> bool:
        """Return True if a module and all in it are of the family's own classes; ``names`` are separated by bars."""
        name = next((name for name in names.split("|") if self.is_a(module, name)), None)
        parts = _PARTS.get(name or "", {})
        children = dict(module.named_children())
        is_opaque = name == "SparseMoeBlock"  # runs as it is
        return name is not None and (
            is_opaque
            or (children.keys() <= parts.keys() and all(self.fits(child, parts[n]) for n, child in children.items()))
        )

    def decoder(self, model: nn.Module) -> nn.Module | None:
        """Return the module that holds the layers, if the model has the family's class."""
        if self.text and self.is_a(model, "ForConditionalGeneration") and self.is_a(model.model, "Model"):
            return model.model.language_model
        return model.model if self.is_a(model, "ForCausalLM") else None

    def accepts(self, model: nn.Module) -> bool:
        """Return True if every module and parameter of the model is as expected."""
        decoder, head = self.decoder(model), model.get_output_embeddings()
        if not self.is_a(decoder, f"{self.text}Model") or not all(map(is_plain_module, model.modules())):
            return False
        if type(head) is not nn.Linear or type(decoder.embed_tokens) is not nn.Embedding:
            return False
        if decoder.embed_tokens.max_norm is not None:  # changes few embeddings, perhaps none of a trial run's
            return False
        layers = _layers_of(decoder)
        if not 0 < len(layers) == decoder.config.num_hidden_layers:
            return False
        attentions = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
        mixers = [layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn for layer in layers]
        rotary = 2 * decoder.rotary_emb.inv_freq.numel()
        parameters = [*decoder.parameters(), *head.parameters()]
        storage = {(parameter.device.type, parameter.dtype) for parameter in parameters}
        return (
            self.is_a(decoder.norm, "RMSNorm")
            and self.is_a(decoder.rotary_emb, f"{self.text}RotaryEmbedding")
            and all(self.fits(layer, "DecoderLayer") for layer in layers)
            and bool(attentions)
            and [mixer.layer_idx for mixer in mixers] == list(range(len(layers)))  # else they share keys and values
            and all(rotary == part.head_dim or (self.gated and rotary < part.head_dim) for part in attentions)
            and all(len({part.bias is None for part in _projections(a)[:3]}) == 1 for a in attentions)
            and all(is_plain_tensor(p) and p.is_contiguous() for p in parameters)
            and len(storage) == 1
            and storage <= _STORAGE
        )

    def eps(self, norm: nn.Module) -> float:
        """Return what a norm adds to the mean square."""
        return norm.eps if self.gated else norm.variance_epsilon

    def layer(self, layer: nn.Module) -> DecoderLayer | DeltaNetLayer:
        """Return the weights of an accepted layer."""
        shared = self._around(layer)
        if hasattr(layer, "self_attn"):
            attention = layer.self_attn
            # Mistral reads its window off the config, Llama has none, the others keep it per layer.
            owner = attention.config if self.prefix == "Mistral" else attention
            window = 0 if self.gated else getattr(owner, "sliding_window", None) or 0
            return DecoderLayer(**shared, **_attention(attention), window=window, gated=self.gated)
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


_PLAIN = {"Linear": (nn.Linear,), "Conv1d": (nn.Conv1d,), "SiLU": (nn.SiLU, SiLUActivation)}  # without biases
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# The modules in a module of a class, and their classes. Not every family has all of them.
_PARTS = {
    "DecoderLayer": {
        **{"self_attn": "Attention", "linear_attn": "GatedDeltaNet", "mlp": "MLP|SparseMoeBlock"},
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "RMSNorm"),
    },
    "Attention": {**dict.fromkeys(_PROJECTIONS, "BiasedLinear"), "q_norm": "RMSNorm", "k_norm": "RMSNorm"},
    "MLP": {**dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "Linear"), "act_fn": "SiLU"},
    "GatedDeltaNet": {
        **dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), "Linear"),
        **{"conv1d": "Conv1d", "norm": "RMSNormGated", "out_proj": "Linear", "act": "SiLU"},
    },
}
_FAMILIES = {  # by model_type; windows, head norms and biases are read off the modules
    "llama": _Family("llama", "Llama"),
    "mistral": _Family("mistral", "Mistral"),
    "qwen2": _Family("qwen2", "Qwen2"),
    "qwen3": _Family("qwen3", "Qwen3"),
    "qwen3_moe": _Family("qwen3_moe", "Qwen3Moe"),
    "qwen3_next": _Family("qwen3_next", "Qwen3Next", gated=True),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), _Family("qwen3_5", "Qwen3_5", "Text", gated=True)),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _Family("qwen3_5_moe", "Qwen3_5Moe", "Text", gated=True)),
}


def recognize(model: nn.Module, target_layer_ids: tuple[int, ...]) -> FusedTarget | None:
    """Return the fused form of a model, or None if the model must keep its own forward."""
    family = _FAMILIES.get(model.config.model_type)
    if family is None or len(set(target_layer_ids)) < len(target_layer_ids) or not family.accepts(model):
        return None
    return FusedTarget(model, target_layer_ids)


def _layers_of(decoder: nn.Module) -> nn.ModuleList:
    """Return the layers that run: transformers runs the first ones if the config asks for fewer."""
    return decoder.layers[: decoder.config.num_hidden_layers]


def _projections(attention: nn.Module) -> list[nn.Linear]:
    return [getattr(attention, name) for name in _PROJECTIONS]


def _attention(attention: nn.Module) -> dict[str, Tensor | None]:
    q, k, v, o = _projections(attention)
    has_head_norms = hasattr(attention, "q_norm")
    return {
        "q": q.weight, "k": k.weight, "v": v.weight, "o": o.weight,
        "q_norm": attention.q_norm.weight if has_head_norms else None,
        "k_norm": attention.k_norm.weight if has_head_norms else None,
        "q_bias": q.bias, "k_bias": k.bias, "v_bias": v.bias, "o_bias": o.bias,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- running them


class FusedTarget:
    """Embedding, decoder stack and head of a recognized model.

    Args:
        model: a copy of the user's model. Its parameters are used where they are.
        target_layer_ids: the tapped layers.

    Attributes:
        is_int8: True if products multiply by copies of the weights in 8 bits, see `store_as_int8`.
    """

    def __init__(self, model: nn.Module, target_layer_ids: tuple[int, ...]) -> None:
        family = _FAMILIES[model.config.model_type]
        decoder = family.decoder(model)
        self.embedding, self.head = decoder.embed_tokens.weight, model.get_output_embeddings()
        self._model, self.is_int8 = model, False
        self._int8_head: Int8Weight | None = None
        self._quantized_values = ValuesFingerprint()
        layers = _layers_of(decoder)
        attention = next(layer.self_attn for layer in layers if hasattr(layer, "self_attn"))
        self.num_kv_heads, self.head_dim = attention.k_proj.weight.shape[0] // attention.head_dim, attention.head_dim
        self.stack = DecoderStack(
            [family.layer(layer) for layer in layers],
            decoder.norm.weight,
            eps=family.eps(decoder.norm),
            scale=float(attention.scaling),
            taps=target_layer_ids,
            zero_centered=family.gated,
        )
        self._layers = self.stack.layers  # of the model's own weights
        self._rotary = decoder.rotary_emb
        self._inv_freq = self._rotary.inv_freq.detach().clone()  # what the tables were made of
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """Device of all weights."""
        return self.embedding.device

    @property
    def obstacle(self) -> str:
        """Why our kernels cannot multiply by these weights; empty if they can."""
        weights = [w for layer in self.stack.layers for w in layer if isinstance(w, Tensor) and w.dim() == 2]
        weights.append(self.head.weight)
        return kernel_obstacle(self.device, weights, {weight.shape[1] for weight in weights})

    @property
    def int8_obstacle(self) -> str:
        """Why these weights, on CPU, cannot be stored as int8; empty if they can."""
        return "it has experts" if any(layer.experts for layer in self._layers) else self.obstacle

    def store_as_int8(self) -> None:
        """Multiply by copies of the weights in 8 bits from now on, also in passes of many rows.

        Raises:
            UnsupportedTargetError: a value is infinite or NaN. Earlier copies are gone then, and `refresh` raises until
                the values are finite; without earlier copies nothing has changed.
        """
        # 1. Free earlier copies, so that no two sets are in memory. Nothing runs before `refresh` has made new ones.
        if self.is_int8:
            self.forget_values()
            self._int8_head = None
            self.stack.replace(self._layers, self.stack.norm)
        # 2. Make all copies before any of them is used.
        try:
            head, layers = Int8Weight.of(self.head.weight), [int8_layer(layer) for layer in self._layers]
        except NotFiniteError as error:
            raise UnsupportedTargetError(not_finite("weights", self._model, error)) from error
        self.stack.replace(layers, self.stack.norm)
        self._int8_head, self.is_int8 = head, True
        self._quantized_values.take([self._model])

    def forget_values(self) -> None:
        """Make copies in 8 bits again at the next `refresh`, whether the weights are known to have changed or not."""
        self._quantized_values = ValuesFingerprint()

    def refresh(self, cache: KVCache) -> None:
        """Notice changed weights and frequencies, and fit a cache that another target has made."""
        if self.is_int8 and not self._quantized_values.matches([self._model]):
            self.store_as_int8()
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
        like = self.embedding.detach()
        heads = like.new_empty(1, self.num_kv_heads, 0, self.head_dim)
        for i, layer in enumerate(self.stack.layers):
            if not layer.is_recurrent:
                cache.layer(i, heads, heads)
                continue
            key_heads, num_heads, key_dim, value_dim, width = layer.sizes
            wide, buffers = like.new_empty(1, 0, 1, 1, dtype=torch.float32), cache.recurrent_layer(i)
            buffers.convolution(like.new_empty(1, 0, layer.conv.shape[0]), width)
            buffers.recurrence(
                wide.expand(1, 0, key_heads, key_dim), wide.expand(1, 0, num_heads, value_dim),
                wide[..., 0].expand(1, 0, num_heads),
            )  # fmt: skip

    def _table(self, positions: int) -> tuple[Tensor, Tensor]:
        return rotary_table(self._inv_freq, self._rotary.attention_scaling, positions)

    def handles(self, ids: Tensor) -> bool:
        """Return True if a pass over these rows runs here. torch's matrix products are faster for more rows."""
        if self.is_int8:
            return True  # the modules have other weights
        if ids.device.type == "cpu":
            return ops.skinny(ids.numel(), self.embedding.dtype)
        return ids.numel() <= _MAX_CUDA_ROWS

    def forward(
        self, ids: Tensor, lengths: Tensor, cache: KVCache, logits_to_keep: int | Tensor, tree: Tree | None = None,
        tapped: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run as `dflash.targets.Target.forward`, with all taps in one tensor, ``tapped`` if it is given."""
        table = self.embedding.detach()[None]
        embeds = table.new_empty(1, ids.numel(), table.shape[2])
        ops.gather_rows_(table, ids.reshape(1, -1), embeds)  # an id of -1 counts as 0
        hidden, tapped = self.stack(embeds.view(*ids.shape, -1), lengths, cache, tree=tree, tapped=tapped)
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden.index_select(1, logits_to_keep)
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        return self.logits(hidden), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the head's logits of any rows ``[..., hidden]``."""
        (weight,), scales = split_weights(self.head.weight if self._int8_head is None else self._int8_head)
        return ops.linear(hidden, weight, self.head.bias, prefetch=True, scales=scales)


# ---------------------------------------------------------------------------------------------- int8


def obstacle_to_int8(model: nn.Module, fused: FusedTarget | None, reason: str) -> str:
    """Return why the weights of a target cannot be stored as int8; empty if they can. No value is read.

    Args:
        model: the user's.
        fused: its fused form.
        reason: why it has none.
    """
    device = embedding_table(model).device
    if device.type != "cpu":
        return f"it is on {device}"
    if fused is not None:
        return fused.int8_obstacle
    return "its weights are quantized already" if is_quantized(model) else reason


def refuse_int8(model: nn.Module, obstacle: str) -> None:
    """Raise UnsupportedTargetError if there is an obstacle."""
    if obstacle:
        raise UnsupportedTargetError(
            "weights='int8' needs a target on CPU whose dense layers run on the ops of this package (see fused), got "
            f"{type(model).__name__}: {obstacle}. Leave weights out"
        )


def not_finite(option: str, model: nn.Module, error: NotFiniteError) -> str:
    """Return what to say of a weight that is not finite.

    Args:
        option: that asks for the weights as int8.
        model: the target or the drafter that has the weight.
        error: what was raised.
    """
    name = name_of(model, error.weight).removesuffix(".weight")
    return f"{option}='int8' needs finite weights, got {error.value} in {name}: leave it out"
