"""Write drafters in each checkpoint layout, say what serving engines read differently, and `export`.

`dflash.drafter.config` reads these layouts, and `dflash.loading.gguf_draft` the GGUF files of llama.cpp's architecture
``dflash``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from dflash import DraftConfig, Drafter, load_draft
from dflash.internals import (
    MASK_EMBEDDING_FILE,
    Pretrained,
    drafter_config,
    files,
    find_draft,
    gguf,
    gguf_draft,
    read_draft_config,
    target_ids,
)
from dflash.light import terminal

from .files import atomic_folder, one_line_errors, save_tensors, write_json

KEYS = drafter_config.KEYS
SCALES = ("attention_value_scale", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
NEUTRAL = {key: KEYS[key].default for key in SCALES} | {"attention_sink_bias": False}

FORMATS = ("published", "speculators", "transformers", "gguf")
# vLLM looks for these keys only in dflash_config.
_SECTION = ("mask_token_id", "target_layer_ids", *SCALES, "attention_sink_bias", *drafter_config.DFLASH2_KEYS)
_METADATA = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | {"attention_dropout": 0.0}


# ---------------------------------------------------------------------------------------------- keys


def key_values(config: DraftConfig) -> dict[str, Any]:
    """Return the published layout's keys that say what ``config`` says: the inverse of `DraftConfig.from_config`.

    ``is_causal`` is None if it follows from the windows.
    """
    rope, by_window = config.rope, tuple(window > 0 for window in config.window)
    settings = {"rope_type": rope.type, "rope_theta": rope.theta}
    settings |= {key: getattr(rope, key) for key in drafter_config.ROPE_TYPES[rope.type]}
    settings |= {"attention_factor": rope.attention_scaling} if rope.type == "yarn" else {}
    return {
        **{name: getattr(config, name) for name in DraftConfig.__dataclass_fields__ if name in KEYS},
        **(dataclasses.asdict(config.dflash2) if config.dflash2 is not None else {}),
        "model_type": "qwen3",
        "hidden_act": "silu",
        "num_key_value_heads": config.num_kv_heads,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.rows_per_pass,
        "sample_from_anchor": config.predicts_from_anchor,
        "layer_types": [drafter_config.SLIDING if window else drafter_config.FULL for window in config.window],
        "is_causal": None if config.causal == by_window else config.causal[0],
        "sliding_window": max(config.window) or None,
        "use_sliding_window": any(by_window),
        "attention_sink_bias": config.attention_sinks,
        "rope_parameters": settings,
        "rope_theta": rope.theta,
    }


# ---------------------------------------------------------------------------------------------- limits

_REFUSALS = {
    "saved": "a drafter with {} cannot be saved here: use dflash export",
    "published": "the published layout cannot have {}, as this drafter has: keep the speculators layout",
    "speculators": "the speculators layout cannot have {}, as this drafter has: use the published layout",
    "transformers": "transformers' drafter class cannot have {}, as this drafter has: use the published layout",
    "gguf": "llama.cpp's drafters cannot have {}, as this one has",
}


def check_layout(config: DraftConfig, layout: str) -> None:
    """Raise ``ValueError`` if a layout has no place for something that changes the math.

    The layout "saved" is what `published_config` writes.
    """
    rope, own, second, anchor = config.rope, config.own_parts, config.dflash2, config.predicts_from_anchor
    causal, window, windows = config.causal, config.window, {*config.window} - {0}
    is_mixed, hidden, top_k = len({*causal}) > 1, config.hidden_size, second.selector_top_k if second else 0
    scaled = config.output_multiplier != 1 or config.final_logit_softcapping != 0
    usual = 1 + 0.1 * math.log(rope.factor)  # what llama.cpp multiplies by
    is_usual = rope.truncate and math.isclose(rope.attention_scaling, usual, rel_tol=1e-6)
    layers = describe_layers(config)
    # fmt: off
    limits = [  # the layouts without a place for something, whether this drafter has it, and its name
        ("saved", config.scales_like_target, "logits that are scaled as the target's"),
        *(("speculators transformers", (value := getattr(config, key)) != NEUTRAL[key], f"{key} {value}")
          for key in SCALES),
        ("speculators transformers", config.attention_sinks, "attention sinks"),
        ("transformers gguf", config.attention_bias, "biases (attention_bias)"),
        ("saved speculators transformers gguf", "mask_embedding" in own, "a mask embedding"),
        ("saved transformers", "embed_tokens" in own, "its own embed_tokens"),
        ("transformers", "lm_head" in own, "its own lm_head"),
        ("gguf", own == ("embed_tokens",), "an embedding without its own head"),  # it would be the head too
        ("speculators", config.vocab_size is None, "no vocab_size in its config.json"),
        ("transformers", second, "the parts of DFlash 2"),
        ("speculators", second and config.draft_vocab_size, "the parts of DFlash 2 and a draft vocabulary"),
        ("published saved", second and anchor, "the parts of DFlash 2 and drafts from the anchor's row"),
        ("gguf", top_k * (top_k + 1) > hidden, f"selector_top_k {top_k} at hidden_size {hidden}"),
        ("transformers", anchor, "drafts from the anchor's row (DSpark)"),
        ("gguf", anchor and not config.markov_rank, "drafts from the anchor's row without a Markov head"),
        ("transformers", config.markov_rank, "a Markov head"),
        ("gguf", config.markov_rank and scaled, "scaled logits with a Markov head"),
        ("saved speculators transformers gguf", len(windows) > 1, f"several windows ({list(window)})"),
        ("transformers", 1 in windows, "a window of 1"),  # its cache keeps a position less: none
        ("transformers", any(causal), f"causal layers ({list(causal)})"),
        ("gguf", is_mixed, f"some causal layers ({list(causal)})"),
        ("saved", is_mixed and causal != tuple(map(bool, window)), f"several rules of causality ({list(causal)})"),
        ("speculators", (True, 0) in zip(causal, window, strict=True), f"causal full layers: {layers}"),
        ("gguf", rope.type == "llama3", "RoPE of type llama3"),
        ("gguf", rope.type == "yarn" and not is_usual, "RoPE of type yarn with its own truncate or attention_factor"),
    ]
    # fmt: on
    for layouts, applies, what in limits:
        if applies and layout in layouts.split():
            raise ValueError(_REFUSALS[layout].format(what))


def describe_layers(config: DraftConfig) -> str:
    """Say which layers are causal, and their windows."""
    return f"its layers are causal {list(config.causal)} with windows {list(config.window)}"


# ---------------------------------------------------------------------------------------------- published


def published_config(config: DraftConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the ``config.json`` that reads back as ``config``, in the published layout.

    Raises:
        ValueError: the layout cannot express something that changes the math.
    """
    check_layout(config, "saved")
    values = key_values(config)
    left_out = {name for name in ("is_causal", "draft_vocab_size") if values[name] is None}
    usual = "DFlashDraftModel" if config.dflash2 is None else "DFlash2DraftModel"
    out = {name: value for name, value in values.items() if KEYS[name].place == drafter_config.TOP} | {
        "architectures": [drafter_config.DSPARK_ARCHITECTURE if config.predicts_from_anchor else usual],
        "block_size": config.rows_per_pass,
        "dflash_config": _section(values),
        "dtype": str(dtype).removeprefix("torch."),
        "initializer_range": 0.02,
        "max_window_layers": config.num_hidden_layers,
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
        **_METADATA,
    }
    if _is_dspark(config):
        out["sample_from_anchor"] = config.predicts_from_anchor
        out |= {"markov_rank": config.markov_rank} if config.markov_rank else {}
    return {name: value for name, value in out.items() if name not in left_out}


