"""The DFlash drafter: its config, its forward pass and its checkpoints."""

from .config import FULL, ROPE_TYPES, SLIDING, DraftConfig, Rope, build_target_layer_ids
from .drafter import Drafter, draft_folder, load_draft
from .layouts import from_speculators, is_speculators, to_speculators

__all__ = [
    "FULL",
    "ROPE_TYPES",
    "SLIDING",
    "DraftConfig",
    "Drafter",
    "Rope",
    "build_target_layer_ids",
    "draft_folder",
    "from_speculators",
    "is_speculators",
    "load_draft",
    "to_speculators",
]
