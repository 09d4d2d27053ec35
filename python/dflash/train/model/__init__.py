"""The drafter with gradients, and the target that it learns from."""

from .attention import visible_keys
from .dflash2 import add_dflash2, candidate_scores, convolve
from .new_drafter import choose_mask_id, draft_config, new_drafter
from .target_features import TargetFeatures
from .trainable import TrainableDrafter, check_trainable

__all__ = [
    "TargetFeatures",
    "TrainableDrafter",
    "add_dflash2",
    "candidate_scores",
    "check_trainable",
    "choose_mask_id",
    "convolve",
    "draft_config",
    "new_drafter",
    "visible_keys",
]