def _section(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``dflash_config`` of a drafter, of its `key_values`."""
    return {key: values[key] for key in _SECTION if key in values and values[key] != NEUTRAL.get(key)}


_AT_THE_TOP = ("mask_token_id", "target_layer_ids", "markov_rank", "sample_from_anchor")
_AS_LOADED = {"is_neox_style": True, "rope_is_neox_style": True, "use_gemma_norm": False}


def _to_published(raw: Mapping[str, Any], read: DraftConfig) -> dict[str, Any]:
    """Return ``raw``, of which ``read`` was read, as published: each key where engines look, and its copies equal."""
    config = drafter_config.from_speculators(raw) if drafter_config.is_speculators(raw) else dict(raw)
    # 1. What may have been left to defaults, or stood at the top level only, where vLLM does not look
    inner, values = dict(config.get("dflash_config") or {}), key_values(read)
    for level in (config, inner):
        level.update({key: values[key] for key in _SECTION if key in values and key in level})
    config["dflash_config"] = inner | _section(values)
    config["block_size"] = read.rows_per_pass
    if config.get("rope_theta") is not None:
        config["rope_theta"] = read.rope.theta  # the one in rope_parameters counts, where there are two
    # 2. The one of two keys that SGLang reads
    if config.get("is_causal") is None and inner.get("causal") is not None:
        config["is_causal"] = inner["causal"]
    # 3. The taps as older engines count them: vLLM would take these instead
    config.pop("eagle_aux_hidden_state_layer_ids", None)
    # 4. The tensors are written as they are loaded: dense, for half-split RoPE, norms with their one
    config |= {name: value for name, value in _AS_LOADED.items() if name in config}
    for name in ("quantization_config", "compression_config"):
        config.pop(name, None)
    config.pop("torch_dtype", None)
    # 5. Of DSpark vLLM and SGLang know this class, and look for the head at the top only
    if _is_dspark(read):
        config |= {"architectures": [drafter_config.DSPARK_ARCHITECTURE], "markov_head_type": "vanilla"}
        config |= {key: values[key] for key in _AT_THE_TOP}
    return config


def _is_dspark(config: DraftConfig) -> bool:
    """Return True for a drafter without DFlash 2's parts that has a Markov head, or drafts from the anchor's row."""
    return config.dflash2 is None and bool(config.predicts_from_anchor or config.markov_rank)


# ---------------------------------------------------------------------------------------------- speculators

_LAYER_METADATA = ("attention_dropout", "initializer_range", "tie_word_embeddings", "use_cache")


def _to_speculators(
    published: Mapping[str, Any], config: DraftConfig, target: str, target_architectures: Sequence[str]
) -> dict[str, Any]:
    """Return the form of a published config, of which ``config`` was read, in the layout of the speculators library.

    ``target`` names the target, for engines started with the drafter only.
    """
    values = key_values(config)
    # 1. The type, and the keys that only it has
    kind, architecture, settings = "dflash", "DFlashDraftModel", {}
    if config.dflash2 is not None:
        kind, architecture = "dflash2", "DFlash2DraftModel"
        settings = {key: values[key] for key in (*drafter_config.DFLASH2_KEYS, "sample_from_anchor")}
    elif _is_dspark(config):
        kind, architecture = "dspark", "DSparkSpeculator"
        settings = {key: values[key] for key in ("markov_rank", "sample_from_anchor")} | {"markov_head_type": "vanilla"}
        settings |= {"enable_confidence_head": False, "confidence_head_with_markov": False}  # that head is not read
    # 2. The transformer's keys
    names = [name for name, key in KEYS.items() if key.speculators == drafter_config.LAYER and name != "is_causal"]
    layer = {name: published[name] for name in (*_LAYER_METADATA, *names) if published.get(name) is not None}
    layer |= {name: values[name] for name in ("model_type", "head_dim", "layer_types", "use_sliding_window")}
    layer["sliding_window"] = values["sliding_window"]
    if config.num_target_layers is not None:
        layer["num_target_layers"] = config.num_target_layers
    if len(set(config.causal)) == 1:
        layer["is_causal"] = config.causal[0]  # vLLM looks here first
    # 3. All of it
    method = {"proposal_type": "greedy", "speculative_tokens": max(config.block_size - 1, 1)}
    out = {
        "architectures": [architecture],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.rows_per_pass,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": not any(config.causal),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"accept_tolerance": 0.0, "verifier_accept_k": 1}],
            "verifier": {"architectures": list(target_architectures), "name_or_path": target},
        },
        "speculators_model_type": kind,
        "tie_word_embeddings": False,
        drafter_config.LAYER: layer,
    } | settings
    if vllm_causality(out, config.num_hidden_layers) != config.causal:
        what = f"vLLM reads one rule of causality, and of this drafter {describe_layers(config)}"
        raise ValueError(f"{what}: use the published layout")
    return out


def vllm_causality(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return which layers of a checkpoint in the speculators layout vLLM 0.33 runs causally.

    Its order: ``is_causal`` of ``transformer_layer_config``; ``sliding_window_non_causal``, which it does not read for
    the type dspark; else sliding layers are causal.
    """
    layer = config[drafter_config.LAYER]
    rule = layer.get("is_causal")
    if rule is None and config["speculators_model_type"] != "dspark":
        rule = not config.get("sliding_window_non_causal", True)  # so a key that is null means causal
    if rule is not None:
        return (bool(rule),) * num_layers
    kinds = layer.get("layer_types") or [drafter_config.FULL] * num_layers
    return tuple(kind == drafter_config.SLIDING for kind in kinds)


# ---------------------------------------------------------------------------------------------- transformers

_TENSOR_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
# Written where no layer has a window: transformers wants an integer, and does not use it then.
_UNUSED_WINDOW = 2048


def _to_transformers(config: DraftConfig) -> dict[str, Any]:
    """Return the ``config.json`` of transformers' drafter class."""
    values = key_values(config)
    names = ["hidden_act", "layer_types", *(name for name, key in KEYS.items() if key.muse is not None)]
    out = {name: values[name] for name in names} | _METADATA
    out |= {"architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant"}
    # The query's own position is not counted.
    out["sliding_window"] = max(config.window) - 1 if any(config.window) else _UNUSED_WINDOW
    if config.max_position_embeddings is None:
        del out["max_position_embeddings"]
    return out


# ---------------------------------------------------------------------------------------------- serving engines

# Read from vLLM 0.33: model_executor/models/qwen3_dflash.py has none of these keys, qwen3_dflash2.py has all.
_IGNORED_BY_VLLM = {
    "input_embedding_scale": "it accepts fewer drafts there",
    "output_multiplier": "drafts are sampled from another distribution there; greedy drafts are the same",
    "final_logit_softcapping": "drafts are sampled from another distribution there; greedy drafts are the same",
}


def engine_warnings(config: DraftConfig) -> list[str]:
    """Return what serving engines would read differently in this drafter, a sentence per difference."""
    if config.dflash2 is not None:
        if not config.predicts_from_anchor:
            return []
        return ["vLLM refuses DFlash 2 drafters whose anchor's row predicts (sample_from_anchor), as this one's does"]
    return [
        f"vLLM ignores {key} of drafters of the first generation, and this one has {getattr(config, key)}: {effect}"
        for key, effect in _IGNORED_BY_VLLM.items()
        if getattr(config, key) != getattr(DraftConfig, key)
    ]


def _speculators_warnings(raw: Mapping[str, Any], config: DraftConfig) -> list[str]:
    """Return how vLLM reads the causality of a checkpoint differently than this package and the speculators library."""
    is_theirs = drafter_config.is_speculators(raw)
    if not is_theirs or (theirs := vllm_causality(raw, config.num_hidden_layers)) == config.causal:
        return []
    key = "sliding_window_non_causal"
    given = json.dumps(raw[key]) if key in raw else "missing"
    reason = f"it reads one rule for all layers, and {key} is {given} there"
    if raw["speculators_model_type"] == "dspark":
        reason = f"it does not read {key} of DSpark drafters"
    return [
        f"vLLM takes the layers of the original checkpoint for causal {list(theirs)}, because {reason}. The "
        f"speculators library and this package read {list(config.causal)}, which the exported folder says"
    ]


def vllm_command(target: str, draft: str | os.PathLike, config: DraftConfig) -> str:
    """Return the command that serves a pair with vLLM. Both are named, so they may be folders or repositories."""
    # A method that is named keeps vLLM from looking at the checkpoint's type.
    method = "dspark" if _is_dspark(config) else "dflash"
    drafts = {"method": method, "model": os.fspath(draft), "num_speculative_tokens": max(config.block_size - 1, 1)}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(drafts))}"


