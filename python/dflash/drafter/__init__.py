"""The DFlash drafter: its config, its forward pass and its checkpoints."""

from .checkpoint import MASK_EMBEDDING_FILE, draft_folder, load_draft
from .config import DFlash2Config, DraftConfig
from .drafter import (
    CandidateSelector,
    Drafter,
    GroupedConv,
    PairWeights,
    check_draft_weights,
    quantized_draft,
    scale_logits,
)
