"""Run the layers of plain pre-norm models on `dflash.ops` instead of their modules, on the same parameters.

A model is recognized by its exact classes, module by module, and by the functions that they would run (see
`dflash.targets.functions`). A subclass, an adapter, a quantized layer, a hook or a replaced function changes what a
model computes, so such a model keeps its own forward. So does every family that is not listed here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import ops
from ..cache import KVCache
from ..decoder import DecoderStack, rotary_table
from ..ops import Int8Weight, NotFiniteError, int8_layer, split_weights
from ..state import Tree
from .fingerprint import ValuesFingerprint
from .int8 import not_finite
from .recognizer import layers_of, recognizer_of
from .support import UnsupportedTargetError
from .weights import kernel_obstacle

__all__ = ["FusedTarget", "recognize"]

_MAX_CUDA_ROWS = 256  # of one pass: a block for each row of a batch, but not a chunk of a long prompt


def recognize(model: nn.Module, target_layer_ids: tuple[int, ...]) -> FusedTarget | None:
    """Return the fused form of a model, or None if the model must keep its own forward."""
    recognizer = recognizer_of(model)
    if recognizer is None or len(set(target_layer_ids)) < len(target_layer_ids) or not recognizer.accepts(model):
        return None
    return FusedTarget(model, target_layer_ids)


class FusedTarget:
    """Embedding, decoder stack and head of a recognized model.

    Args:
        model: a twin of the user's model. Its parameters are used where they are.
        target_layer_ids: the tapped layers.

    Attributes:
        is_int8: True if products multiply by copies of the weights in 8 bits, see `store_as_int8`.
    """

    def __init__(self, model: nn.Module, target_layer_ids: tuple[int, ...]) -> None:
        recognizer = recognizer_of(model)
        decoder = recognizer.decoder(model)
        self.embedding, self.head = decoder.embed_tokens.weight, model.get_output_embeddings()
        self._model, self.is_int8 = model, False
        self._int8_head: Int8Weight | None = None
        self._quantized_values = ValuesFingerprint()
        layers = layers_of(decoder)
        attention = next(layer.self_attn for layer in layers if hasattr(layer, "self_attn"))
        self.num_kv_heads, self.head_dim = attention.k_proj.weight.shape[0] // attention.head_dim, attention.head_dim
        self.stack = DecoderStack(
            [recognizer.layer(layer) for layer in layers],
            decoder.norm.weight,
            eps=recognizer.eps(decoder.norm),
            scale=float(attention.scaling),
            taps=target_layer_ids,
            zero_centered=recognizer.zero_centered,
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
