"""The DFlash drafter: its config, its forward pass and its checkpoints."""

from .checkpoint import MASK_EMBEDDING_FILE, draft_folder, load_draft
from .config import (
    ROPE_TYPES,
    DraftConfig,
    Rope,
    build_target_layer_ids,
    check_dflash2,
    from_speculators,
    is_speculators,
)
from .drafter import (
    CandidateSelector,
    Drafter,
    GroupedConv,
    PairWeights,
    check_draft_weights,
    quantized_draft,
    scale_logits,
)
from .keys import FULL, SLIDING, DFlash2Config

__all__ = [
    "FULL", "MASK_EMBEDDING_FILE", "ROPE_TYPES", "SLIDING", "CandidateSelector", "DFlash2Config", "DraftConfig",
    "Drafter", "GroupedConv", "PairWeights", "Rope", "build_target_layer_ids", "check_dflash2", "check_draft_weights",
    "draft_folder", "from_speculators", "is_speculators", "load_draft", "quantized_draft", "scale_logits",
]  # fmt: skip
