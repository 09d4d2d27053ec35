"""The target: a structural copy of the user's model with our attention, our cache and taps."""

from .copies import structural_copy
from .fingerprint import (
    Fingerprint,
    KnownWeights,
    describe_config,
    machine_name,
    sample_digest,
    version_of,
    versions,
    weights_digest,
)
from .fused import experts_layout
from .int8 import check_int8, int8_obstacle, not_finite, store_int8_
from .model import (
    UnsupportedTargetError,
    config_values,
    embedding_table,
    find_layers,
    first_hook,
    generation_defaults,
    logit_scale,
    max_positions,
    modules_of_text,
    tap_,
    text_config,
    transformers_version,
    unwrap,
    weight_of,
)
from .packed import (
    CHOSEN_EXPERTS,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    count_weights,
    is_packed,
    weight_bytes_per_token,
)
from .parallel import ranks_in
from .recurrent import has_recurrent_layers
from .support import check_target, is_quantized, refusal, refusal_of_weights
from .target import Target
from .trial import forget_trials
