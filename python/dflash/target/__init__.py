"""The target: a structural twin of the user's model with our attention, our cache and taps."""

from .fused import FusedDecoder, FusedLayers, rotary_table
from .target import (
    TESTED_FAMILIES,
    Target,
    UnsupportedTargetError,
    WeightsFingerprint,
    decoder_layers,
    describe_config,
    first_hook,
    generation_defaults,
    refusal,
    sample_digest,
    stop_string_criterion,
    structural_twin,
    structure,
    text_config,
    transformers_version,
    unwrap,
)

__all__ = [
    "TESTED_FAMILIES",
    "FusedDecoder",
    "FusedLayers",
    "Target",
    "UnsupportedTargetError",
    "WeightsFingerprint",
    "decoder_layers",
    "describe_config",
    "first_hook",
    "generation_defaults",
    "refusal",
    "rotary_table",
    "sample_digest",
    "stop_string_criterion",
    "structural_twin",
    "structure",
    "text_config",
    "transformers_version",
    "unwrap",
]
