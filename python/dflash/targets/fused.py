"""Run the layers of plain pre-norm models, and experts of other models, on `dflash.ops` instead of their modules.

A model is recognized by its exact classes, module by module: one with a subclass, an adapter, a quantized layer or a
hook keeps its own forward, and so does every family that is not listed. `dflash.targets.trial` compares the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.integrations import moe

from .. import ops
from ..cache import KVCache
from ..decoder import DecoderLayer, DecoderStack, DeltaNetLayer, product, rotation
from ..ops import FORMATS, PackedWeight, Weight, separate_packed
from ..state import Tree
from .model import KERNEL_DTYPES, PLAIN_TENSORS, config_values, has_global_hooks, weight_of
from .packed import PackedEmbedding, PackedLinear
from .recurrent import give_forward

_LAYER_KERNELS = {"linear", "block_attention", "qkv_norm_rope_append", "rms_norm"}
_MAX_ROWS = 256  # of one pass: a block for each row of a batch, but not a chunk of a long prompt


def kernel_obstacle(device: torch.device, weights: Sequence[Tensor], widths: Iterable[int]) -> str:
    """Return why our kernels cannot multiply by these weights on ``device``; empty if they can.

    The ops would run in plain torch then, and a model's own modules are as fast. ``weights`` are of one dtype,
    ``widths`` the sizes that the products sum over.
    """
    dtype = weights[0].dtype
    if dtype not in KERNEL_DTYPES.get(device.type, ()):
        return f"our kernels for {device.type} do not multiply in {dtype}"
    if device.type != "cuda":
        return ""
    if reason := ops.cuda_status(device.index):
        return f"our CUDA kernels cannot run: {reason}"
    if off := sorted(_LAYER_KERNELS & ops.kernels_off().keys()):
        return f"our CUDA kernel {off[0]} is off: {ops.kernels_off()[off[0]]}"
    if any(width % 8 for width in widths) or any(weight.data_ptr() % 16 for weight in weights):
        return "our CUDA kernels need products over multiples of 8, and weights at multiples of 16 bytes"
    return ""


def _is_plain_module(module: nn.Module) -> bool:
    """Return True for a module without hooks, parametrizations or a replaced forward."""
    changes = (module._forward_hooks, module._forward_pre_hooks, getattr(module, "parametrizations", None))
    return not any(changes) and "forward" not in module.__dict__


def _are_plain_tensors(tensors: Iterable[Tensor]) -> bool:
    """Return True for tensors of one device and dtype whose values are in their memory as they are."""
    tensors = list(tensors)
    is_plain = all(type(x) in PLAIN_TENSORS and x.is_contiguous() and not x.is_neg() for x in tensors)
    return is_plain and len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1


# ---------------------------------------------------------------------------------------------- recognizing models


class Family(NamedTuple):
    """The names of a family's classes, and what its layers may hold.

    Attributes:
        package: in transformers.models.
        prefix: of all its classes.
        text: in the names of the decoder's and of the rotary embedding's class.
        gated: full attention has output gates, next to Gated DeltaNets; norms multiply by ``1 + weight``.
        sandwiched: each sublayer has a norm after it too, layers with a window their own RoPE, and embeddings a scale;
            norms multiply by ``1 + weight``.
    """

    package: str
    prefix: str
    text: str = ""
    gated: bool = False
    sandwiched: bool = False

    def is_a(self, module: object, name: str) -> bool:
        """Return True if the class is exactly the family's own class of this name."""
        kind, own = type(module), f"transformers.models.{self.package}.modeling_{self.package}"
        return (kind.__module__, kind.__name__) == (own, self.prefix + name)

    def fits(self, module: nn.Module, has_biases: bool = False) -> bool:
        """Return True if a module of a layer and all in it are of the family's own classes, or plain ones of torch."""
        if type(module) in _PLAIN:
            return has_biases or getattr(module, "bias", None) is None
        if self.is_a(module, "SparseMoeBlock") or (self.sandwiched and type(module) is GELUTanh):
            return True  # the first runs as it is
        is_attention = self.is_a(module, "Attention")
        is_own = is_attention or any(self.is_a(module, name) for name in _PARTS)
        return is_own and all(self.fits(child, is_attention) for child in module.children())

    def decoder(self, model: nn.Module) -> nn.Module | None:
        """Return the module that holds the layers, if the model has the family's class."""
        may_have_tower = self.text and not self.sandwiched
        if may_have_tower and self.is_a(model, "ForConditionalGeneration") and self.is_a(model.model, "Model"):
            return model.model.language_model
        return model.model if self.is_a(model, "ForCausalLM") else None

    def accepts(self, model: nn.Module) -> bool:
        """Return True if every module and parameter of the model is as expected."""
        decoder, head = self.decoder(model), model.get_output_embeddings()
        if not self.is_a(decoder, f"{self.text}Model") or not all(map(_is_plain_module, model.modules())):
            return False
        embed, config = decoder.embed_tokens, decoder.config
        is_scaled = self.sandwiched and self.is_a(embed, "TextScaledWordEmbedding")
        is_own = type(head) in _LINEARS and (is_scaled or type(embed) in (nn.Embedding, PackedEmbedding))
        if not is_own or any(getattr(config, key, None) for key in _CAPS):
            return False
        layers = layers_of(decoder)
        mixers = [getattr(layer, "self_attn", None) or getattr(layer, "linear_attn", None) for layer in layers]
        return (
            embed.max_norm is None  # changes few embeddings, perhaps none of a trial run's
            and self.is_a(decoder.norm, "RMSNorm")
            and any(self.is_a(decoder.rotary_emb, f"{text}RotaryEmbedding") for text in {"", self.text})
            and all(map(self.fits, layers))
            and any(hasattr(layer, "self_attn") for layer in layers)
            and len(layers) == config.num_hidden_layers
            # Else a layer has no mixer, or layers share keys and values
            and [getattr(mixer, "layer_idx", None) for mixer in mixers] == list(range(len(layers)))
            and _are_plain_tensors([*decoder.parameters(), *head.parameters()])
        )

    def layer(self, layer: nn.Module) -> DecoderLayer | DeltaNetLayer:
        """Return the weights of an accepted layer."""
        norms = {name: getattr(layer, theirs).weight for name, theirs in _NORMS[self.sandwiched].items()}
        shared = {**norms, **self._mlp(layer.mlp)}
        if hasattr(layer, "self_attn"):
            attention = layer.self_attn
            # Mistral reads its window off the config, Llama has none, the others keep it per layer.
            owner = attention.config if self.prefix == "Mistral" else attention
            projections = {name: getattr(attention, f"{name}_proj") for name in "qkvo"}
            return DecoderLayer(
                **shared,
                **{name: weight_of(projection) for name, projection in projections.items()},
                **{f"{name}_bias": projection.bias for name, projection in projections.items()},
                q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
                k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
                window=0 if self.gated else max(config_values(owner, "sliding_window"), default=0),
                gated=self.gated,
                gate_kind=_ACTIVATIONS.get(type(getattr(layer.mlp, "act_fn", None)), "silu"),
            )
        mixer = layer.linear_attn
        together = {"qkv": "qkvz", "b": "ba"} if hasattr(mixer, "in_proj_qkvz") else {name: name for name in _DELTA_NET}
        projections = {name: weight_of(getattr(mixer, f"in_proj_{theirs}")) for name, theirs in together.items()}
        found = DeltaNetLayer(
            **shared, **dict.fromkeys(_DELTA_NET) | projections, conv=mixer.conv1d.weight, a_log=mixer.A_log,
            dt_bias=mixer.dt_bias, norm=mixer.norm.weight, out=weight_of(mixer.out_proj), key_heads=mixer.num_k_heads,
        )  # fmt: skip
        return separate_packed(found)

    def _mlp(self, mlp: nn.Module) -> dict[str, Weight | Callable | None]:
        """Return the weights of an MLP; a sparse one runs as the module that it is."""
        if self.is_a(mlp, "MLP"):
            return {name: weight_of(getattr(mlp, f"{name}_proj")) for name in ("gate", "up", "down")}

        def experts(hidden: Tensor) -> Tensor:
            out = mlp(hidden)
            return out[0] if isinstance(out, tuple) else out

        return {"gate": None, "up": None, "down": None, "experts": experts}


