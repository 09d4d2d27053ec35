"""A drafter's configuration, read and checked once.

Checkpoints come from several trainers and several years of one trainer. Anything that changes the math and is not
implemented is refused by name. Unknown metadata is at most warned about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..files import read_architectures
from ..terminal import printable
from .dflash2 import DFlash2Config
from .keys import expect_names
from .layouts import from_muse_assistant, from_speculators, is_muse_assistant, is_speculators
from .reader import read_fields
from .rope import Rope

__all__ = ["DraftConfig"]


class SupportsToDict(Protocol):
    """A config object, such as transformers' own."""

    def to_dict(self) -> dict[str, object]:
        """Return the content of ``config.json``."""


@dataclass(frozen=True)
class DraftConfig:
    """A drafter's shape and rules, as stated by its checkpoint. Build one with `from_config`.

    Attributes:
        block_size: rows that the target verifies, the anchor included.
        causal: per layer, True if a row of the block sees no later row.
        window: per layer, the keys that a query sees, itself included; 0 for all.
        final_logit_softcapping: 0 for none.
        scales_like_target: its logits take multiplier and softcap of the target's config.
        predicts_from_anchor: the anchor's row predicts too, so a pass has a row less than ``block_size``.
        markov_rank: columns of a DSpark drafter's Markov head; 0 for none.
        own_parts: the parts that its checkpoint stores, of ``embed_tokens``, ``lm_head`` and ``mask_embedding``. The
            others are the target's.
        draft_vocab_size: rows of its own head if that knows a part of the vocabulary only, else None.
        vocab_size, num_target_layers, max_position_embeddings: None if the checkpoint does not say.
        dflash2: convolutions and a candidate selector; None for a drafter of the first generation.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    causal: tuple[bool, ...]
    window: tuple[int, ...]
    rope: Rope = field(default_factory=Rope)
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_sinks: bool = False
    attention_value_scale: float = 1.0
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    vocab_size: int | None = None
    num_target_layers: int | None = None
    max_position_embeddings: int | None = None
    dflash2: DFlash2Config | None = None
    predicts_from_anchor: bool = False
    markov_rank: int = 0
    own_parts: tuple[str, ...] = ()
    draft_vocab_size: int | None = None
    scales_like_target: bool = False

    @property
    def rows_per_pass(self) -> int:
        """Rows of the drafter's pass over a whole block, which is the block size that checkpoints state."""
        return self.block_size - self.predicts_from_anchor

    @classmethod
    def from_config(cls, config: Mapping[str, object] | SupportsToDict, source: str = "draft config") -> DraftConfig:
        """Read a parsed ``config.json``, in any of the layouts that `dflash.drafter.layouts` lists.

        Unknown top-level keys are listed in one warning. Unknown keys of ``dflash_config`` are an error.

        Args:
            config: a mapping, or an object with ``to_dict()`` such as a transformers config.
            source: what error messages call it.

        Raises:
            ValueError: a key is missing, has an impossible value, or asks for something not implemented.
        """
        if not isinstance(config, Mapping):
            if not callable(getattr(config, "to_dict", None)):
                raise ValueError(f"{source}: must be a mapping or have to_dict(), got {type(config).__name__}")
            config = config.to_dict()
        expect_names(config, source)
        read_architectures(config, source)
        if is_speculators(config):
            try:
                config = from_speculators(config)
            except ValueError as error:
                raise ValueError(printable(f"{source}: {error}")) from None
        muse = is_muse_assistant(config)
        return cls(**read_fields(from_muse_assistant(config) if muse else config, source), scales_like_target=muse)
