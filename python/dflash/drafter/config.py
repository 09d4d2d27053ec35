"""A drafter's configuration, read and checked once.

Checkpoints come from several trainers and several years of one trainer. Anything that changes the math and is not
implemented is refused by name. Unknown metadata is at most warned about.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..files import read_architectures
from ..ops import MAX_CANDIDATES
from ..terminal import listed, printable, shortened

FULL, SLIDING = "full_attention", "sliding_attention"
TOP, SECTION, BOTH = "top", "dflash_config", "both"
LAYER = "transformer_layer_config"
REQUIRED = object()  # the default of a key that must be there
MAX_LAYERS, MAX_TARGET_LAYERS, MAX_WIDTH = 2**8, 2**10, 2**20  # what a config asks for is allocated
_LARGEST = 1e300

# ---------------------------------------------------------------------------------------------- the keys

Check = Callable[[str, Any], Any]  # (key, value) -> the value as it is used; raises ValueError


def integer(least: int, most: int = 2**31 - 1) -> Check:
    """Return a check for an integer from ``least`` to ``most``."""

    def check(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{key} must be an integer >= {least}, got {shortened(value)}")
        if value > most:
            raise ValueError(f"{key} must be at most {most}, got {shortened(value)}")
        return value

    return check


def number(*, positive: bool = True) -> Check:
    """Return a check for a finite number, above 0 unless ``positive`` is False."""

    def check(key: str, value: Any) -> float:
        # Compared, because math.isfinite cannot take an integer beyond the floats.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_LARGEST < value < _LARGEST:
            raise ValueError(f"{key} must be a finite number, got {shortened(value)}")
        if positive and value <= 0:
            raise ValueError(f"{key} must be > 0, got {shortened(value)}")
        return float(value)

    return check


def anything(_key: str, value: Any) -> Any:
    """Accept a value that is checked together with others."""
    return value


def boolean(key: str, value: Any) -> bool:
    """Check for true or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {shortened(value)}")
    return value


def layers_from(least: int) -> Check:
    """Return a check for a list of the target's layers, which are counted from ``least``."""

    def check(key: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, (list, tuple)) or not 0 < len(value) <= MAX_TARGET_LAYERS:
            raise ValueError(f"{key} must be a list of one or more layers, got {shortened(value)}")
        return tuple(integer(least, MAX_TARGET_LAYERS)(key, layer) for layer in value)

    return check