# ---------------------------------------------------------------------------------------------- GGUF

FLOATING = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
QUANTIZED = "q8_0"
_TOKENS, _KINDS, _SCORES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores"))
_NORMAL, _CONTROL, _OWN, _UNUSED = 1, 3, 4, 5  # kinds of tokens
_UNUSED_SCORE = -10000.0
_POSITIONS = 2**17  # llama.cpp needs a number, also where neither config has one


class GgufTarget(NamedTuple):
    """Facts about the target that a drafter's file states."""

    tokenizer: dict[str, tuple[Any, ...]]  # key -> value, and the type it has in the file, or nothing
    hidden_size: int
    num_layers: int
    positions: int | None
    is_mrope: bool


def read_gguf_target(pretrained: Pretrained) -> GgufTarget:
    """Read the target of a drafter. Raises ValueError if its tokenizer cannot be written."""
    if pretrained.gguf is None:
        config = pretrained.load_config().get_text_config(decoder=True)
        rope = getattr(config, "rope_parameters", None) or {}
        sizes = config.hidden_size, config.num_hidden_layers, getattr(config, "max_position_embeddings", None)
        return GgufTarget(_byte_level(pretrained, config.vocab_size), *sizes, "mrope_section" in rope)
    file, kinds = pretrained.gguf, gguf.require_gguf().GGUFValueType
    keys = ("embedding_length", "block_count", "context_length", "rope.dimension_sections")
    hidden, layers, positions, sections = (file.metadata.get(f"{file.architecture}.{key}") for key in keys)
    stated = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
    tokenizer = {key: (value, *map(kinds, file.types[key])) for key, value in stated.items()}
    return GgufTarget(tokenizer, hidden, layers, positions, any(sections or ()))


