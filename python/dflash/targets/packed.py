"""Linear layers whose weights stay in the blocks of the file that they came from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..decoder import product
from ..ops import PackedWeight
from .model import weight_of


class PackedLinear(nn.Module):
    """A linear layer on CPU that multiplies by a weight as a file has it: ``x @ weight.T + bias``.

    Rows of ``x`` are rounded to 8 bits, 32 elements by one scale, so that a row's bits depend on the row alone.

    Args:
        weight: ``[out, in]``, in a format with blocks.
        bias: ``[out]`` or None.
        order: ``[in]`` int64, the element of ``x`` that each column of the weight multiplies; None for its own.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None, order: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.format = weight.format
        self.register_buffer("blocks", weight.packed)
        self.register_buffer("order", order)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    packed: PackedWeight | None = None  # what it multiplies by instead of its own weight, once it is set

    @property
    def weight(self) -> PackedWeight:
        """The weight as the file has it."""
        return PackedWeight(self.blocks, None, self.format, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return product(x if self.order is None else x[..., self.order], weight_of(self), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, format={self.format}"


class ExpertsForm(NamedTuple):
    """How experts gate and lie in memory: arguments of `ops.experts`."""

    gate: str
    alpha: float = 0.0
    limit: float = 0.0
    transposed: bool = False


SILU = ExpertsForm("silu")


class PackedExperts(nn.Module):
    """The experts of a mixture on CPU, each as the file has it.

    Args:
        gate_up: ``[experts, 2 * width, hidden]``, of each expert the gate, then what it gates.
        down: ``[experts, hidden, width]``. Both are in formats with blocks.
        gate_up_bias: ``[experts, 2 * width]`` or None; ``down_bias [experts, hidden]`` too.
        form: how they gate.
    """

    def __init__(
        self, gate_up: PackedWeight, down: PackedWeight, gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None, form: ExpertsForm = SILU,
    ) -> None:  # fmt: skip
        super().__init__()
        self.format, self.down_format = gate_up.format, down.format
        self.form = form._replace(transposed=False)
        self.register_buffer("gate_up", gate_up.packed)
        self.register_buffer("down", down.packed)
        self.register_buffer("gate_up_bias", gate_up_bias)
        self.register_buffer("down_bias", down_bias)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        weights, biases = (self.gate_up, self.down), (self.gate_up_bias, self.down_bias)
        return ops.experts(
            hidden_states, top_k_index, top_k_weights, *weights, *biases, *self.form, None, None, self.format,
            self.down_format,
        )  # fmt: skip


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


def packed_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of the weights that a step reads, by format; empty if none are packed."""
    found: dict[int, tuple[str, int]] = {}
    for module in model.modules():
        if type(module) is PackedLinear:
            found[id(module.blocks)] = module.format, module.blocks.numel()
        elif type(module) is PackedExperts:
            found[id(module.gate_up)] = module.format, module.gate_up.numel()
            found[id(module.down)] = module.down_format, module.down.numel()
    sizes: dict[str, int] = {}
    for name, size in found.values():
        sizes[name] = sizes.get(name, 0) + size
    return sizes
