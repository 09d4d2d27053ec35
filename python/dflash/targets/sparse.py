"""The table of sparse families: targets whose rows see neither the whole past nor a window of it."""

from __future__ import annotations

import types
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from . import deepseek_v4, deepseek_v32, glm5_next, qwen4_exp
from .copies import CacheView
from .model import modules_of
from .recurrent import Pass, forward_names, give_forward


class SparseFamily(NamedTuple):
    """How a family runs on our cache. Its attention is that of `dflash.targets.masked_attention`.

    Attributes:
        names: what the forward of one kind of its modules uses, and of no other family's.
        layer_types: the names that its config may give to layers.
        mask_type: the layer type for which its model takes a mask; None if its modules make their own masks.
        window: the config's key for how many of the last positions rows see as they are; empty for all of them.
        forward: what these modules of a copy run on the cache of the pass; None for their own.
        view: what the modules take for their cache.
        compile_obstacle: why steps cannot be compiled; empty if they can.
        tried: the first transformers version whose modules were tried. A trial of few tokens would not notice that
            earlier ones pool keys differently.
        decoder_names: what the forward of its decoder uses, too.
    """

    names: set[str]
    layer_types: set[str]
    mask_type: str | None = None
    window: str = ""
    forward: types.FunctionType | None = None
    view: type[CacheView] = CacheView
    compile_obstacle: str = ""
    tried: tuple[int, int] = (5, 24)
    decoder_names: frozenset[str] = frozenset()

    def recognizes(self, model: PreTrainedModel) -> bool:
        """Return True for a model of the family."""
        is_its = any(self.names <= forward_names(kind) for kind in set(map(type, modules_of(model))))
        return is_its and self.decoder_names <= forward_names(type(model.get_decoder()))

    def bind_to_cache(self, copied: nn.Module, running: Pass) -> None:
        """Give modules of a copy `forward`, which finds the pass as ``running_pass``."""
        for module in [module for module in copied.modules() if self.names <= forward_names(type(module))]:
            module.running_pass = running
            give_forward(module, self.forward)


FAMILIES = (
    SparseFamily(
        {"store_compression_weights", "update_compressor_states"},
        {"sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"},
        "sliding_attention", "sliding_window", deepseek_v4.entries_and_mask,
    ),
    SparseFamily(
        {"get_pooled_states", "get_visible_tokens"}, {"indexed_attention", "linear_attention"},
        forward=glm5_next.select,
    ),
    SparseFamily(
        {"update_indexer", "block_topk"}, {"indexed_attention", "linear_attention"}, "indexed_attention",
        view=qwen4_exp.BlockView, compile_obstacle="the indexers of its model loop over rows in Python",
    ),
    # The last: the names that it looks for are also in indexers that do more. Earlier decoders hand no mask on.
    SparseFamily(
        {"update_indexer", "topk"}, {"indexed_attention"}, "indexed_attention", forward=deepseek_v32.select,
        tried=(5, 15), decoder_names=frozenset({"indexed_attention"}),
    ),
)  # fmt: skip


def sparse_family(model: PreTrainedModel) -> SparseFamily | None:
    """Return the sparse family that a model belongs to; None if its rows see all of the past or a window of it."""
    return next((family for family in FAMILIES if family.recognizes(model)), None)