def _byte_level(pretrained: Pretrained, size: int) -> dict[str, tuple[Any, ...]]:
    """Return the metadata of a byte-level BPE tokenizer for ``size`` tokens. Raises ValueError for other kinds."""
    tokenizer = pretrained.load_tokenizer()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = {"model": {}, "decoder": None} if backend is None else json.loads(backend.to_str())
    if (kind := state["model"].get("type")) != "BPE" or "ByteLevel" not in json.dumps(state["decoder"]):
        name = terminal.printable(pretrained.name)
        raise ValueError(
            f"{name}: only byte-level BPE tokenizers are written, and this is {kind or 'another'}: "
            "convert the target to GGUF with llama.cpp, and give that file as --target"
        )
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    if not texts.keys() - tokenizer.added_tokens_decoder.keys():  # what transformers makes of a config alone
        raise ValueError(f"{terminal.printable(pretrained.name)} has no tokenizer: its files are missing")
    size, kinds = max(size, max(texts) + 1), dict.fromkeys(texts, _NORMAL)
    kinds |= {index: _CONTROL if token.special else _OWN for index, token in tokenizer.added_tokens_decoder.items()}
    out = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",  # how text is split: drafters get ids only
        _TOKENS: [texts.get(index, f"[PAD{index}]") for index in range(size)],
        _KINDS: [kinds.get(index, _UNUSED) for index in range(size)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
    }
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    out |= {f"tokenizer.ggml.{name}_token_id": getattr(tokenizer, f"{key}_token_id") for key, name in names.items()}
    return {key: (value,) for key, value in out.items() if value not in (None, [])}


