"""The keys of a drafter's ``config.json``: one row per key, with its place and default in each layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..terminal import shortened

FULL, SLIDING = "full_attention", "sliding_attention"
TOP, SECTION, BOTH = "top", "dflash_config", "both"
LAYER = "transformer_layer_config"
REQUIRED = object()  # the default of a key that must be there
MAX_LAYERS, MAX_TARGET_LAYERS, MAX_WIDTH = 2**8, 2**10, 2**20  # what a config asks for is allocated
_LARGEST = 1e300

Check = Callable[[str, Any], None]  # of a key's value; raises ValueError


def integer(least: int, most: int = 2**31 - 1) -> Check:
    """Return a check for an integer from ``least`` to ``most``."""

    def check(key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{key} must be an integer >= {least}, got {shortened(value)}")
        if value > most:
            raise ValueError(f"{key} must be at most {most}, got {shortened(value)}")

    return check


def number(*, positive: bool = True) -> Check:
    """Return a check for a finite number, above 0 unless ``positive`` is False."""

    def check(key: str, value: Any) -> None:
        # Compared, because math.isfinite cannot take an integer beyond the floats.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_LARGEST < value < _LARGEST:
            raise ValueError(f"{key} must be a finite number, got {shortened(value)}")
        if positive and value <= 0:
            raise ValueError(f"{key} must be > 0, got {shortened(value)}")

    return check


def anything(key: str, value: Any) -> None:
    """Accept a value that is checked together with others."""


def boolean(key: str, value: Any) -> None:
    """Raise ValueError unless the value is true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {shortened(value)}")


def layers_from(least: int) -> Check:
    """Return a check for a list of the target's layers, which are counted from ``least``."""

    def check(key: str, value: Any) -> None:
        if not isinstance(value, (list, tuple)) or not 0 < len(value) <= MAX_TARGET_LAYERS:
            raise ValueError(f"{key} must be a list of one or more layers, got {shortened(value)}")
        for layer in value:
            integer(least, MAX_TARGET_LAYERS)(key, layer)

    return check


def unsupported(reason: str, *neutral: Any) -> Check:
    """Return a check that refuses every value that would change the math."""

    def check(key: str, value: Any) -> None:
        if value not in neutral:
            raise ValueError(f"{key} = {shortened(value)} is not supported: {reason}")

    return check


