"""Training a drafter for any target: ``dflash train``, or `Trainer` from Python."""

from ..config import TrainConfig
from .checkpoint import CheckpointError, save_draft
from .export import published_config
from .features import TargetFeatures
from .model import add_dflash2, adopt_head_, adopt_layers_, choose_mask_id, draft_config, new_drafter
from .trainer import Trainer
