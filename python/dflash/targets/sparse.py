"""The table of sparse families: targets whose rows see neither the whole past nor a window of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel

from . import deepseek_v4, deepseek_v32, glm5_next, qwen4_exp
from .copies import CacheView
from .recurrent import Pass


class SparseFamily(NamedTuple):
    """How a family runs on our cache. Its attention is that of `dflash.targets.masked_attention`.

    Attributes:
        recognize: returns True for a model of the family.
        layer_types: the names that its config may give to layers.
        mask_type: the layer type for which its model takes a mask; None if its modules make their own masks.
        window: the config's key for how many of the last positions rows see as they are; empty for all of them.
        bind_to_cache: gives modules of a copy forwards that use the cache of the pass; None if they run as they are.
        view: what the modules take for their cache.
        compile_obstacle: why steps cannot be compiled; empty if they can.
        tried: the first transformers version whose modules were tried. A trial of few tokens would not notice that
            earlier ones pool keys differently.
    """

    recognize: Callable[[PreTrainedModel], bool]
    layer_types: set[str]
    mask_type: str | None = None
    window: str = ""
    bind_to_cache: Callable[[nn.Module, Pass], None] | None = None
    view: type[CacheView] = CacheView
    compile_obstacle: str = ""
    tried: tuple[int, int] = (5, 24)


FAMILIES = (
    SparseFamily(
        deepseek_v4.recognize, {"sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"},
        "sliding_attention", "sliding_window", deepseek_v4.bind_to_cache,
    ),
    SparseFamily(
        glm5_next.recognize, {"indexed_attention", "linear_attention"}, bind_to_cache=glm5_next.bind_to_cache,
    ),
    SparseFamily(
        qwen4_exp.recognize, {"indexed_attention", "linear_attention"}, "indexed_attention", view=qwen4_exp.BlockView,
        compile_obstacle="the indexers of its model loop over rows in Python",
    ),
    # The last: the names that it looks for are also in indexers that do more.
    SparseFamily(
        deepseek_v32.recognize, {"indexed_attention"}, "indexed_attention", bind_to_cache=deepseek_v32.bind_to_cache,
        tried=(5, 15),
    ),
)  # fmt: skip


def sparse_family(model: PreTrainedModel) -> SparseFamily | None:
    """Return the sparse family that a model belongs to; None if its rows see all of the past or a window of it."""
    return next((family for family in FAMILIES if family.recognize(model)), None)
