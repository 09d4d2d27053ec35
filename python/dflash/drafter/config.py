"""What a drafter's ``config.json`` says, read once and checked: :class:`DraftConfig`.

Checkpoints come from several trainers and several years of one trainer. Whatever changes the maths and is not built
here is refused by name; what does not is warned about at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .layouts import from_speculators, is_speculators
from .rope import Rope

__all__ = ["DraftConfig", "build_target_layer_ids"]

FULL, SLIDING = "full_attention", "sliding_attention"


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The tapped target layers of a drafter that does not name them: evenly spaced from layer 1 to the fourth last.

    One draft layer taps the middle one. Halves round to even, as Python does.

    Raises:
        ValueError: the target has too few layers for the rule.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    if num_target_layers < 4:
        raise ValueError(f"no target_layer_ids, and they follow from 4 target layers or more, got {num_target_layers}")
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


@dataclass(frozen=True)
class DraftConfig:
    """A drafter's shape and rules, as its checkpoint states them. Build one with :meth:`from_config`.

    Per-layer values are tuples of ``num_hidden_layers``: ``causal`` (inside the block and before it), ``window`` (keys
    that a query sees, itself counted; 0: all). ``vocab_size``, ``num_target_layers`` and ``max_position_embeddings``
    are None where the checkpoint does not say. ``final_logit_softcapping`` is 0 for none.
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
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    vocab_size: int | None = None
    num_target_layers: int | None = None
    max_position_embeddings: int | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | Any, source: str = "draft config") -> DraftConfig:
        """Read a parsed ``config.json``, or any object with ``to_dict()`` (a transformers config).

        The speculators layout is read too (:mod:`dflash.layouts`).

        Args:
            config: the mapping or the object.
            source: what messages call it.

        Raises:
            ValueError: a key is missing, has a value that cannot be, or asks for what is not implemented: it is named.

        Unknown top-level keys are listed in one warning; unknown keys of ``dflash_config`` are an error.
        """
        if not isinstance(config, Mapping):
            if not callable(getattr(config, "to_dict", None)):
                raise ValueError(f"{source}: must be a mapping or have to_dict(), got {type(config).__name__}")
            config = config.to_dict()
        if is_speculators(config):
            try:
                config = from_speculators(config)
            except ValueError as error:
                raise ValueError(f"{source}: {error}") from None
        from .reader import _Reader

        return _Reader(config, source).read()
