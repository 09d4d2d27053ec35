"""Reads a drafter's ``config.json`` key by key."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from .config import FULL, SLIDING, DraftConfig, build_target_layer_ids
from .rope import ROPE_TYPES, Rope

# fmt: off
# Keys of dflash_config that are read; any other is an error, since it may change the maths.
_DFLASH_KEYS = frozenset((
    "attention_sink_bias", "attention_value_scale", "block_size", "causal", "final_logit_softcapping",
    "input_embedding_scale", "mask_token", "mask_token_id", "num_target_layers", "output_multiplier",
    "projector_type", "swa_window_size", "target_layer_ids", "use_aux_hidden_state", "use_swa",
))
_DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")

# Top-level keys that are read below.
_READ_KEYS = frozenset((
    "add_swa_attention_sink_bias", "architectures", "attention_bias", "attention_sink_bias", "block_size",
    "dflash_config", "draft_vocab_size", "final_logit_softcapping", "head_dim", "hidden_act", "hidden_size",
    "input_embedding_scale", "intermediate_size", "is_causal", "layer_types", "mask_token_id",
    "max_position_embeddings", "max_window_layers", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "num_target_layers", "original_max_position_embeddings", "output_multiplier",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "target_hidden_size",
    "target_layer_ids", "use_sliding_window", "vocab_size",
))
# Top-level keys that say nothing about the forward pass: what transformers writes beside it, and training notes.
_METADATA_KEYS = frozenset((
    "add_cross_attention", "attention_dropout", "auto_map", "aux_hidden_state_layer_ids", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "eagle_aux_hidden_state_layer_ids",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label", "initializer_range", "is_decoder",
    "is_encoder_decoder", "label2id", "length_penalty", "mask_token", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
    "output_hidden_states", "output_scores", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tie_word_embeddings", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
))
# fmt: on
# Top-level (or dflash_config) keys that change the maths: what leaves it alone, and why the rest is refused.
_REFUSED: dict[str, tuple[tuple, str]] = {
    "quantization_config": ((None,), "quantised drafters are not read"),
    "compression_config": ((None,), "quantised drafters are not read"),
    "speculators_config": ((None,), "half of the speculators layout: speculators_model_type is missing"),
    "partial_rotary_factor": ((None, 1.0), "only RoPE over the whole head is implemented"),
    "is_neox_style": ((None, True), "only the half-split kind of RoPE is implemented"),
    "rope_is_neox_style": ((None, True), "only the half-split kind of RoPE is implemented"),
    "attention_value_scale": ((None, 1.0), "scaled values are not implemented"),
    "add_full_attention_sink_bias": ((None, False), "sinks in full layers alone are not implemented"),
    "logit_scale": ((None, 1.0), "use output_multiplier"),
    "mlp_bias": ((None, False), "the MLP has no bias"),
    "has_embed_tokens": ((None, False), "a drafter with an embedding of its own is not implemented"),
    "has_lm_head": ((None, False), "a drafter with a head of its own is not implemented"),
    "mask_embedding": ((None, False), "a mask embedding of the drafter's own is not implemented"),
    "use_aux_hidden_state": ((None, True), "a DFlash drafter reads the target's hidden states"),
    "projector_type": ((None, "dflash"), "only the plain DFlash head is implemented"),
    "sample_from_anchor": ((None,), "another block layout is not implemented"),
}


class _Reader:
    """One config being read; every message names its source."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        self.top, self.source = config, source
        dflash = config.get("dflash_config")
        if dflash is not None and not isinstance(dflash, Mapping):
            raise self.error(f"dflash_config must be an object, got {dflash!r}")
        self.dflash: Mapping[str, Any] = dflash or {}

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.source}: {message}")

    def value(self, key: str, default: Any = None) -> Any:
        """``dflash_config[key]``, else the top-level one; a null counts as absent."""
        for place in (self.dflash, self.top):
            if place.get(key) is not None:
                return place[key]
        return default

    def integer(self, key: str, value: Any, minimum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"{key} must be an integer >= {minimum}, got {value!r}")
        return value

    def number(self, key: str, value: Any, *, positive: bool = True) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(f"{key} must be a finite number, got {value!r}")
        if positive and value <= 0:
            raise self.error(f"{key} must be > 0, got {value!r}")
        return float(value)

    def boolean(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.error(f"{key} must be true or false, got {value!r}")
        return value

    def required(self, key: str) -> int:
        if self.top.get(key) is None:
            raise self.error(f"{key} is missing")
        return self.integer(key, self.top[key], 1)

    def read(self) -> DraftConfig:
        self.refuse()
        layers, hidden = self.required("num_hidden_layers"), self.required("hidden_size")
        heads = self.required("num_attention_heads")
        kv_heads = self.top.get("num_key_value_heads")
        kv_heads = heads if kv_heads is None else self.integer("num_key_value_heads", kv_heads, 1)
        if heads % kv_heads:
            raise self.error(
                f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}"
            )
        head_dim = self.top.get("head_dim")
        if head_dim is None and hidden % heads:
            raise self.error(f"no head_dim, and hidden_size {hidden} is no multiple of num_attention_heads {heads}")
        head_dim = hidden // heads if head_dim is None else self.integer("head_dim", head_dim, 1)
        if head_dim % 2:
            raise self.error(f"head_dim must be even for RoPE, got {head_dim}")
        vocab = self.top.get("vocab_size")
        vocab = None if vocab is None else self.integer("vocab_size", vocab, 1)
        self.same("draft_vocab_size", "vocab_size", vocab, "a head over part of the vocabulary is not implemented")
        self.same("target_hidden_size", "hidden_size", hidden, "target and drafter must be equally wide")
        mask = self.value("mask_token_id")
        if mask is None:
            raise self.error("mask_token_id is missing")
        mask = self.integer("mask_token_id", mask, 0)
        if vocab is not None and mask >= vocab:
            raise self.error(f"mask_token_id must be below vocab_size {vocab}, got {mask}")
        target_layers = self.value("num_target_layers")
        target_layers = None if target_layers is None else self.integer("num_target_layers", target_layers, 1)
        positions = self.top.get("max_position_embeddings")
        positions = None if positions is None else self.integer("max_position_embeddings", positions, 1)
        causal, window = self.attention(layers)
        softcap = self.value("final_logit_softcapping", 0.0)
        sinks = self.value("attention_sink_bias", self.top.get("add_swa_attention_sink_bias"))
        bias, eps = self.top.get("attention_bias"), self.top.get("rms_norm_eps")
        config = DraftConfig(
            hidden_size=hidden,
            intermediate_size=self.required("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=self.integer("block_size", self.value("block_size", 16), 1),
            mask_token_id=mask,
            target_layer_ids=self.taps(target_layers, layers),
            causal=causal,
            window=window,
            rope=self.rope(positions),
            rms_norm_eps=1e-6 if eps is None else self.number("rms_norm_eps", eps),
            attention_bias=False if bias is None else self.boolean("attention_bias", bias),
            attention_sinks=False if sinks is None else self.boolean("attention_sink_bias", sinks),
            input_embedding_scale=self.number("input_embedding_scale", self.value("input_embedding_scale", 1.0)),
            output_multiplier=self.number("output_multiplier", self.value("output_multiplier", 1.0)),
            final_logit_softcapping=max(self.number("final_logit_softcapping", softcap, positive=False), 0.0),
            vocab_size=vocab,
            num_target_layers=target_layers,
            max_position_embeddings=positions,
        )
        self.warn()
        return config

    def refuse(self) -> None:
        """Raise for whatever is not a DFlash drafter of the first kind, or asks for maths that is not here."""
        names = self.top.get("architectures") or []
        conv = [key for key in _DFLASH2_KEYS if self.value(key)]
        if "DFlash2DraftModel" in names or conv:
            found = "architecture DFlash2DraftModel" if "DFlash2DraftModel" in names else ", ".join(conv)
            raise self.error(f"this is a DFlash 2 drafter ({found}), which is not supported yet: it has its own issue")
        unknown = sorted(set(self.dflash) - _DFLASH_KEYS - set(_DFLASH2_KEYS))
        if unknown:
            raise self.error(f"unknown keys in dflash_config: {', '.join(unknown)}")
        for key, (neutral, why) in _REFUSED.items():
            for place in (self.dflash, self.top):
                if place.get(key) not in neutral:
                    raise self.error(f"{key} = {_short(place[key])} is not supported: {why}")
        if names and "DFlashDraftModel" not in names:
            raise self.error(f"architectures must name DFlashDraftModel, got {', '.join(map(str, names))}")
        kind = self.top.get("model_type")
        if kind not in (None, "", "qwen3"):
            raise self.error(f"model_type must be qwen3, the shape of every DFlash drafter, got {kind!r}")
        activation = self.top.get("hidden_act")
        if activation not in (None, "silu"):
            raise self.error(f"hidden_act must be silu, got {activation!r}")

    def same(self, key: str, other: str, value: int | None, why: str) -> None:
        given = self.top.get(key)
        if given is not None and given != value:
            raise self.error(f"{key} = {given} differs from {other} = {value}: {why}")

    def taps(self, target_layers: int | None, layers: int) -> tuple[int, ...]:
        taps = self.value("target_layer_ids")
        if taps is None:
            for key in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
                if self.top.get(key) is not None:
                    raise self.error(f"{key} without target_layer_ids is not read: the two count layers differently")
            if target_layers is None:
                raise self.error("target_layer_ids is missing, and num_target_layers too, from which it would follow")
            try:
                return build_target_layer_ids(target_layers, layers)
            except ValueError as error:
                raise self.error(str(error)) from None
        if not isinstance(taps, (list, tuple)) or not taps:
            raise self.error(f"target_layer_ids must be a list of one or more layers, got {taps!r}")
        for tap in taps:
            self.integer("target_layer_ids", tap, 0)
            if target_layers is not None and tap >= target_layers:
                raise self.error(f"target_layer_ids must be below num_target_layers {target_layers}, got {tap}")
        return tuple(taps)

    def attention(self, layers: int) -> tuple[tuple[bool, ...], tuple[int, ...]]:
        """Causality and window of every layer."""
        use_sliding = self.top.get("use_sliding_window")
        use_sliding = None if use_sliding is None else self.boolean("use_sliding_window", use_sliding)
        types = self.top.get("layer_types")
        if types is None:
            first = layers
            if use_sliding and self.top.get("sliding_window") is not None:
                first = self.integer("max_window_layers", self.top.get("max_window_layers", 28), 0)
            types = [FULL if i < first else SLIDING for i in range(layers)]
        if not isinstance(types, (list, tuple)) or len(types) != layers:
            raise self.error(f"layer_types must name each of the {layers} layers, got {_short(types)}")
        for kind in types:
            if kind not in (FULL, SLIDING):
                raise self.error(f"layer_types must be {FULL} or {SLIDING}, got {kind!r}")
        causal = self.top.get("is_causal")
        causal = self.dflash.get("causal") if causal is None else causal
        causal = None if causal is None else self.boolean("is_causal", causal)
        everywhere = SLIDING not in types and self.boolean("use_swa", self.dflash.get("use_swa") or False)
        window = 0
        if everywhere or SLIDING in types:
            window = self.dflash.get("swa_window_size")
            if window is None:
                if use_sliding is False:
                    raise self.error("layer_types has sliding_attention, but use_sliding_window is false")
                window = self.top.get("sliding_window")
            window = self.integer("sliding_window", window, 1)
        return (
            tuple(kind == SLIDING if causal is None else causal for kind in types),
            tuple(window if everywhere or kind == SLIDING else 0 for kind in types),
        )

    def rope(self, positions: int | None) -> Rope:
        """``rope_scaling``, else ``rope_parameters``; ``rope_theta`` inside it, else beside it."""
        name = "rope_scaling" if self.top.get("rope_scaling") else "rope_parameters"
        given = self.top.get(name) or {}
        if not isinstance(given, Mapping):
            raise self.error(f"{name} must be an object, got {given!r}")
        if any(isinstance(value, Mapping) for value in given.values()):
            raise self.error(f"{name} by layer type is not supported: {', '.join(given)}")
        kind = given.get("rope_type") or given.get("type") or "default"
        if kind not in ROPE_TYPES:
            raise self.error(f"RoPE type {kind!r} is not supported: {', '.join(ROPE_TYPES)} are")
        partial = given.get("partial_rotary_factor")
        if partial not in (None, 1.0):
            raise self.error(
                f"partial_rotary_factor = {partial!r} is not supported: {_REFUSED['partial_rotary_factor'][1]}"
            )
        theta = given.get("rope_theta")
        theta = self.top.get("rope_theta") if theta is None else theta
        theta = 10000.0 if theta is None else self.number("rope_theta", theta)
        if kind == "default":
            return Rope(theta=theta)

        def need(key: str) -> float:
            if given.get(key) is None:
                raise self.error(f"{name} of type {kind} needs {key}")
            return self.number(f"{name}.{key}", given[key])

        if kind == "linear":
            return Rope("linear", theta, need("factor"))
        original = self.top.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
        original = positions if original is None else original
        if original is None:
            raise self.error(f"{name} of type {kind} needs original_max_position_embeddings")
        original = self.integer(f"{name}.original_max_position_embeddings", original, 1)
        if kind == "llama3":
            low, high = need("low_freq_factor"), need("high_freq_factor")
            if high <= low:
                raise self.error(f"{name}: high_freq_factor must be above low_freq_factor, got {high} and {low}")
            return Rope("llama3", theta, need("factor"), original, low, high)
        if theta <= 1:
            raise self.error(f"rope_theta must be > 1 for {kind}, got {theta}")
        factor = positions / original if given.get("factor") is None and positions else need("factor")
        numbers = {
            key: None if given.get(key) is None else self.number(f"{name}.{key}", given[key], positive=False)
            for key in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
        }
        scaling = numbers["attention_factor"]
        if scaling is None:
            top, bottom = numbers["mscale"], numbers["mscale_all_dim"]
            ratio = _magnitude(factor, top) / _magnitude(factor, bottom) if top and bottom else None
            scaling = _magnitude(factor, 1.0) if ratio is None else ratio
        truncate = self.boolean(f"{name}.truncate", given.get("truncate", True))
        fast, slow = numbers["beta_fast"] or 32.0, numbers["beta_slow"] or 1.0
        return Rope("yarn", theta, factor, original, 1.0, 4.0, fast, slow, truncate, scaling)

    def warn(self) -> None:
        known = _READ_KEYS | _METADATA_KEYS | set(_REFUSED) | set(_DFLASH2_KEYS)
        unknown = sorted(key for key in self.top if key not in known and not key.startswith("_"))
        if unknown:
            warnings.warn(f"{self.source}: unknown keys are ignored: {', '.join(unknown)}", UserWarning, stacklevel=5)


def _magnitude(factor: float, scale: float) -> float:
    """YaRN's growth of the attention logits with the context."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