@dataclass(frozen=True)
class DFlash2Config:
    """The shape of what DFlash 2 adds to a drafter. The defaults are those of published drafters.

    Attributes:
        conv_kernel_size: rows that a convolution reads, its own included.
        conv_group_size: channels that share the part of a kernel that depends on the row.
        selector_rank: columns of the codebooks.
        selector_top_k: candidates per position.
    """

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        place: where the published layout has it: at the top, in ``dflash_config`` (where unknown keys are an error,
            since they may change the math), or in both, where ``dflash_config`` counts.
        check: what a value must be, and why others are refused.
        default: in the published layout; None if there is none, or if it follows from other keys.
        speculators: where the speculators layout has it: at the top, in ``transformer_layer_config``, or None.
        qwen3: its default in a ``transformer_layer_config``, which is that of a Qwen3 config.
        muse: its default in transformers' MuseGlimmerAssistantConfig.
    """

    place: str
    check: Check = anything
    default: Any = None
    speculators: str | None = None
    qwen3: Any = None
    muse: Any = None


_QUANTIZED, _HALF_SPLIT = "quantized drafters cannot be loaded", "only half-split RoPE is implemented"
_HALF_A_LAYOUT = "this is half of the speculators layout: speculators_model_type is missing"
_MUSE_ROPE = {"rope_type": "default", "rope_theta": 500000.0}
# fmt: off
KEYS: dict[str, Key] = {
    # the class
    "architectures": Key(TOP),
    "model_type": Key(TOP, unsupported("a DFlash drafter has the shape of qwen3", "qwen3", ""), speculators=LAYER),
    "hidden_act": Key(TOP, unsupported("only silu is implemented", "silu"), speculators=LAYER),
    # shapes
    "hidden_size": Key(TOP, integer(1, MAX_WIDTH), REQUIRED, LAYER, 4096, 6656),
    "intermediate_size": Key(TOP, integer(1, MAX_WIDTH), REQUIRED, LAYER, 22016, 19968),
    "num_hidden_layers": Key(TOP, integer(1, MAX_LAYERS), REQUIRED, LAYER, 32, 5),
    "num_attention_heads": Key(TOP, integer(1, 2**12), REQUIRED, LAYER, 32, 32),
    "num_key_value_heads": Key(TOP, integer(1, 2**12), None, LAYER, 32, 8),
    "head_dim": Key(TOP, integer(1, 2**12), None, LAYER, 128, 128),
    "max_position_embeddings": Key(TOP, integer(1), None, LAYER, 32768, 131072),
    "target_hidden_size": Key(TOP, integer(1), speculators=TOP),
    "num_target_layers": Key(BOTH, integer(1, MAX_TARGET_LAYERS), None, LAYER),
    "target_layer_ids": Key(BOTH, layers_from(0), muse=[1, 13, 25, 37, 49]),  # speculators: aux_hidden_state_layer_ids
    "block_size": Key(BOTH, integer(1, 2**12), 16, TOP, muse=16),
    "vocab_size": Key(TOP, integer(1, 2**24), None, LAYER, 151936),
    "draft_vocab_size": Key(TOP, integer(1, 2**24), speculators=TOP),
    "mask_token": Key(SECTION),
    "mask_token_id": Key(BOTH, integer(0), REQUIRED, TOP, muse=201818),
    # attention
    "layer_types": Key(TOP, speculators=LAYER),
    "is_causal": Key(TOP, boolean, speculators=LAYER),
    "causal": Key(SECTION, boolean),
    "sliding_window": Key(TOP, integer(0), None, LAYER, muse=2048),
    "use_sliding_window": Key(TOP, boolean, speculators=LAYER),
    "max_window_layers": Key(TOP, integer(0), 28),
    "use_swa": Key(SECTION, boolean),
    "swa_window_size": Key(SECTION, integer(0)),
    "attention_bias": Key(TOP, boolean, False, LAYER),
    "attention_sink_bias": Key(BOTH, boolean),
    "add_swa_attention_sink_bias": Key(TOP, boolean, False),
    "rope_parameters": Key(TOP, anything, None, LAYER, muse=_MUSE_ROPE),
    "rope_scaling": Key(TOP, anything, None, LAYER),
    "rope_theta": Key(TOP, number(), 10000.0, LAYER),
    "original_max_position_embeddings": Key(TOP, integer(1), None, LAYER),
    # norms and scales
    "rms_norm_eps": Key(TOP, number(), 1e-6, LAYER, muse=1e-5),
    "attention_value_scale": Key(BOTH, number(), 1.0),
    "input_embedding_scale": Key(BOTH, number(), 1.0),
    "output_multiplier": Key(BOTH, number(), 1.0),
    "final_logit_softcapping": Key(BOTH, number(positive=False), 0.0),
    # parts of its own
    "has_embed_tokens": Key(TOP, boolean, False),
    "has_lm_head": Key(TOP, boolean, False),
    "mask_embedding": Key(TOP, boolean, False),
    # DFlash 2, DSpark
    "conv_kernel_size": Key(BOTH, integer(0, 2**12), None, TOP),
    "conv_group_size": Key(BOTH, integer(0, MAX_WIDTH), None, TOP),
    "selector_rank": Key(BOTH, integer(0, MAX_WIDTH), None, TOP),
    "selector_top_k": Key(BOTH, integer(0), None, TOP),
    "sample_from_anchor": Key(BOTH, boolean, None, TOP),
    "markov_rank": Key(BOTH, integer(0, MAX_WIDTH), 0, TOP),
    "markov_head_type": Key(BOTH, anything, "vanilla", TOP),
    # what is not implemented
    "quantization_config": Key(TOP, unsupported(_QUANTIZED)),
    "compression_config": Key(TOP, unsupported(_QUANTIZED)),
    "speculators_config": Key(TOP, unsupported(_HALF_A_LAYOUT)),
    "partial_rotary_factor": Key(TOP, unsupported("RoPE over part of the head is not implemented", 1.0)),
    "is_neox_style": Key(TOP, unsupported(_HALF_SPLIT, True)),
    "rope_is_neox_style": Key(TOP, unsupported(_HALF_SPLIT, True)),
    "add_full_attention_sink_bias": Key(TOP, unsupported("sinks in full layers only are not implemented", False)),
    "logit_scale": Key(TOP, unsupported("use output_multiplier", 1.0)),
    "mlp_bias": Key(TOP, unsupported("MLP biases are not implemented", False)),
    "use_aux_hidden_state": Key(BOTH, unsupported("a DFlash drafter reads the target's hidden states", True)),
    "projector_type": Key(BOTH, unsupported("only the plain DFlash head is implemented", "dflash"), speculators=TOP),
}
# Keys of rope_scaling and rope_parameters.
ROPE_KEYS: dict[str, Check] = {
    "rope_theta": number(), "factor": number(), "attention_factor": number(positive=False),
    "low_freq_factor": number(), "high_freq_factor": number(),
    "beta_fast": number(), "beta_slow": number(),
    "mscale": number(positive=False), "mscale_all_dim": number(positive=False),
    "truncate": boolean, "original_max_position_embeddings": integer(1),
    "partial_rotary_factor": KEYS["partial_rotary_factor"].check,
}
# Top-level keys that change nothing: transformers' own settings, and notes on training. Others are warned about.
METADATA = frozenset("""
    add_cross_attention attention_dropout auto_map aux_hidden_state_layer_ids bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward confidence_head_with_markov cross_attention_hidden_size decoder_start_token_id
    dflash_config diversity_penalty do_sample dtype eagle_aux_hidden_state_layer_ids early_stopping
    enable_confidence_head encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id
    length_penalty mask_token max_length min_length no_repeat_ngram_size num_anchors num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache
""".split())  # noqa: SIM905