def unsupported(reason: str, *neutral: Any) -> Check:
    """Return a check that refuses every value that would change the math."""

    def check(key: str, value: Any) -> Any:
        if value not in neutral:
            raise ValueError(f"{key} = {shortened(value)} is not supported: {reason}")
        return value

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
    "dflash_query_causal": Key(TOP, boolean),
    "dflash_sliding_window": Key(TOP, integer(0)),
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
    **dict.fromkeys(("is_neox_style", "rope_is_neox_style"), Key(TOP, boolean, True)),
    # norms and scales
    "rms_norm_eps": Key(TOP, number(), 1e-6, LAYER, muse=1e-5),
    "use_gemma_norm": Key(TOP, boolean, False),
    **dict.fromkeys(("attention_value_scale", "input_embedding_scale", "output_multiplier"), Key(BOTH, number(), 1.0)),
    "final_logit_softcapping": Key(BOTH, number(positive=False), 0.0),
    # parts of its own
    **dict.fromkeys(("has_embed_tokens", "has_lm_head", "mask_embedding"), Key(TOP, boolean, False)),
    # DFlash 2, DSpark
    "conv_kernel_size": Key(BOTH, integer(0, 2**12), None, TOP),
    "conv_group_size": Key(BOTH, integer(0, MAX_WIDTH), None, TOP),
    "selector_rank": Key(BOTH, integer(0, MAX_WIDTH), None, TOP),
    "selector_top_k": Key(BOTH, integer(0), None, TOP),
    "sample_from_anchor": Key(BOTH, boolean, None, TOP),
    "dspark_bonus_anchor": Key(TOP, boolean),
    "markov_rank": Key(BOTH, integer(0, MAX_WIDTH), 0, TOP),
    "markov_head_type": Key(BOTH, anything, "vanilla", TOP),
    "projector_type": Key(BOTH, unsupported("only dflash and dspark are implemented", "dflash", "dspark"), None, TOP),
    "shift_label": Key(BOTH, boolean),
    "pure_draft_prefix_len": Key(BOTH, unsupported("blocks that begin with a prefix are not implemented", 0)),
    # what only training, or a scheduler that stops early, reads
    **dict.fromkeys(("attention_mode", "confidence_head_alpha", "confidence_head_with_markov"), Key(BOTH)),
    **dict.fromkeys(("enable_confidence_head", "use_confidence_head", "lm_head_chunk_size"), Key(BOTH)),
    # how tensors are stored, which the loader reads by itself
    **dict.fromkeys(("quantization_config", "compression_config", "quantization"), Key(TOP)),
    # what is not implemented
    "speculators_config": Key(TOP, unsupported(_HALF_A_LAYOUT)),
    "partial_rotary_factor": Key(TOP, unsupported("RoPE over part of the head is not implemented", 1.0)),
    "add_full_attention_sink_bias": Key(TOP, unsupported("sinks in full layers only are not implemented", False)),
    "logit_scale": Key(TOP, unsupported("use output_multiplier", 1.0)),
    "mlp_bias": Key(TOP, unsupported("MLP biases are not implemented", False)),
    "use_aux_hidden_state": Key(BOTH, unsupported("a DFlash drafter reads the target's hidden states", True)),
}
# Keys of rope_scaling and rope_parameters.
ROPE_KEYS: dict[str, Check] = {
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor"), number()),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), number(positive=False)),
    "beta_fast": number(), "beta_slow": number(),
    "truncate": boolean, "original_max_position_embeddings": integer(1),
    "partial_rotary_factor": KEYS["partial_rotary_factor"].check,
}
# Top-level keys that change nothing: transformers' own settings, and notes on training. Others are warned about.
METADATA = frozenset("""
    add_cross_attention attention_dropout auto_map aux_hidden_state_layer_ids bad_words_ids begin_suppress_tokens
    bos_token_id chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id dflash_config
    diversity_penalty do_sample dtype eagle_aux_hidden_state_layer_ids early_stopping encoder_no_repeat_ngram_size
    eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id id2label initializer_range is_decoder is_encoder_decoder label2id
    length_penalty mask_token max_length min_length no_repeat_ngram_size num_anchors num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache
""".split())  # noqa: SIM905
DFLASH2_KEYS = tuple(asdict(DFlash2Config()))
DSPARK_ARCHITECTURE = "Qwen3DSparkModel"

_ORIGINAL = "original_max_position_embeddings"
ROPE_TYPES: dict[str, tuple[str, ...]] = {  # and the settings that each uses
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", "beta_fast", "beta_slow", "truncate", _ORIGINAL),
}
# Names of the model class in a config. DFlash 2: the reference package, NeMo AutoModel, SGLang's Beam and MiniMax.
_DFLASH2_ARCHITECTURES = {
    *("DFlash2DraftModel", "Qwen3DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"),
}
# DeepSpec, SpecForge, LiquidAI and Ling.
_DSPARK_ARCHITECTURES = {DSPARK_ARCHITECTURE, "DSparkDraftModel", "Lfm2DSparkDraftModel", "LingDSparkModel"}
_ARCHITECTURES = {"DFlashDraftModel", "Qwen3DFlashDraftModel", *_DSPARK_ARCHITECTURES, *_DFLASH2_ARCHITECTURES}
_OTHER_ARCHITECTURES = {  # of drafters that are known, and what they have that is not implemented
    "DFlashLagunaForCausalLM": "a norm per tap and gated attention",
    "DSparkMiniMaxDraftModel": "layers of MiniMax-M3",
    "Gemma4DSparkModel": "layers of Gemma 4",
    "K3DSparkModel": "latent attention",
    "LiLiCorrDraftModel": "a selector with attention over candidates",
    "MuseSparkDSparkModel": "gated residuals",
    "Qwen35DSparkModel": "RoPE over part of the head and gated attention",
    "Qwen3OmniDSparkModel": "layers of Qwen3-Omni",
    "Qwen3XPressModel": "a refiner over the block",
}