_LINEARS = (nn.Linear, PackedLinear)
_PLAIN = (*_LINEARS, nn.Conv1d, nn.SiLU, SiLUActivation)
_PARTS = ("DecoderLayer", "GatedDeltaNet", "MLP", "RMSNorm", "RMSNormGated")  # classes of a layer, next to Attention
_NORMS = {  # of a layer, by `Family.sandwiched`
    False: {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"},
    True: {
        "input_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm",
        "post_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")  # that no family has on
_ROPES = ("", "full_attention_", "sliding_attention_")  # before the names of a rotary embedding's tables
_DELTA_NET = ("qkv", "z", "b", "a")  # the input projections of a Gated DeltaNet
_FAMILIES = {  # by model_type; windows, head norms and biases are read off the modules
    "llama": Family("llama", "Llama"),
    "mistral": Family("mistral", "Mistral"),
    "qwen2": Family("qwen2", "Qwen2"),
    "qwen3": Family("qwen3", "Qwen3"),
    "qwen3_moe": Family("qwen3_moe", "Qwen3Moe"),
    "gemma3_text": Family("gemma3", "Gemma3", "Text", sandwiched=True),
    "qwen3_next": Family("qwen3_next", "Qwen3Next", gated=True),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), Family("qwen3_5", "Qwen3_5", "Text", gated=True)),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), Family("qwen3_5_moe", "Qwen3_5Moe", "Text", gated=True)),
}


