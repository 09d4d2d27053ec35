"""The target: a structural twin of the user's model with our attention, our cache and taps."""

from .fingerprint import WeightsFingerprint, describe_config, sample_digest
from .folder import check_target_folder, check_target_size
from .generation_config import generation_defaults, stop_string_criterion, transformers_version
from .support import (
    UnsupportedTargetError,
    check_target,
    embedding_table,
    find_layers,
    refusal,
    tapped_modules,
    text_config,
    unwrap,
)
from .target import Target
from .twin import first_hook, snapshot, structural_twin

__all__ = [
    "Target",
    "UnsupportedTargetError",
    "WeightsFingerprint",
    "check_target",
    "check_target_folder",
    "check_target_size",
    "describe_config",
    "embedding_table",
    "find_layers",
    "first_hook",
    "generation_defaults",
    "refusal",
    "sample_digest",
    "snapshot",
    "stop_string_criterion",
    "structural_twin",
    "tapped_modules",
    "text_config",
    "transformers_version",
    "unwrap",
]