# ---------------------------------------------------------------------------------------------- the config


@dataclass(frozen=True)
class Rope:
    """Half-split rotary position embedding over the whole head. ``type`` decides which of the numbers apply."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_scaling: float = 1.0

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Return ``[head_dim / 2]`` float32 on the CPU, as transformers computes them for this type."""
        parameters = asdict(self) | {"rope_theta": self.theta, "attention_factor": self.attention_scaling}
        return _run_rope_rule(self.type, parameters, head_dim)[0]


def _run_rope_rule(kind: str, parameters: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Return the inverse frequencies and the scaling of attention by transformers' rule."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with torch.device("cpu"):
        if kind == "default":  # transformers has it in its models only
            powers = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
            return 1.0 / parameters["rope_theta"] ** powers, 1.0
        sizes = {"head_dim": head_dim, "hidden_size": head_dim, "num_attention_heads": 1}
        config: Any = SimpleNamespace(rope_parameters=parameters, standardize_rope_params=lambda: None, **sizes)
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


@dataclass(frozen=True)
class DraftConfig:
    """A drafter's shape and rules, as stated by its checkpoint. Build one with `from_config`.

    Attributes:
        block_size: rows that the target verifies, the anchor included.
        causal: per layer, True if a row of the block sees no later row.
        window: per layer, the keys that a query sees, itself included; 0 for all.
        final_logit_softcapping: 0 for none.
        scales_like_target: its logits take multiplier and softcap of the target's config.
        stores_interleaved: the checkpoint's q and k are for RoPE over neighbors, not over halves of the head, and
        stores_less_one: its norms' weights are stored less 1. `load_draft` changes the tensors, and a loaded drafter
            has False for both.
        predicts_from_anchor: the anchor's row predicts too, so a pass has a row less than ``block_size``.
        markov_rank: columns of a DSpark drafter's Markov head; 0 for none.
        own_parts: the parts that its checkpoint stores, of ``embed_tokens``, ``lm_head`` and ``mask_embedding``. The
            others are the target's.
        draft_vocab_size: rows of its own head if that knows a part of the vocabulary only, else None.
        vocab_size, num_target_layers, max_position_embeddings: None if the checkpoint does not say.
        dflash2: convolutions and a candidate selector; None for a drafter of the first generation.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    causal: tuple[bool, ...]
    window: tuple[int, ...]
    rope: Rope = field(default_factory=Rope)
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_sinks: bool = False
    attention_value_scale: float = 1.0
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    vocab_size: int | None = None
    num_target_layers: int | None = None
    max_position_embeddings: int | None = None
    dflash2: DFlash2Config | None = None
    predicts_from_anchor: bool = False
    markov_rank: int = 0
    own_parts: tuple[str, ...] = ()
    draft_vocab_size: int | None = None
    scales_like_target: bool = False
    stores_interleaved: bool = False
    stores_less_one: bool = False

    @property
    def rows_per_pass(self) -> int:
        """Rows of the drafter's pass over a whole block, which is the block size that checkpoints state."""
        return self.block_size - self.predicts_from_anchor

    @property
    def has_token_rows(self) -> bool:
        """True if the drafter has tensors with a row per token of the target."""
        own = {"embed_tokens", "lm_head"} & {*self.own_parts}
        return bool(own or self.dflash2 or self.markov_rank or self.draft_vocab_size)

    @classmethod
    def from_config(cls, config: object, source: str = "draft config") -> DraftConfig:
        """Read a parsed ``config.json``: as published, of the ``speculators`` library, or of a Muse Glimmer assistant.

        Args:
            config: a mapping, or an object with ``to_dict()`` such as a transformers config.
            source: what error messages call it.

        Raises:
            ValueError: a key is missing, has an impossible value, or asks for something not implemented.
        """
        if not isinstance(config, Mapping):
            if not callable(getattr(config, "to_dict", None)):
                raise ValueError(f"{source}: must be a mapping or have to_dict(), got {type(config).__name__}")
            config = config.to_dict()
        muse, source = "MuseGlimmerAssistantModel" in read_architectures(config, source), printable(source)
        try:
            config = _without_parts_of_targets(config)
            if is_speculators(config):
                config = from_speculators(config)
            read = cls(**_read_fields(from_muse_assistant(config) if muse else config), scales_like_target=muse)
        except ValueError as error:
            raise ValueError(printable(f"{source}: {error}")) from None
        known = METADATA.union(name for name, key in KEYS.items() if key.place != SECTION)
        if unknown := sorted(key for key in config if key not in known and not key.startswith("_")):
            warnings.warn(f"{source}: unknown keys are ignored: {listed(unknown)}", UserWarning, stacklevel=2)
        return read


def _without_parts_of_targets(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drop what DeepSpec's trainer copies of a hybrid target's config. Raise ValueError for a target's own config."""
    names = config.get("architectures") or ()
    text = config.get("text_config")
    keys = {*config, *(text if isinstance(text, Mapping) else ())}
    if "dspark_block_size" in keys and _ARCHITECTURES.isdisjoint(names):
        raise ValueError(
            "this is a target that brings a DSpark head inside its own checkpoint (dspark_* keys): such heads are not "
            "supported. Run the target without a drafter, or with one that has a folder of its own"
        )
    if DSPARK_ARCHITECTURE not in names or not any(key.startswith("linear_") for key in config):
        return config
    # Its heads rope the whole head, whatever the copy says.
    unread = ("linear_", "mrope_", "partial_rotary_factor", "attn_output_gate", "full_attention_interval")
    kept = {key: value for key, value in config.items() if not key.startswith(unread)}
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := kept.get(name), Mapping):
            kept[name] = {key: value for key, value in rope.items() if not key.startswith(unread)}
    return kept


# ---------------------------------------------------------------------------------------------- the published layout


def _read_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `DraftConfig` from a parsed config in the published layout."""
    # 1. Check every key by itself
    given = _read_keys(config)
    layers, hidden, vocab = (given.get(key) for key in ("num_hidden_layers", "hidden_size", "vocab_size"))
    # 2. Check what must fit together
    heads = given["num_attention_heads"]
    kv_heads, head_dim = given.get("num_key_value_heads", heads), given.get("head_dim")
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}")
    if head_dim is None and hidden % heads:
        raise ValueError(f"without head_dim, hidden_size {hidden} must be a multiple of num_attention_heads {heads}")
    head_dim = head_dim or hidden // heads
    KEYS["head_dim"].check("head_dim", head_dim)
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for RoPE, got {head_dim}")
    if (wide := given.get("target_hidden_size", hidden)) != hidden:
        raise ValueError(f"target_hidden_size = {wide} differs from hidden_size = {hidden}: both must be equally wide")
    drafts, mask = given.get("draft_vocab_size"), given["mask_token_id"]
    if drafts is not None and (vocab is None or drafts > vocab):
        raise ValueError(f"draft_vocab_size must be at most vocab_size = {vocab}, got {drafts}")
    if vocab is not None and mask >= vocab:
        raise ValueError(f"mask_token_id must be below vocab_size {vocab}, got {mask}")
    # 3. Read what several keys decide
    dflash2 = _read_dflash2(given, hidden, vocab)
    from_anchor = _read_from_anchor(given, vocab, dflash2)
    causal, window = _read_attention(given, layers)
    own = {"embed_tokens": "has_embed_tokens", "lm_head": "has_lm_head", "mask_embedding": "mask_embedding"}
    return {
        **{name: given.get(name) for name in DraftConfig.__dataclass_fields__ if name in KEYS},
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "block_size": given["block_size"] + from_anchor,
        "target_layer_ids": _read_taps(given, config, layers),
        "causal": causal,
        "window": window,
        "rope": read_rope(given, config, head_dim),
        "attention_sinks": given.get("attention_sink_bias", given["add_swa_attention_sink_bias"]),
        "final_logit_softcapping": max(given["final_logit_softcapping"], 0.0),
        "dflash2": dflash2,
        "predicts_from_anchor": from_anchor,
        "own_parts": tuple(part for part, key in own.items() if given[key]),
        "draft_vocab_size": None if drafts == vocab else drafts,
        "stores_interleaved": not (given["is_neox_style"] and given["rope_is_neox_style"]),
        "stores_less_one": given["use_gemma_norm"],
    }


def _read_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check each key, and return the values that count, defaults included. Null counts as missing."""
    architectures, section = config.get("architectures"), config.get("dflash_config")
    if architectures and _ARCHITECTURES.isdisjoint(architectures):
        names = f"DFlashDraftModel, DFlash2DraftModel or {DSPARK_ARCHITECTURE}"
        parts = [_OTHER_ARCHITECTURES[name] for name in architectures if name in _OTHER_ARCHITECTURES]
        reason = f": {parts[0]} is not implemented" if parts else ""
        raise ValueError(f"architectures must name {names}, got {listed(architectures)}{reason}")
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise ValueError(f"dflash_config must be an object, got {shortened(section)}")
    if unknown := sorted(name for name in section if name not in KEYS or KEYS[name].place == TOP):
        raise ValueError(f"unknown keys in dflash_config: {listed(unknown)}")
    given = {name: key.default for name, key in KEYS.items() if key.default not in (None, REQUIRED)}
    for place, level in ((TOP, config), (SECTION, section)):  # the section counts, so it is read last
        for name, value in level.items():
            if value is not None and name in KEYS and KEYS[name].place in (place, BOTH):
                given[name] = KEYS[name].check(name, value)
    if missing := [name for name, key in KEYS.items() if key.default is REQUIRED and name not in given]:
        raise ValueError(f"{missing[0]} is missing")
    return given


def _read_dflash2(given: Mapping[str, Any], hidden: int, vocab: int | None) -> DFlash2Config | None:
    """Return what a config states of DFlash 2; None for a drafter of the first generation."""
    values = {key: given.get(key) for key in DFLASH2_KEYS}
    if _DFLASH2_ARCHITECTURES.isdisjoint(given.get("architectures", ())) and not any(values.values()):
        return None
    if missing := [key for key, value in values.items() if value is None]:
        raise ValueError(f"a DFlash 2 drafter states {', '.join(DFLASH2_KEYS)}, and {', '.join(missing)} is missing")
    config = DFlash2Config(**values)
    check_dflash2(config, hidden, vocab)
    return config


def check_dflash2(config: DFlash2Config, hidden: int, vocab: int | None) -> None:
    """Raise ``ValueError`` if a drafter ``hidden`` wide for ``vocab`` tokens cannot have these parts."""
    for key, value in asdict(config).items():
        integer(1)(key, value)
    if vocab is None:
        raise ValueError("vocab_size is missing: a DFlash 2 drafter's codebooks have that many rows")
    if hidden % config.conv_group_size:
        raise ValueError(f"conv_group_size must divide hidden_size {hidden}, got {config.conv_group_size}")
    if config.selector_top_k > MAX_CANDIDATES:
        raise ValueError(f"selector_top_k must be at most {MAX_CANDIDATES}, got {config.selector_top_k}")
    if config.selector_top_k > vocab:
        raise ValueError(f"selector_top_k must be at most vocab_size {vocab}, got {config.selector_top_k}")


def _read_from_anchor(given: Mapping[str, Any], vocab: int | None, dflash2: DFlash2Config | None) -> bool:
    """Return True if the anchor's row predicts too, as in DSpark drafters. Check their Markov head."""
    names_dspark = not _DSPARK_ARCHITECTURES.isdisjoint(given.get("architectures", ()))
    is_dspark = names_dspark or given.get("projector_type") == "dspark"
    # SpecForge's DSpark ignores shift_label; Model-Optimizer's states it as true
    if not names_dspark and given.get("shift_label", is_dspark) != is_dspark:
        raise ValueError(f"shift_label = {not is_dspark} is not supported: other block layouts are not implemented")
    if given["markov_rank"]:
        if (kind := given["markov_head_type"]) != "vanilla":
            raise ValueError(f"markov_head_type must be vanilla, got {shortened(kind)}: other heads are not supported")
        if vocab is None:
            raise ValueError("vocab_size is missing: a Markov head has that many rows")
        if dflash2 is not None:
            raise ValueError("markov_rank must be 0 in a DFlash 2 drafter, whose tokens a selector links already")
        if "sample_from_anchor" not in given and not is_dspark:
            raise ValueError(
                "sample_from_anchor must say whether the anchor's row predicts too: drafters with a Markov head are "
                f"trained either way. {DSPARK_ARCHITECTURE} in architectures would mean true"
            )
    return given.get("sample_from_anchor", not given.get("dspark_bonus_anchor", not is_dspark))


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Return the tapped target layers of a drafter that does not name them.

    They are evenly spaced from layer 1 to the fourth from last. A drafter of one layer taps the middle one.
    """
    if num_draft_layers == 1:
        return (num_target_layers // 2,)
    if num_target_layers < 4:
        raise ValueError(f"without target_layer_ids, num_target_layers must be at least 4, got {num_target_layers}")
    step = (num_target_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_draft_layers))


def _read_taps(given: Mapping[str, Any], config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    taps, target_layers = given.get("target_layer_ids"), given.get("num_target_layers")
    if taps is not None:
        if target_layers is not None and max(taps) >= target_layers:
            raise ValueError(f"target_layer_ids must be below num_target_layers {target_layers}, got {max(taps)}")
        return taps
    for key in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"):
        if config.get(key) is not None:
            raise ValueError(f"{key} counts layers differently, so state target_layer_ids: it is missing")
    if target_layers is None:
        raise ValueError("target_layer_ids is missing, and without num_target_layers it cannot be derived")
    return build_target_layer_ids(target_layers, layers)


def _read_attention(given: Mapping[str, Any], layers: int) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Return the causality and the window of every layer."""
    # 1. The kinds of layers; where they are missing, what Qwen3's own config derives
    use_sliding, kinds = given.get("use_sliding_window"), given.get("layer_types")
    if kinds is None:
        num_full = given["max_window_layers"] if use_sliding and "sliding_window" in given else layers
        kinds = [FULL if i < num_full else SLIDING for i in range(layers)]
    if not isinstance(kinds, (list, tuple)) or len(kinds) != layers:
        raise ValueError(f"layer_types must name num_hidden_layers = {layers} layers, got {shortened(kinds)}")
    if others := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        raise ValueError(f"layer_types must be {FULL} or {SLIDING}, got {shortened(others[0])}")
    # 2. The window; use_swa gives one to layers that are full by name
    causal = given.get("is_causal", given.get("causal", given.get("dflash_query_causal")))
    everywhere, window = SLIDING not in kinds and given.get("use_swa", False), 0
    if everywhere or SLIDING in kinds:
        if "swa_window_size" not in given and use_sliding is False:
            raise ValueError("layer_types has sliding_attention, but use_sliding_window is false")
        window = given.get("swa_window_size", given.get("sliding_window", given.get("dflash_sliding_window")))
        cause = "use_swa" if everywhere else f"{SLIDING} in layer_types"
        integer(1)(f"{cause} needs a window: sliding_window", window)
    return (
        tuple(kind == SLIDING if causal is None else causal for kind in kinds),
        tuple(window if everywhere or kind == SLIDING else 0 for kind in kinds),
    )


def read_rope(given: Mapping[str, Any], config: Mapping[str, Any], head_dim: int) -> Rope:
    """Read ``rope_scaling``, else ``rope_parameters``. ``rope_theta`` may be inside or at the top level."""
    # 1. Check every key by itself
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    settings = given.get(name) or {}
    if not isinstance(settings, Mapping):
        raise ValueError(f"{name} must be an object, got {shortened(settings)}")
    if any(isinstance(value, Mapping) for value in settings.values()):
        raise ValueError(f"{name} per layer type is not supported: {listed(settings)}")
    settings = {
        key: ROPE_KEYS.get(key, anything)(key if key == "partial_rotary_factor" else f"{name}.{key}", value)
        for key, value in settings.items()
        if value is not None
    }
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in tuple(ROPE_TYPES):
        raise ValueError(f"{name}: RoPE type {shortened(kind)} is not supported: {', '.join(ROPE_TYPES)} are")
    # 2. Add what may stand elsewhere, and check what the type needs
    theta, longest = settings.get("rope_theta", given["rope_theta"]), given.get("max_position_embeddings")
    settings[_ORIGINAL] = given.get(_ORIGINAL, settings.get(_ORIGINAL, longest))
    if kind == "yarn":
        factor = longest / settings[_ORIGINAL] if longest and settings[_ORIGINAL] else None
        settings = {"factor": factor, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True} | settings
    for key in ROPE_TYPES[kind]:
        if settings.get(key) is None:
            raise ValueError(f"{name} of type {kind} needs {key}")
    low, high = settings.get("low_freq_factor"), settings.get("high_freq_factor")
    if kind == "llama3" and high <= low:
        raise ValueError(f"{name}: high_freq_factor must be above low_freq_factor, got {high} and {low}")
    if kind == "yarn" and theta <= 1:
        raise ValueError(f"rope_theta must be > 1 for yarn, got {theta}")
    # 3. Keep what the type uses
    rope = {key: settings[key] for key in ROPE_TYPES[kind]}
    if kind == "yarn":
        rope["attention_scaling"] = float(_run_rope_rule(kind, settings | {"rope_theta": theta}, head_dim)[1])
    return Rope(kind, theta, **rope)


# ---------------------------------------------------------------------------------------------- other layouts

# Muse Glimmer's assistant has every key at the top level, and leaves the multiplier and the softcap of its logits to
# the target. The speculators layout keeps the transformer's own keys in ``transformer_layer_config`` and counts taps
# from the embedding: ``aux_hidden_state_layer_ids`` is the tapped layer + 1. Tensors have the same names.

_DFLASH_DEFAULTS = {"block_size": 8, "sample_from_anchor": False, "sliding_window_non_causal": False}
# What the speculators library takes where a key is missing, by ``speculators_model_type``.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "dflash": _DFLASH_DEFAULTS,
    "dflash2": _DFLASH_DEFAULTS | {"sliding_window_non_causal": True} | asdict(DFlash2Config()),
    "dspark": _DFLASH_DEFAULTS | {"sample_from_anchor": True, "markov_rank": 256, "markov_head_type": "vanilla"},
}
# Top-level keys of the speculators layout that change nothing, or have another name in the published one.
# fmt: off
_DROPPED = frozenset("""
    architectures auf auto_map aux_hidden_state_layer_ids base_model_ep_plan confidence_head_with_markov dtype emb_dim
    enable_confidence_head gru_hidden_dim has_no_defaults_at_init lambda_base_decay_ratio lambda_base_start model_type
    pure_draft_prefix_len shift_label sliding_window_non_causal speculators_config speculators_model_type
    speculators_version tie_word_embeddings torch_dtype transformer_layer_config transformers_version
""".split())  # noqa: SIM905
# fmt: on


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Return True if a parsed ``config.json`` is in the speculators layout."""
    return any(config.get(key) is not None for key in ("speculators_model_type", LAYER))


def from_muse_assistant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published form of a Muse Glimmer assistant's config. No layer of it is causal."""
    out = {name: key.muse for name, key in KEYS.items() if key.muse is not None}
    out |= {key: value for key, value in config.items() if value is not None}
    out |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "is_causal": False}
    if type(out["sliding_window"]) is int:
        out["sliding_window"] += 1  # transformers' bidirectional windows do not count the query's own position
    if type(out["num_hidden_layers"]) is int:
        out.setdefault("layer_types", [SLIDING] * min(out["num_hidden_layers"], MAX_LAYERS))
    return out


