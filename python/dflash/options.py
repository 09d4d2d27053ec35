"""The options of a generator, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from .sampling import integer_from
from .target import embedding_table, ranks_in, text_config

__all__ = ["GeneratorOptions"]


@dataclass(frozen=True)
class GeneratorOptions:
    """The options of `Generator`, which documents them."""

    max_length: int
    batch_size: int = 1
    block_size: int | None = None
    denoise_steps: int = 1
    compile: bool = False
    graph: bool | Literal["auto"] = "auto"
    fused: bool | Literal["auto"] = "auto"
    prefill_chunk: int = 512
    reuse_prefix: bool = True

    def check(self, target: nn.Module) -> None:
        """Raise ValueError or TypeError for a value that is wrong, or that does not suit the target."""
        lowest = {"max_length": 2, "batch_size": 1, "denoise_steps": 1, "prefill_chunk": 1}
        for name, low in lowest.items():
            integer_from(low, name, getattr(self, name))
        positions = getattr(text_config(target), "max_position_embeddings", None)
        if positions is not None and self.max_length > positions:
            raise ValueError(f"max_length {self.max_length} is past the target's max_position_embeddings, {positions}")
        for name, value in (("graph", self.graph), ("fused", self.fused)):
            if value not in (True, False, "auto"):
                raise ValueError(f'{name} must be True, False or "auto", got {value!r}')
        for name in ("graph", "fused", "compile"):
            if getattr(self, name) is True and (count := ranks_in(target)) > 1:
                raise ValueError(f"{name}=True needs a target in one process, this one is spread over {count}")
        device = embedding_table(target).device
        if self.graph is True and device.type != "cuda":
            raise ValueError(f"graph=True needs a target on a GPU, this one is on {device}")
