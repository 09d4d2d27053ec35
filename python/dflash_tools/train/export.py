"""Write drafters in each checkpoint layout, say what serving engines read differently, and `export`.

`dflash.drafter.config` reads these layouts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from dflash import DraftConfig, Drafter, load_draft
from dflash.internals import (
    MASK_EMBEDDING_FILE,
    Pretrained,
    drafter_config,
    files,
    find_draft,
    read_draft_config,
    terminal,
)

from .files import atomic_folder, one_line_errors, save_tensors, write_json
from .gguf import FLOATING, QUANTIZED, gguf_metadata, read_gguf_target, write_gguf

FORMATS = ("published", "speculators", "transformers", "gguf")
_SCALES = ("attention_value_scale", "input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_SHAPE = ("block_size", "head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")


def _shape(config: DraftConfig) -> dict[str, Any]:
    """Return the keys that transformers' configs share."""
    rope = config.rope
    settings = {"rope_type": rope.type, "rope_theta": rope.theta}
    settings |= {key: getattr(rope, key) for key in drafter_config.ROPE_TYPES[rope.type]}
    settings |= {"attention_factor": rope.attention_scaling} if rope.type == "yarn" else {}
    return {
        **{key: getattr(config, key) for key in (*_SHAPE, "rms_norm_eps")},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "layer_types": [drafter_config.SLIDING if window else drafter_config.FULL for window in config.window],
        "num_key_value_heads": config.num_kv_heads,
        "rope_parameters": settings,
    }


# ---------------------------------------------------------------------------------------------- published