def from_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published form of a config in the speculators layout. Raises ValueError for other types."""
    # 1. Check what only this layout has
    kind, layer, taps = (config.get(key) for key in ("speculators_model_type", LAYER, "aux_hidden_state_layer_ids"))
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise ValueError(f"speculators_model_type must be dflash, dflash2 or dspark, got {shortened(kind)}")
    if not isinstance(layer, Mapping):
        raise ValueError(f"{LAYER} must be an object, got {shortened(layer)}")
    given = {key: value for key, value in config.items() if value is not None}
    for key in given.keys() & {"sample_from_anchor", "shift_label", "sliding_window_non_causal"}:
        boolean(key, given[key])
    if given.get("shift_label"):
        raise ValueError("shift_label = True is not supported: other block layouts are not implemented")
    taps = layers_from(1)("aux_hidden_state_layer_ids (counted from 1)", taps)
    # 2. Take its keys, or what the library takes where they are missing
    settings = {key: given.get(key, default) for key, default in _DEFAULTS[kind].items()}
    if kind == "dspark" and "sample_from_anchor" not in given:  # of old files
        settings["sample_from_anchor"] = _stated_drafts(config) != settings["block_size"] - 1
    section: dict[str, Any] = {"target_layer_ids": [tap - 1 for tap in taps]}
    section |= {key: settings.pop(key) for key in DFLASH2_KEYS if key in settings}
    section |= {key: given[key] for key in ("mask_token_id", "projector_type") if key in given}
    if settings.pop("sliding_window_non_causal"):
        section["causal"] = False  # else as in the published layout: sliding layers are causal, full ones are not
    # 3. Name the class that drafts so
    architecture = "DFlash2DraftModel" if kind == "dflash2" else "DFlashDraftModel"
    if kind != "dflash2" and settings["sample_from_anchor"]:
        architecture = DSPARK_ARCHITECTURE  # with a Markov head or without
        settings |= {key: section[key] for key in ("mask_token_id", "target_layer_ids") if key in section}
    elif kind == "dflash":
        settings.pop("sample_from_anchor")  # the published layout has no such key
    # 4. Keys that the layout does not have are judged as in the published one
    known = _DROPPED.union(name for name, key in KEYS.items() if key.speculators == TOP)
    out = {name: key.qwen3 for name, key in KEYS.items() if key.qwen3 is not None}
    out |= {key: value for key, value in config.items() if key not in known}
    out |= {**layer, "architectures": [architecture], "model_type": "qwen3", **settings, "dflash_config": section}
    return out | {key: given[key] for key in ("draft_vocab_size", "target_hidden_size", "dtype") if key in given}


def _stated_drafts(config: Mapping[str, Any]) -> object:
    """Return the drafts per block that ``speculators_config`` states; None if it states none."""
    described = config.get("speculators_config")
    methods = described.get("proposal_methods") if isinstance(described, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, Mapping) else None