def recognize(model: nn.Module) -> Family | None:
    """Return the family of a model whose layers may run on the ops, or None if it must keep its own forward."""
    family = _FAMILIES.get(model.config.model_type)
    return family if family is not None and family.accepts(model) else None


def layers_of(decoder: nn.Module) -> nn.ModuleList:
    """Return the layers that run: transformers runs the first ones if the config asks for fewer."""
    return decoder.layers[: decoder.config.num_hidden_layers]


# ---------------------------------------------------------------------------------------------- running on the ops


class FusedTarget:
    """Embedding, decoder stack and head of a recognized model.

    Args:
        model: a copy of the user's model. Its parameters are used where they are.
        family: its own.
        target_layer_ids: the tapped layers.

    Attributes:
        is_packed: True if all linear layers have packed weights that CPUs read, with which the bits of a product are
            the same for any number of rows; the routers of experts are not among them.
        has_experts: True if a layer has experts, whose routers are transformers' modules.
    """

    def __init__(self, model: nn.Module, family: Family, target_layer_ids: tuple[int, ...]) -> None:
        decoder = family.decoder(model)
        layers, norm = layers_of(decoder), decoder.norm
        attention = next(layer.self_attn for layer in layers if hasattr(layer, "self_attn"))
        self._embed, self.head = decoder.embed_tokens, model.get_output_embeddings()
        self.embedding = self._embed.weight
        self.num_kv_heads, self.head_dim = attention.k_proj.weight.shape[0] // attention.head_dim, attention.head_dim
        self._family, self._layers = family, layers
        zero_centered = family.gated or family.sandwiched
        self.stack = DecoderStack(
            list(map(family.layer, layers)), norm.weight, eps=norm.eps if zero_centered else norm.variance_epsilon,
            scale=float(attention.scaling), taps=target_layer_ids, zero_centered=zero_centered,
        )  # fmt: skip
        self._note_weights()
        self._rotary = decoder.rotary_emb
        self._ropes = [name for name in _ROPES if hasattr(self._rotary, f"{name}inv_freq")]
        self._inv_freq = self._frequencies().clone()  # what the tables were made of
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def obstacle(self) -> str:
        """Why our kernels cannot multiply by these weights; empty if they can."""
        weights = [*self._dense_weights(), self.embedding]
        return kernel_obstacle(self.embedding.device, weights, {weight.shape[1] for weight in weights})

    def read_layers(self) -> None:
        """Use what the linear layers multiply by now."""
        self.stack.replace(list(map(self._family.layer, self._layers)), self.stack.norm)
        self._note_weights()

    def _note_weights(self) -> None:
        head = weight_of(self.head)
        is_for_cpu = isinstance(head, PackedWeight) and FORMATS[head.format].device == "cpu"
        self.is_packed = is_for_cpu and not self._dense_weights()
        self.has_experts = any(layer.experts is not None for layer in self.stack.layers)

    def _dense_weights(self) -> list[Tensor]:
        return [w for layer in self.stack.layers for w in layer if isinstance(w, Tensor) and w.dim() == 2]

    def refresh(self, cache: KVCache) -> None:
        """Notice changed weights and frequencies, and fit a cache that another target has made."""
        self.stack.refresh()
        if not torch.equal(self._inv_freq, frequencies := self._frequencies()):
            self._inv_freq = frequencies.clone()
            for positions, tables in self._tables.items():  # in place: compiled and captured steps hold their addresses
                for table, new in zip(tables, self._table(positions), strict=True):
                    table.copy_(new)
        # The rotary table and the buffers of all layers
        positions = cache.capacity
        if positions not in self._tables:
            self._tables[positions] = self._table(positions)
        first, *others = zip(*self._tables[positions], strict=True)
        cache.rotary, cache.local_rotary = first, next(iter(others), None)
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

    def _frequencies(self) -> Tensor:
        """Return the frequencies of each RoPE, ``[ropes, rotary / 2]``: that of most layers, then that with windows."""
        return torch.stack([getattr(self._rotary, f"{name}inv_freq").detach() for name in self._ropes])

    def _table(self, positions: int) -> tuple[Tensor, Tensor]:
        every = torch.arange(positions, device=self._inv_freq.device)
        scales = [getattr(self._rotary, f"{name}attention_scaling") for name in self._ropes]
        tables = [rotation(every, *rope) for rope in zip(self._inv_freq, scales, strict=True)]
        cos, sin = map(torch.stack, zip(*tables, strict=True))
        return cos, sin

    def handles(self, rows: int) -> bool:
        """Return True if a pass over so many rows runs here. torch's matrix products are faster for more rows."""
        if self.is_packed:
            return True
        if self.embedding.device.type == "cpu":
            return ops.skinny(rows, self.embedding.dtype)
        return rows <= _MAX_ROWS

    def forward(
        self, ids: Tensor, lengths: Tensor, cache: KVCache, logits_to_keep: int | Tensor, tree: Tree | None = None,
        tapped: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Run as `dflash.targets.Target.forward`, with all taps in one tensor, ``tapped`` if it is given."""
        if isinstance(self._embed, PackedEmbedding):
            embeds = self._embed(ids)
        else:
            table = self.embedding.detach()[None]
            embeds = table.new_empty(1, ids.numel(), table.shape[2])
            ops.gather_rows_(table, ids.reshape(1, -1), embeds)  # an id of -1 counts as 0
            if self._family.sandwiched:
                embeds = embeds * self._embed.embed_scale.to(embeds.dtype)
        hidden, tapped = self.stack(embeds.view(*ids.shape, -1), lengths, cache, tree=tree, tapped=tapped)
        if isinstance(logits_to_keep, Tensor):
            hidden = hidden.index_select(1, logits_to_keep)
        elif logits_to_keep:
            hidden = hidden[:, -logits_to_keep:]
        return self.logits(hidden), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the head's logits of any rows ``[..., hidden]``."""
        return product(hidden, weight_of(self.head), self.head.bias)


NOT_FUSED = (
    "fused=True needs exactly a Llama, Mistral, Qwen2, Qwen3 (with experts or without), Qwen3-Next, Qwen3.5 or Gemma 3 "
    "of transformers, with no function replaced and no hooks, with weights that the kernels take, all packed or of one "
    'dtype, and each layer tapped at most once, got {model}: pass fused=False or "auto"'
)


def fuse(
    model: nn.Module, target_layer_ids: tuple[int, ...], fused: bool | Literal["auto"] = True, replaced: str = ""
) -> tuple[FusedTarget | None, str]:
    """Return a copy's fused form, or None and why there is none; ``replaced`` is a replaced function's name."""
    if fused is False:
        return None, "fused=False was asked for"
    if foreign := replaced or ("a hook on every module" if has_global_hooks() else ""):
        return None, f"{foreign} is not transformers' own"
    family = recognize(model)
    if family is None or len(set(target_layer_ids)) < len(target_layer_ids):
        return None, f"{type(model).__name__} is not one of the models that are recognized, or it was changed"
    found = FusedTarget(model, family, target_layer_ids)
    reason = "" if fused is True else found.obstacle
    return (None if reason else found), reason


# ---------------------------------------------------------------------------------------------- experts

# transformers runs the experts of every family by one contract: a decorated class (``use_experts_implementation``) says
# how its weights lie, and one of two functions for all families computes the sum. A module that either of them would
# run gets a forward that runs `dflash.ops.experts` for few rows. Routers, shared experts and all around them stay the
# family's own. So do experts that a loop of the family (``eager``) or other kernels run.
_IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
_ACTIVATIONS = {nn.SiLU: "silu", SiLUActivation: "silu", GELUTanh: "gelu_tanh"}
_LAYOUT = ("has_gate", "is_concatenated", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")


class ExpertsForm(NamedTuple):
    """The last arguments of `ops.experts` for a module."""

    gate: str
    alpha: float = 0.0
    limit: float = 0.0
    transposed: bool = False


def use_experts_op(copied: nn.Module) -> bool:
    """Give the modules of a copy whose experts our op can run a forward that does. Returns True if there are any.

    What they have as ``packed``, an `ExpertWeights`, is run for any number of rows.
    """
    found = [(module, form) for module in copied.modules() if (form := experts_form(module)) is not None]
    for module, form in found:
        if not hasattr(module, "packed"):
            module.packed = None
            give_forward(module, _experts_forward(type(module).forward, form))
    return bool(found)


def _experts_forward(own: Callable, form: ExpertsForm) -> Callable:
    """Return a forward that runs our op, or ``own`` where the op does not take the tensors."""

    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.run(hidden_states, top_k_index, top_k_weights)
        x, weights = hidden_states, (self.gate_up_proj, self.down_proj)
        is_typed = x.dtype == weights[0].dtype and top_k_weights.dtype in (x.dtype, torch.float32)
        is_taken = is_typed and top_k_index.dtype == torch.int64 and x.dtype in KERNEL_DTYPES.get(x.device.type, ())
        if not is_taken or x.dim() != 2 or x.shape[0] > _MAX_ROWS:
            return own(self, hidden_states, top_k_index, top_k_weights)
        biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.has_bias else (None, None)
        return ops.experts(x, top_k_index, top_k_weights, *weights, *biases, *form)

    return forward


def experts_layout(module: nn.Module) -> ExpertsForm | None:
    """Return how our op runs experts, by their gate and the layout of their weights; None for other modules."""
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if not hasattr(module, "gate_up_proj") or chosen not in _IMPLEMENTATIONS or not _is_plain_module(module):
        return None
    kind, layout = type(module), {name for name in _LAYOUT if getattr(module, name, False)}
    if (kind.__module__, kind.__name__) == ("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts"):
        form = ExpertsForm("clamped_silu", module.alpha, module.limit, True)
        return form if layout == {"has_gate", "is_transposed"} else None
    activation = getattr(module, "act_fn", None)
    gate = "silu" if activation is nn.functional.silu else _ACTIVATIONS.get(type(activation))
    if gate is None or layout != {"has_gate", "is_concatenated"} or kind._apply_gate is not moe._default_apply_gate:
        return None
    return ExpertsForm(gate)


def experts_form(module: nn.Module) -> ExpertsForm | None:
    """Return how our op runs a module; None for other modules, and for weights that the op does not take."""
    if (form := experts_layout(module)) is None:
        return None
    names = {"gate_up_proj", "down_proj"} | ({"gate_up_proj_bias", "down_proj_bias"} if module.has_bias else set())
    parameters, weights = dict(module.named_parameters()), (module.gate_up_proj, module.down_proj)
    if parameters.keys() != names or not _are_plain_tensors(parameters.values()):
        return None
    widths = [(weight.mT if form.transposed else weight).shape[2] for weight in weights]
    return None if kernel_obstacle(weights[0].device, weights, widths) else form  # the op's twin would copy weights