def gguf_metadata(config: DraftConfig, target: GgufTarget) -> dict[str, tuple[Any, ...]]:
    """Return the metadata of a drafter's file: key -> value, and its type if it is not the usual one.

    Raises:
        ValueError: the drafter does not fit the target, or llama.cpp cannot run it as it is.
    """
    # 1. Refuse what does not fit
    last, tokens = max(config.target_layer_ids), len(target.tokenizer.get(_TOKENS, [()])[0])
    if config.hidden_size != target.hidden_size or last >= target.num_layers:
        what = f"layer {last} of a target that is {config.hidden_size} wide"
        has = f"has {target.num_layers} layers and is {target.hidden_size} wide"
        raise ValueError(f"the drafter reads {what}, and this target {has}")
    rows = max(tokens, config.mask_token_id + 1) if config.vocab_size is None else config.vocab_size
    if not tokens or rows < tokens:
        raise ValueError(f"the target has {tokens} tokens, and the drafter's vocab_size is {rows}")
    # 2. Write the keys with other names, then those in another form
    values = key_values(config) | {"hidden_act": None, "is_causal": config.causal[0]}
    values["max_position_embeddings"] = config.max_position_embeddings or target.positions or _POSITIONS
    if not config.markov_rank:
        values["sample_from_anchor"] = None
    keys = gguf_draft.GGUF_KEYS.items()
    out = {key: values.get(name) for name, key in keys if values.get(name) != NEUTRAL.get(name)}
    out |= {"target_layers": [tap + 1 for tap in config.target_layer_ids], "attention.value_length": config.head_dim}
    if config.markov_rank:
        out["has_confidence_head"] = False
    if any(config.window):
        out["attention.sliding_window"] = max(config.window)
        out["attention.sliding_window_pattern"] = [window > 0 for window in config.window]
    if target.is_mrope:  # texts have the first of its positions only
        out["rope.dimension_sections"] = [config.head_dim // 2, 0, 0, 0]
    if config.rope.type != "default":
        out |= {"rope.scaling.type": config.rope.type, "rope.scaling.factor": config.rope.factor}
    if config.rope.type == "yarn":
        out["rope.scaling.original_context_length"] = config.rope.original_max_position_embeddings
        out |= {f"rope.scaling.yarn_{key}": getattr(config.rope, key) for key in ("beta_fast", "beta_slow")}
    metadata = {f"{gguf_draft.LLAMA_CPP}.{key}": (value,) for key, value in out.items() if value is not None}
    # 3. Add the tokenizer, with a token per row of the drafter's tables
    pads = {_TOKENS: lambda index: f"[PAD{index}]", _KINDS: lambda _: _UNUSED, _SCORES: lambda _: _UNUSED_SCORE}
    metadata |= target.tokenizer | {gguf_draft.MASK: (config.mask_token_id,)}
    for key in pads.keys() & metadata.keys():
        value, *types = metadata[key]
        metadata[key] = ([*value, *map(pads[key], range(len(value), rows))], *types)
    return metadata


def write_gguf(path: Path, drafter: Drafter, metadata: dict[str, tuple[Any, ...]], *, is_quantized: bool) -> None:
    """Write the file. Matrices keep the drafter's dtype, or become Q8_0; norms and kernels are float32 there."""
    library = gguf.require_gguf()
    writer, kinds = library.GGUFWriter(path, gguf_draft.LLAMA_CPP), library.GGMLQuantizationType
    types = library.GGUFValueType
    kind = "Q8_0" if is_quantized else FLOATING[drafter.dtype]
    writer.add_file_type(library.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    if is_quantized:
        writer.add_quantization_version(library.GGML_QUANT_VERSION)
    for key, (value, *stored) in metadata.items():
        usual = types.UINT32 if type(value) is int else types.get_type(value)
        writer.add_key_value(key, value, *stored or [usual])
    names = gguf_draft.tensor_names(drafter.config.num_hidden_layers)
    for name, tensor in drafter.state_dict().items():
        if name == "d2t":
            writer.add_tensor(name, target_ids(tensor).cpu().numpy(), raw_dtype=kinds.I64)
        else:
            form = kinds[_kind(names[name], tensor, kind)]
            values = library.quants.quantize(tensor.float().cpu().contiguous().numpy(), form)
            writer.add_tensor(names[name], values, raw_dtype=form)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _kind(name: str, tensor: Tensor, kind: str) -> str:
    if tensor.dim() == 1 or not name.endswith(".weight"):
        return "F32"
    return "F16" if kind == "Q8_0" and tensor.shape[-1] % 32 else kind  # as llama.cpp's converter


# ---------------------------------------------------------------------------------------------- export


def export(
    draft: str | os.PathLike,
    out: str | os.PathLike,
    layout: str,
    *,
    target: str | None = None,
    dtype: torch.dtype | Literal["q8_0"] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Write a drafter in the published, the speculators or transformers' layout, or as a GGUF file for llama.cpp.

    Warns of what engines read differently, and of targets that vLLM does not find by itself.

    Args:
        draft: a folder or a hub repository, in the published or the speculators layout, or a GGUF file.
        out: a folder that does not exist or is empty, or ``FILE.gguf`` that does not exist. It is written atomically.
        layout: ``"published"`` (the reference package, SGLang, vLLM), ``"speculators"`` (vLLM, speculators),
            ``"transformers"`` (``generate(speculation_type="dflash")``) or ``"gguf"`` (llama.cpp).
        target: folder, hub repository or GGUF file of the target. The speculators layout stores its name; a folder is
            stored with its absolute path. A GGUF file carries its tokenizer.
        dtype: dtype of the written weights, for ``"gguf"`` also ``"q8_0"``; None keeps them bit for bit.
        revision: revision of the hub repository.
        trust_remote_code: run the Python code that comes with the target's tokenizer, for ``"gguf"``.

    Raises:
        FileNotFoundError, ValueError: the drafter or the target does not exist or cannot be read, ``out`` is taken, or
            the layout cannot describe the drafter. Nothing is written.
        OSError: the disk is full or cannot be written.
    """
    # 1. Check the arguments
    if layout not in FORMATS:
        raise ValueError(f"the format must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {layout!r}")
    if layout == "speculators" and not target:
        raise ValueError("the speculators layout stores the target's name: give it (--target)")
    if layout == "gguf" and not target:
        raise ValueError("a GGUF file carries the target's tokenizer: give its folder, name or GGUF file (--target)")
    out, is_quantized = Path(out), dtype == QUANTIZED
    if layout != "gguf" and is_quantized:
        raise ValueError(f"{QUANTIZED} is for the format gguf: the layout {layout} has no quantized drafters")
    if layout == "gguf" and (out.suffix != ".gguf" or out.exists()):
        raise ValueError(f"{out} must be the name of a file.gguf that does not exist: choose another")
    if layout != "gguf" and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder: choose another")
    files.check_writable(out.parent)
    # 2. Read the drafter, and describe it in the layout. A target in a folder is found from any folder
    path = find_draft(draft, revision)
    drafter = load_draft(path, dtype=None if isinstance(dtype, str) else dtype, keeps_blocks=False)
    read, verifier = drafter.config, target or ""
    if read.scales_like_target:
        why = "its logits are scaled as the target's"
        raise ValueError(f"a Muse Glimmer assistant cannot be exported: {why}. transformers reads its folder as it is")
    check_layout(read, layout)
    if layout == "gguf":
        _export_gguf(out, drafter, Pretrained(verifier, trust_remote_code), is_quantized)
        return out
    raw = read_draft_config(path)
    config = _to_transformers(read) if layout == "transformers" else _to_published(raw, read)
    if layout == "speculators":
        verifier_config, architectures = Path(verifier).expanduser() / "config.json", []
        if verifier_config.is_file():
            verifier = str(verifier_config.parent.resolve())
            architectures = files.read_architectures(files.read_json(verifier_config), verifier_config)
        config = _to_speculators(config, read, verifier, architectures)
    config["dtype"] = str(drafter.dtype).removeprefix("torch.")
    # 3. Write it
    with one_line_errors(f"{out} could not be written"):
        _write(out, config, drafter, _TENSOR_NAMES if layout == "transformers" else {})
    # 4. Say what engines read differently
    differences = _speculators_warnings(raw, drafter.config)
    if layout != "transformers":
        differences += engine_warnings(drafter.config)
    if layout == "speculators" and Path(verifier).is_absolute():
        differences.append(
            "vLLM looks for the target of a speculators checkpoint on the hub only, and this target is a folder: start "
            "it with " + vllm_command(verifier, out.absolute(), drafter.config)
        )
    for difference in differences:
        warnings.warn(difference, UserWarning, stacklevel=2)
    return out


def _export_gguf(out: Path, drafter: Drafter, pretrained: Pretrained, is_quantized: bool) -> None:
    if drafter.dtype not in FLOATING:
        raise ValueError(f"a GGUF drafter must be float32, float16 or bfloat16, got {drafter.dtype}: give its dtype")
    target = read_gguf_target(pretrained)
    metadata = gguf_metadata(drafter.config, target)
    with one_line_errors(f"{out} could not be written"):
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(out, lambda path: write_gguf(path, drafter, metadata, is_quantized=is_quantized))
    if max(drafter.config.target_layer_ids) == target.num_layers - 1:
        what = "llama.cpp reads a target's last layer for a few architectures only (DeepSeek-V4, MiMo2, Nemotron-H)"
        warnings.warn(f"{what}, and this drafter reads it: layer {target.num_layers - 1}", UserWarning, stacklevel=3)


def _write(out: Path, config: dict[str, Any], drafter: Drafter, names: Mapping[str, str]) -> None:
    """Write a checkpoint's folder. ``names`` has the tensors that the layout calls differently."""
    tensors = {names.get(name, name): part.detach().contiguous().clone() for name, part in drafter.state_dict().items()}
    mask_embedding = tensors.pop("mask_embedding", None)
    with atomic_folder(out) as unfinished:
        save_tensors(tensors, unfinished / "model.safetensors", {"format": "pt"})
        if mask_embedding is not None:  # engines read it from a separate file
            content = {"embedding": mask_embedding, "mask_token_id": drafter.config.mask_token_id}
            torch.save(content, unfinished / MASK_EMBEDDING_FILE)
        write_json(config, unfinished / "config.json")
