"""The DFlash drafter: its config, its forward pass and its checkpoints."""

from .checkpoint import MASK_EMBEDDING_FILE, draft_folder, load_draft
from .config import (
    FULL,
    ROPE_TYPES,
    SLIDING,
    DFlash2Config,
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
