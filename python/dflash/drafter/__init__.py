"""The DFlash drafter: its config, its forward pass and its checkpoints."""

from .checkpoint import MASK_EMBEDDING_FILE, find_draft, load_draft, read_draft_config
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
