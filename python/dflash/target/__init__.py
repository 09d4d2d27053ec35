"""The target: a structural twin of the user's model with our attention, our cache and taps."""

from .fingerprint import WeightsFingerprint, describe_config, sample_digest
from .generation_config import generation_defaults, stop_string_criterion, transformers_version
from .support import (
    UnsupportedTargetError,
    check_target,
    find_layers,
    refusal,
    tapped_modules,
    text_config,
    unwrap,
)
from .target import Target
from .twin import first_hook, snapshot, structural_twin

structure = snapshot  # the old name


def decoder_layers(model, _num_layers: int):
    """Return :func:`find_layers` of the model: the old name."""
    return find_layers(model)


__all__ = [
    "Target",
    "UnsupportedTargetError",
    "WeightsFingerprint",
    "check_target",
    "describe_config",
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
