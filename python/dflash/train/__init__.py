"""Training a drafter for any target: ``dflash train``, or `Trainer` from Python."""

from .checkpoint import CheckpointError, published_config, save_draft
from .config import TrainConfig
from .data.blocks import Blocks, default_gamma, make_blocks, sample_anchors
from .loop import Trainer
from .loss import BlockLoss, block_loss
from .model import (
    TargetFeatures,
    TrainableDrafter,
    add_dflash2,
    check_trainable,
    choose_mask_id,
    draft_config,
    new_drafter,
)

__all__ = [
    "BlockLoss",
    "Blocks",
    "CheckpointError",
    "TargetFeatures",
    "TrainConfig",
    "TrainableDrafter",
    "Trainer",
    "add_dflash2",
    "block_loss",
    "check_trainable",
    "choose_mask_id",
    "default_gamma",
    "draft_config",
    "make_blocks",
    "new_drafter",
    "published_config",
    "sample_anchors",
    "save_draft",
]
