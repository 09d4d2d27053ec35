"""Write drafters in each checkpoint layout, say what serving engines read differently, and `export`.

`dflash.drafter.config` reads these layouts.
"""

from __future__ import annotations

import json
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from dflash import DraftConfig, Drafter, load_draft
from dflash.internals import MASK_EMBEDDING_FILE, Pretrained, drafter_config, files, find_draft, read_draft_config

from .files import atomic_folder, one_line_errors, save_tensors, write_json
from .gguf import FLOATING, QUANTIZED, gguf_metadata, read_gguf_target, write_gguf
from .layouts import KEYS, NEUTRAL, SCALES, check_layout, describe_layers, key_values

FORMATS = ("published", "speculators", "transformers", "gguf")
# vLLM looks for these keys only in dflash_config.
_SECTION = ("mask_token_id", "target_layer_ids", *SCALES, "attention_sink_bias", *drafter_config.DFLASH2_KEYS)
_METADATA = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")) | {"attention_dropout": 0.0}


# ---------------------------------------------------------------------------------------------- published


def published_config(config: DraftConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the ``config.json`` that reads back as ``config``, in the published layout.

    Raises:
        ValueError: the layout cannot express something that changes the math.
    """
    check_layout(config, "saved")
    values = key_values(config)
    left_out = {name for name in ("is_causal", "draft_vocab_size") if values[name] is None}
    out = {name: value for name, value in values.items() if KEYS[name].place == drafter_config.TOP} | {
        "architectures": ["DFlashDraftModel" if config.dflash2 is None else "DFlash2DraftModel"],
        "block_size": config.block_size,
        "dflash_config": _section(values),
        "dtype": str(dtype).removeprefix("torch."),
        "initializer_range": 0.02,
        "max_window_layers": config.num_hidden_layers,
        "num_target_layers": config.num_target_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
        **_METADATA,
    }
    if config.markov_rank:
        out |= {"markov_rank": config.markov_rank, "sample_from_anchor": False}
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
