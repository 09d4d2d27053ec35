"""The DFlash drafter: its config and its forward pass."""

from ..settings import MTP
from .config import DFlash2Config, DraftConfig
from .drafter import (
    CandidateSelector,
    Drafter,
    PairWeights,
    check_draft_weights,
    quantized_draft,
    scale_logits,
    windowed_draft,
)
from .mtp import MAX_MTP_ROWS, MtpHead