def published_config(config: DraftConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the ``config.json`` that reads back as ``config``, in the published layout.

    Raises:
        ValueError: the layout cannot express something that changes the math.
    """
    if config.scales_like_target:
        raise ValueError("a Muse Glimmer assistant cannot be saved: its logits are scaled as the target's")
    if own := set(config.own_parts) - {"lm_head"}:
        raise ValueError(f"a drafter with its own {terminal.listed(own)} cannot be saved here: use dflash export")
    if config.predicts_from_anchor:
        raise ValueError("a DSpark drafter cannot be saved here: use dflash export")
    by_window = tuple(window > 0 for window in config.window)
    if len({*config.window} - {0}) > 1 or (len({*config.causal}) > 1 and config.causal != by_window):
        raise ValueError(f"the published layout has one window and one rule of causality, got {config}")
    out: dict[str, Any] = {
        **_shape(config),
        "architectures": ["DFlashDraftModel" if config.dflash2 is None else "DFlash2DraftModel"],
        "attention_bias": config.attention_bias,
        "dflash_config": _section(config),
        "dtype": str(dtype).removeprefix("torch."),
        "initializer_range": 0.02,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "num_target_layers": config.num_target_layers,
        "rope_theta": config.rope.theta,
        "sliding_window": max(config.window) or None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": any(by_window),
        "vocab_size": config.vocab_size,
    }
    if config.draft_vocab_size is not None:
        out["draft_vocab_size"] = config.draft_vocab_size
    if config.markov_rank:
        out |= {"markov_rank": config.markov_rank, "sample_from_anchor": False}
    return out if config.causal == by_window else out | {"is_causal": config.causal[0]}


def _section(config: DraftConfig) -> dict[str, Any]:
    """Return the ``dflash_config`` of a drafter. vLLM looks for most of these keys only there."""
    neutral = {key: getattr(DraftConfig, key) for key in _SCALES} | {"attention_sink_bias": False}
    return {key: value for key, value in _section_values(config).items() if value != neutral.get(key)}


def _section_values(config: DraftConfig) -> dict[str, Any]:
    """Return every key that a ``dflash_config`` may state of a drafter, neutral values included."""
    out: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    out |= {key: getattr(config, key) for key in _SCALES} | {"attention_sink_bias": config.attention_sinks}
    return out | (dataclasses.asdict(config.dflash2) if config.dflash2 is not None else {})


def _to_published(raw: Mapping[str, Any], read: DraftConfig, layout: str) -> dict[str, Any]:
    """Return ``raw``, of which ``read`` was read, as published: each key where engines look, and its copies equal."""
    if read.scales_like_target:
        raise ValueError("a Muse Glimmer assistant cannot be exported: its logits are scaled as the target's")
    if layout == "published" and read.predicts_from_anchor and read.dflash2 is not None:
        raise ValueError("published DFlash 2 drafters predict nothing from the anchor: keep the speculators layout")
    config = drafter_config.from_speculators(raw) if drafter_config.is_speculators(raw) else dict(raw)
    # 1. What may have been left to defaults, or stood at the top level only, where vLLM does not look
    inner, values = dict(config.get("dflash_config") or {}), _section_values(read)
    for level in (config, inner):
        level.update({key: value for key, value in values.items() if key in level})
    config["dflash_config"] = inner | _section(read)
    config["block_size"] = read.rows_per_pass
    if config.get("rope_theta") is not None:
        config["rope_theta"] = read.rope.theta  # the one in rope_parameters counts, where there are two
    # 2. The one of two keys that SGLang reads
    if config.get("is_causal") is None and inner.get("causal") is not None:
        config["is_causal"] = inner["causal"]
    # 3. The taps as older engines count them: vLLM would take these instead
    config.pop("eagle_aux_hidden_state_layer_ids", None)
    config.pop("torch_dtype", None)
    return config


# ---------------------------------------------------------------------------------------------- speculators

_LAYER_METADATA = ("attention_dropout", "initializer_range", "tie_word_embeddings", "use_cache")


def _to_speculators(
    published: Mapping[str, Any], config: DraftConfig, target: str, target_architectures: Sequence[str]
) -> dict[str, Any]:
    """Return the form of a published config, of which ``config`` was read, in the layout of the speculators library.

    ``target`` names the target, for engines started with the drafter only.
    """
    _expect_speculators(config)
    # 1. The type, and the keys that only it has
    kind, architecture, settings = "dflash", "DFlashDraftModel", {}
    from_anchor = {"sample_from_anchor": config.predicts_from_anchor}
    if config.dflash2 is not None:
        kind, architecture = "dflash2", "DFlash2DraftModel"
        settings = dataclasses.asdict(config.dflash2) | from_anchor
    elif config.markov_rank or config.predicts_from_anchor:
        kind, architecture = "dspark", "DSparkSpeculator"
        settings = {"markov_rank": config.markov_rank, "markov_head_type": "vanilla", **from_anchor}
        settings |= {"enable_confidence_head": False, "confidence_head_with_markov": False}  # that head is not read
    # 2. The transformer's keys
    window = max(config.window)
    names = [
        *_LAYER_METADATA,
        *(name for name, key in drafter_config.KEYS.items() if key.speculators == drafter_config.LAYER),
    ]
    layer = {name: published[name] for name in names if published.get(name) is not None and name != "is_causal"}
    layer |= {
        "model_type": "qwen3",
        "head_dim": config.head_dim,
        "layer_types": [drafter_config.SLIDING if size else drafter_config.FULL for size in config.window],
        "sliding_window": window or None,
        "use_sliding_window": window > 0,
    }
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
        raise ValueError(f"vLLM reads one rule of causality, and {_causality(config)}: use the published layout")
    return out


def _expect_speculators(config: DraftConfig) -> None:
    """Raise unless the speculators layout can express everything that changes the math."""
    if config.dflash2 is not None and config.draft_vocab_size is not None:
        raise ValueError("a DFlash 2 drafter of the speculators layout has the whole vocabulary, and this one a part")
    if "mask_embedding" in config.own_parts:
        raise ValueError("the speculators layout has no mask embedding, and this drafter has its own")
    _expect_defaults(config, "the speculators layout", *_SCALES, "attention_sinks")
    if config.vocab_size is None:
        raise ValueError("the speculators layout needs vocab_size, which is missing in this drafter's config.json")
    if len(set(config.window) - {0}) > 1:
        raise ValueError(f"the speculators layout has one window, and this drafter has {list(config.window)}")
    if any(causal and not window for causal, window in zip(config.causal, config.window, strict=True)):
        raise ValueError(f"full layers there are never causal, and {_causality(config)}: use the published layout")


def _expect_defaults(config: DraftConfig, layout: str, *names: str) -> None:
    """Raise unless these fields have their defaults, for a layout that has no keys for them."""
    for name in names:
        if (value := getattr(config, name)) != getattr(DraftConfig, name):
            raise ValueError(f"{layout} has no {name}, and this drafter has {value}")


def _causality(config: DraftConfig) -> str:
    return f"this drafter's layers are causal {list(config.causal)} with windows {list(config.window)}"


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
    return tuple(
        kind == drafter_config.SLIDING for kind in layer.get("layer_types") or [drafter_config.FULL] * num_layers
    )


# ---------------------------------------------------------------------------------------------- transformers

_TENSOR_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
# Written where no layer has a window: transformers wants an integer, and does not use it then.
_UNUSED_WINDOW = 2048
# Its cache keeps sliding_window - 1 positions, which must not be negative.
_SMALLEST_WINDOW = 2


def _to_transformers(config: DraftConfig) -> dict[str, Any]:
    """Return the ``config.json`` of transformers' drafter class, or raise if it cannot express this drafter."""
    what, windows = "transformers' drafter class", set(config.window) - {0}
    if config.scales_like_target:
        raise ValueError("a Muse Glimmer assistant is in transformers' layout already: use its folder as it is")
    if config.dflash2 is not None or config.markov_rank or config.predicts_from_anchor:
        kind = "DSpark" if config.dflash2 is None else "DFlash 2"
        raise ValueError(f"{what} is of the first generation, and this is a {kind} drafter: use the published layout")
    if config.own_parts:
        raise ValueError(
            f"{what} uses the target's head and embedding, not this drafter's {terminal.listed(config.own_parts)}"
        )
    _expect_defaults(config, what, *_SCALES, "attention_bias", "attention_sinks")
    if any(config.causal):
        raise ValueError(f"{what} is not causal inside a block, and this drafter's layers are {list(config.causal)}")
    if len(windows) > 1:
        raise ValueError(f"{what} has one window, and this drafter has {list(config.window)}")
    if windows and min(windows) < _SMALLEST_WINDOW:
        raise ValueError(f"{what} needs a window of at least {_SMALLEST_WINDOW}, and this drafter has {min(windows)}")
    out = {
        **_shape(config),
        "architectures": ["MuseGlimmerAssistantModel"],
        "mask_token_id": config.mask_token_id,
        "model_type": "muse_glimmer_assistant",
        "sliding_window": max(windows) - 1 if windows else _UNUSED_WINDOW,  # the query's own position is not counted
        "target_layer_ids": list(config.target_layer_ids),
    }
    longest = config.max_position_embeddings
    return out if longest is None else out | {"max_position_embeddings": longest}


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
    if (
        not drafter_config.is_speculators(raw)
        or (theirs := vllm_causality(raw, config.num_hidden_layers)) == config.causal
    ):
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
    is_dspark = config.dflash2 is None and (config.predicts_from_anchor or config.markov_rank)
    method = "dspark" if is_dspark else "dflash"
    drafts = {"method": method, "model": os.fspath(draft), "num_speculative_tokens": max(config.block_size - 1, 1)}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(drafts))}"


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
    drafter = load_draft(path, dtype=None if isinstance(dtype, str) else dtype)
    read, verifier = drafter.config, target or ""
    if layout == "gguf":
        _export_gguf(out, drafter, Pretrained(verifier, trust_remote_code), is_quantized)
        return out
    raw = read_draft_config(path)
    config = _to_transformers(read) if layout == "transformers" else _to_published(raw, read, layout)
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
        if mask_embedding is not None:  # engines read it from a file of its own
            content = {"embedding": mask_embedding, "mask_token_id": drafter.config.mask_token_id}
            torch.save(content, unfinished / MASK_EMBEDDING_FILE)
        write_json(config, unfinished / "config.json")
