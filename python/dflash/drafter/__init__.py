"""The DFlash drafter: its config, its forward pass and its checkpoints."""

from .checkpoint import draft_folder, load_draft
from .config import DraftConfig
from .dflash2 import CandidateSelector, DFlash2Config, GroupedConv, PairWeights, check_dflash2
from .drafter import Drafter, scale_logits
from .int8 import check_draft_weights, quantized_draft
from .layouts import from_speculators, is_speculators, to_speculators, vllm_causality
from .own_parts import MASK_EMBEDDING_FILE
from .reader import FULL, SLIDING, build_target_layer_ids
from .rope import ROPE_TYPES, Rope

__all__ = [
    "FULL",
    "MASK_EMBEDDING_FILE",
    "ROPE_TYPES",
    "SLIDING",
    "CandidateSelector",
    "DFlash2Config",
    "DraftConfig",
    "Drafter",
    "GroupedConv",
    "PairWeights",
    "Rope",
    "build_target_layer_ids",
    "check_dflash2",
    "check_draft_weights",
    "draft_folder",
    "from_speculators",
    "is_speculators",
    "load_draft",
    "quantized_draft",
    "scale_logits",
    "to_speculators",
    "vllm_causality",
]
