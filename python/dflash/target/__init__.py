"""The target: a structural twin of the user's model with our attention, our cache and taps."""

from .fingerprint import WeightsFingerprint, describe_config, sample_digest
from .fused import FusedDecoder, FusedLayers, rotary_table
from .generation_config import generation_defaults, stop_string_criterion, transformers_version
from .support import TESTED_FAMILIES, UnsupportedTargetError, decoder_layers, refusal, text_config
from .target import Target
from .twin import first_hook, structural_twin, structure, unwrap

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
