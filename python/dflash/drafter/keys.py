"""The keys of a drafter's ``config.json``: which are read, refused or ignored, and checked access to their values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import limits
from ..terminal import listed, printable, shortened

__all__ = [
    "DFLASH2_KEYS",
    "DSPARK_ARCHITECTURE",
    "REFUSED",
    "Keys",
    "expect_names",
    "is_dflash2",
    "refuse_unsupported",
    "warn_about_unknown",
]

# fmt: off
# Keys of dflash_config that are read. Any other is an error, since it may change the math.
DFLASH_KEYS = frozenset((
    "attention_sink_bias", "attention_value_scale", "block_size", "causal", "final_logit_softcapping",
    "input_embedding_scale", "markov_head_type", "markov_rank", "mask_token", "mask_token_id", "num_target_layers",
    "output_multiplier", "projector_type", "sample_from_anchor", "swa_window_size", "target_layer_ids",
    "use_aux_hidden_state", "use_swa",
))
# Names of the model class in a plain drafter's config: the reference package's, and NeMo AutoModel's.
ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")
# Keys that only DFlash 2 drafters have.
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DFLASH2_ARCHITECTURES = frozenset(("DFlash2DraftModel", "Qwen3DFlash2DraftModel"))
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"

# Top-level keys that are read.
READ_KEYS = frozenset((
    "add_swa_attention_sink_bias", "architectures", "attention_bias", "attention_sink_bias", "attention_value_scale",
    "block_size",
    "dflash_config", "draft_vocab_size", "final_logit_softcapping", "has_embed_tokens", "has_lm_head", "head_dim",
    "hidden_act", "hidden_size",
    "input_embedding_scale", "intermediate_size", "is_causal", "layer_types", "markov_head_type", "markov_rank",
    "mask_embedding", "mask_token_id",
    "max_position_embeddings", "max_window_layers", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "num_target_layers", "original_max_position_embeddings", "output_multiplier",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sample_from_anchor", "sliding_window",
    "target_hidden_size",
    "target_layer_ids", "use_sliding_window", "vocab_size",
))
# Top-level keys that do not affect the forward pass: transformers' own settings and notes on training.
METADATA_KEYS = frozenset((
    "add_cross_attention", "attention_dropout", "auto_map", "aux_hidden_state_layer_ids", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "confidence_head_with_markov",
    "cross_attention_hidden_size",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "eagle_aux_hidden_state_layer_ids",
    "early_stopping", "enable_confidence_head",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "label2id", "length_penalty", "mask_token", "max_length", "min_length",
    "no_repeat_ngram_size", "num_anchors", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
))
# fmt: on


class Refusal(NamedTuple):
    """Why a key is refused, and the values that change nothing and pass."""

    neutral: tuple
    reason: str


_QUANTIZED = "quantized drafters cannot be loaded"
_HALF_SPLIT = "only half-split RoPE is implemented"

# Keys that change the math, at either level.
REFUSED: dict[str, Refusal] = {
    "quantization_config": Refusal((None,), _QUANTIZED),
    "compression_config": Refusal((None,), _QUANTIZED),
    "speculators_config": Refusal((None,), "this is half of the speculators layout: speculators_model_type is missing"),
    "partial_rotary_factor": Refusal((None, 1.0), "RoPE over part of the head is not implemented"),
    "is_neox_style": Refusal((None, True), _HALF_SPLIT),
    "rope_is_neox_style": Refusal((None, True), _HALF_SPLIT),
    "add_full_attention_sink_bias": Refusal((None, False), "sinks in full-attention layers only are not implemented"),
    "logit_scale": Refusal((None, 1.0), "use output_multiplier"),
    "mlp_bias": Refusal((None, False), "MLP biases are not implemented"),
    "use_aux_hidden_state": Refusal((None, True), "a DFlash drafter reads the target's hidden states"),
    "projector_type": Refusal((None, "dflash"), "only the plain DFlash head is implemented"),
}


# What the keys that are read must be, at either level and whether or not the rest of the config uses them.
INTEGERS: dict[str, tuple[int, int]] = {  # the smallest and the largest value
    "block_size": (1, limits.MAX_BLOCK_SIZE),
    "conv_group_size": (0, limits.MAX_WIDTH),  # 0 only in drafters of the first generation
    "conv_kernel_size": (0, limits.MAX_BLOCK_SIZE),
    "draft_vocab_size": (1, limits.MAX_VOCABULARY),
    "head_dim": (1, limits.MAX_HEAD_DIM),
    "hidden_size": (1, limits.MAX_WIDTH),
    "intermediate_size": (1, limits.MAX_WIDTH),
    "markov_rank": (0, limits.MAX_WIDTH),
    "mask_token_id": (0, limits.MAX_VOCABULARY),
    "max_position_embeddings": (1, limits.MAX_POSITIONS),
    "max_window_layers": (0, limits.MAX_TARGET_LAYERS),
    "num_attention_heads": (1, limits.MAX_HEADS),
    "num_hidden_layers": (1, limits.MAX_DRAFT_LAYERS),
    "num_key_value_heads": (1, limits.MAX_HEADS),
    "num_target_layers": (1, limits.MAX_TARGET_LAYERS),
    "original_max_position_embeddings": (1, limits.MAX_POSITIONS),
    "selector_rank": (0, limits.MAX_WIDTH),
    "selector_top_k": (0, limits.MAX_VOCABULARY),
    "sliding_window": (0, limits.MAX_POSITIONS),  # 0 only where no layer has a window
    "swa_window_size": (0, limits.MAX_POSITIONS),
    "target_hidden_size": (1, limits.MAX_WIDTH),
    "vocab_size": (1, limits.MAX_VOCABULARY),
}
NUMBERS: dict[str, bool] = {  # True if it must be above 0
    "attention_value_scale": True,
    "final_logit_softcapping": False,
    "input_embedding_scale": True,
    "output_multiplier": True,
    "rms_norm_eps": True,
    "rope_theta": True,
}
BOOLEANS = (
    *("add_swa_attention_sink_bias", "attention_bias", "attention_sink_bias", "causal", "is_causal"),
    *("has_embed_tokens", "has_lm_head", "mask_embedding", "sample_from_anchor", "use_sliding_window", "use_swa"),
)


class Keys:
    """Checked access to a config's keys, at the top level and inside ``dflash_config``. Every error names its source.

    Args:
        config: the parsed ``config.json``.
        source: what error messages call it.

    Raises:
        ValueError: a key of `INTEGERS`, `NUMBERS` or `BOOLEANS` has a value of another type or out of its range.
    """

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.top, self.source = config, source
        dflash = config.get("dflash_config")
        if dflash is not None and not isinstance(dflash, Mapping):
            raise self.error(f"dflash_config must be an object, got {shortened(dflash)}")
        self.dflash: Mapping[str, Any] = dflash or {}
        for level in (self.top, self.dflash):
            expect_names(level, source)
            for key, value in level.items():
                self._check(key, value)

    def _check(self, key: str, value: Any) -> None:
        if value is None:
            return
        if key in INTEGERS:
            self.integer(key, value, *INTEGERS[key])
        elif key in NUMBERS:
            self.number(key, value, positive=NUMBERS[key])
        elif key in BOOLEANS:
            self.boolean(key, value)
        elif key == "target_layer_ids":
            self._layer_ids(key, value)

    def _layer_ids(self, key: str, value: Any) -> None:
        if not isinstance(value, (list, tuple)) or not value:
            raise self.error(f"{key} must be a list of one or more layers, got {shortened(value)}")
        if len(value) > limits.MAX_TAPS:
            raise self.error(f"{key} must name at most {limits.MAX_TAPS} layers, got {len(value)}")
        for layer in value:
            self.integer(key, layer, 0, limits.MAX_TARGET_LAYERS)

    def error(self, message: str) -> ValueError:
        """Return an error that starts with the source."""
        return ValueError(printable(f"{self.source}: {message}"))

    def value(self, key: str, default: Any = None) -> Any:
        """Return ``dflash_config[key]``, else the top-level value. Null counts as missing."""
        for level in (self.dflash, self.top):
            if level.get(key) is not None:
                return level[key]
        return default

    def integer(self, key: str, value: Any, minimum: int, maximum: int | None = None) -> int:
        """Return ``value`` if it is an integer from ``minimum`` to ``maximum``."""
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"{key} must be an integer >= {minimum}, got {shortened(value)}")
        if maximum is not None and value > maximum:
            raise self.error(f"{key} must be at most {maximum}, got {shortened(value)}")
        return value

    def required_integer(self, key: str) -> int:
        """Return a top-level integer that must be there."""
        if self.top.get(key) is None:
            raise self.error(f"{key} is missing")
        return self.top[key]

    def number(self, key: str, value: Any, *, positive: bool = True) -> float:
        """Return ``value`` as a float if it is a finite number, above 0 unless ``positive`` is False."""
        # Compared, because math.isfinite cannot take an integer beyond the floats.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
            raise self.error(f"{key} must be a finite number, got {shortened(value)}")
        if positive and value <= 0:
            raise self.error(f"{key} must be > 0, got {shortened(value)}")
        if abs(value) > limits.MAX_NUMBER or (positive and value < 1 / limits.MAX_NUMBER):
            low = 1 / limits.MAX_NUMBER if positive else -limits.MAX_NUMBER
            raise self.error(f"{key} must be from {low:g} to {limits.MAX_NUMBER:g}, got {shortened(value)}")
        return float(value)

    def boolean(self, key: str, value: Any) -> bool:
        """Return ``value`` if it is true or false."""
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {shortened(value)}")
        return value


def expect_names(config: Mapping[Any, Any], source: str) -> None:
    """Raise unless every key of an object is a string."""
    if others := [key for key in config if not isinstance(key, str)]:
        raise ValueError(f"{printable(source)}: keys must be strings, got {shortened(others[0])}")


def is_dflash2(keys: Keys) -> bool:
    """Return True if this is the config of a DFlash 2 drafter, by its architecture or by keys that only those have."""
    architectures = keys.top.get("architectures") or []
    return not DFLASH2_ARCHITECTURES.isdisjoint(architectures) or any(keys.value(key) for key in DFLASH2_KEYS)


def refuse_unsupported(keys: Keys) -> None:
    """Raise unless this is a DFlash drafter that asks only for math implemented here."""
    architectures = keys.top.get("architectures") or []
    if unknown := sorted(set(keys.dflash) - DFLASH_KEYS - set(DFLASH2_KEYS)):
        raise keys.error(f"unknown keys in dflash_config: {listed(unknown)}")
    for key, (neutral, reason) in REFUSED.items():
        for level in (keys.dflash, keys.top):
            if level.get(key) not in neutral:
                raise keys.error(f"{key} = {shortened(level[key])} is not supported: {reason}")
    known = DFLASH2_ARCHITECTURES.union(ARCHITECTURES, (DSPARK_ARCHITECTURE,))
    if architectures and known.isdisjoint(architectures):
        names = f"DFlashDraftModel, DFlash2DraftModel or {DSPARK_ARCHITECTURE}"
        raise keys.error(f"architectures must name {names}, got {listed(architectures)}")
    model_type, activation = keys.top.get("model_type"), keys.top.get("hidden_act")
    if model_type not in (None, "", "qwen3"):
        raise keys.error(f"model_type must be qwen3, the shape of every DFlash drafter, got {shortened(model_type)}")
    if activation not in (None, "silu"):
        raise keys.error(f"hidden_act must be silu, got {shortened(activation)}")


def warn_about_unknown(keys: Keys) -> None:
    """List unknown top-level keys in one warning, on behalf of the caller of ``DraftConfig.from_config``."""
    known = READ_KEYS | METADATA_KEYS | set(REFUSED) | set(DFLASH2_KEYS)
    unknown = sorted(key for key in keys.top if key not in known and not key.startswith("_"))
    if unknown:
        message = f"{printable(keys.source)}: unknown keys are ignored: {listed(unknown)}"
        warnings.warn(message, UserWarning, stacklevel=4)
