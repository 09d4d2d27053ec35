"""Modules whose weights are packed: in the blocks of the file that they came from, in groups or in 8 bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..decoder import product
from ..ops import FORMATS, PackedWeight
from .model import config_values, modules_of, modules_of_text, text_config, weight_of


class PackedLinear(nn.Module):
    """A linear layer that multiplies by a packed weight: ``x @ weight.T + bias``.

    On CPUs rows of ``x`` are rounded to 8 bits, 32 or 64 elements by one scale, so that a row's bits depend on the row
    alone. On GPUs they are not rounded.

    Args:
        weight: ``[out, in]``.
        bias: ``[out]`` or None.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.format = weight.format
        self.register_buffer("blocks", weight.packed)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("order", weight.order)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    packed: PackedWeight | None = None  # what it multiplies by instead of its own weight, once it is set

    @property
    def weight(self) -> PackedWeight:
        """The weight ``[out, in]``."""
        return PackedWeight(self.blocks, self.scales, self.format, self.in_features, self.order)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, weight_of(self), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


class ExpertWeights(NamedTuple):
    """The packed weights of a mixture's experts, and how they are gated; fields are as in `ops.experts`."""

    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0

    def run(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts ``[rows, hidden]``."""
        up, down, *biases_and_gate = self
        return ops.experts(
            x, ids, scores.float(), up.packed, down.packed, *biases_and_gate, False, up.scales, down.scales, up.format,
            down.format,
        )  # fmt: skip


class PackedExperts(nn.Module):
    """The experts of a mixture, in packed weights."""

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        self.form = weights.gate, weights.alpha, weights.limit
        self.sizes = [(weight.format, weight.columns) for weight in (weights.gate_up, weights.down)]
        self.format = weights.gate_up.format
        self.register_buffer("gate_up", weights.gate_up.packed)
        self.register_buffer("down", weights.down.packed)
        self.register_buffer("gate_up_scales", weights.gate_up.scales)
        self.register_buffer("down_scales", weights.down.scales)
        self.register_buffer("gate_up_bias", weights.gate_up_bias)
        self.register_buffer("down_bias", weights.down_bias)

    @property
    def weights(self) -> ExpertWeights:
        """What they multiply by."""
        stored = (self.gate_up, self.gate_up_scales), (self.down, self.down_scales)
        both = (PackedWeight(*tensors, *size) for tensors, size in zip(stored, self.sizes, strict=True))
        return ExpertWeights(*both, self.gate_up_bias, self.down_bias, *self.form)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.weights.run(hidden_states, top_k_index, top_k_weights)


class PackedEmbedding(nn.Module):
    """Embeddings on CPU whose table stays as a file has it, perhaps the tiles that a tied head multiplies by.

    Args:
        weight: ``[vocab, hidden]``, in a format with blocks.
        dtype: of the embeddings.
        scale: of a family that scales them, in `forward`; indexing gives the table's own values.

    Attributes:
        weight: ``[vocab, hidden]``, a tensor without memory that has the table's shape, dtype and device; all NaN.
    """

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, scale: Tensor | None = None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.shape
        self.format = weight.format
        self.register_buffer("blocks", weight.packed)
        self.register_buffer("like", torch.full((), torch.nan, dtype=dtype), persistent=False)
        if scale is not None:
            self.register_buffer("embed_scale", scale, persistent=False)

    max_norm = None  # as nn.Embedding

    @property
    def packed(self) -> PackedWeight:
        return PackedWeight(self.blocks, None, self.format, self.embedding_dim)

    @property
    def weight(self) -> Tensor:
        return self.like.expand(self.shape)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.num_embeddings, self.embedding_dim))

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Return what ``table[ids]`` does for a table that is a tensor."""
        return ops.unpack_rows(self.blocks, ids, self.embedding_dim, self.format).to(self.like.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        scale = getattr(self, "embed_scale", None)
        return self[ids] if scale is None else self[ids] * scale.to(self.like.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, format={self.format}"


CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
"""Keys of configs for the experts of a mixture that a token chooses."""


def is_packed(model: nn.Module) -> bool:
    """Return True if a model has packed weights."""
    return any(type(module) in (PackedLinear, PackedExperts) for module in modules_of(model))


def count_weights(model: nn.Module) -> tuple[int, int]:
    """Return how many weights a model has, and their bytes; tied ones count once, packed ones as they are stored."""
    found: dict[int, tuple[int, int]] = {}
    for module in model.modules():
        packed: tuple[PackedWeight, ...] = ()
        if type(module) is PackedExperts:
            packed = module.weights[:2]
        elif type(module) in (PackedLinear, PackedEmbedding):
            packed = (module.weight if type(module) is PackedLinear else module.packed,)
        for weight in packed:
            scales = 0 if weight.scales is None else weight.scales.nbytes
            found[weight.packed.data_ptr()] = weight.shape.numel(), weight.packed.nbytes + scales
        for parameter in module._parameters.values():
            if parameter is not None:
                found[parameter.data_ptr()] = parameter.numel(), parameter.nbytes
    counts, sizes = zip(*found.values(), strict=True)
    return sum(counts), sum(sizes)


def weight_bytes_per_token(model: nn.Module) -> dict[str, float]:
    """Return the bytes of weights that a step of one row reads, by format.

    Of a mixture of experts these are the chosen ones. Embeddings count if a dense head is tied to them.
    """
    sizes: dict[str, float] = {}
    counts = (count for key in CHOSEN_EXPERTS for count in config_values(text_config(model), key))
    chosen = next((count for count in counts if isinstance(count, int)), None)
    for _, module in modules_of_text(model):
        if isinstance(module, (nn.Embedding, PackedEmbedding)):
            continue
        is_mixture = chosen is not None and (type(module) is PackedExperts or hasattr(module, "gate_up_proj"))
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or tensor.dim() < 2:
                continue
            format = str(tensor.dtype).removeprefix("torch.")
            if tensor.dtype == torch.uint8:
                format = module.sizes[name == "down"][0] if type(module) is PackedExperts else module.format
                format = FORMATS[format].storage or format.upper()
            share = chosen / len(tensor) if is_mixture else 1.0
            sizes[format] = sizes.get(format, 0) + share * tensor.nbytes
    return sizes
