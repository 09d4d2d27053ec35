"""Drafters in each checkpoint layout, what serving engines read differently, and `export`."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..drafter import (
    FULL,
    MASK_EMBEDDING_FILE,
    SLIDING,
    DraftConfig,
    Drafter,
    Rope,
    draft_folder,
    from_speculators,
    is_speculators,
    load_draft,
)
from ..files import atomic_folder, check_writable, read_architectures, read_json, save_tensors, write_json
from ..terminal import listed
from .speculators_layout import SCALES, to_speculators, vllm_causality

FORMATS = ("published", "speculators", "transformers")
# Values of a dflash_config that say nothing.
_NEUTRAL = {
    "attention_value_scale": 1.0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "attention_sink_bias": False,
}

_SHAPE = (
    *("block_size", "head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"),
    "rms_norm_eps",
)


def _shape(config: DraftConfig) -> dict[str, Any]:
    """Return the keys that transformers' configs share."""
    return {
        **{key: getattr(config, key) for key in _SHAPE},
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "layer_types": [SLIDING if window else FULL for window in config.window],
        "num_key_value_heads": config.num_kv_heads,
        "rope_parameters": rope_section(config.rope),
    }


# ---------------------------------------------------------------------------------------------- published


def published_config(config: DraftConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the ``config.json`` that reads back as ``config``, in the published layout; see ``from_config``."""
    by_window = tuple(window > 0 for window in config.window)
    _expect_expressible(config, by_window)
    out: dict[str, Any] = {
        **_shape(config),
        "architectures": ["DFlashDraftModel" if config.dflash2 is None else "DFlash2DraftModel"],
        "attention_bias": config.attention_bias,
        "dflash_config": dflash_section(config),
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
    return out if config.causal == by_window else out | {"is_causal": config.causal[0]}


def _expect_expressible(config: DraftConfig, by_window: tuple[bool, ...]) -> None:
    """Raise unless `published_config` can express everything that changes the math."""
    if config.scales_like_target:
        raise ValueError("a Muse Glimmer assistant cannot be saved: its logits are scaled as the target's")
    if config.own_parts:
        raise ValueError(f"a drafter with its own {listed(config.own_parts)} cannot be saved here: use dflash export")
    if config.markov_rank or config.predicts_from_anchor:
        raise ValueError("a DSpark drafter cannot be saved here: use dflash export")
    windows = {window for window in config.window if window}
    if len(windows) > 1 or (len(set(config.causal)) > 1 and config.causal != by_window):
        raise ValueError(f"the published layout has one window and one rule of causality, got {config}")


def rope_section(rope: Rope) -> dict[str, Any]:
    """Return the ``rope_parameters`` that read back as ``rope``."""
    out: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type != "default":
        out["factor"] = rope.factor
    if rope.type in ("llama3", "yarn"):
        out["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.type == "llama3":
        out |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        out |= {key: getattr(rope, key) for key in ("beta_fast", "beta_slow", "truncate")}
        out["attention_factor"] = rope.attention_scaling
    return out


def dflash_section(config: DraftConfig) -> dict[str, Any]:
    """Return the ``dflash_config`` that reads back as ``config``. vLLM looks for most of these keys only there."""
    values = section_values(config)
    return {key: value for key, value in values.items() if key not in _NEUTRAL or value != _NEUTRAL[key]}


def section_values(config: DraftConfig) -> dict[str, Any]:
    """Return every key that a ``dflash_config`` may state of a drafter, neutral values included."""
    out: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    out |= {key: getattr(config, key) for key in _NEUTRAL if key != "attention_sink_bias"}
    if config.dflash2 is not None:
        out |= dataclasses.asdict(config.dflash2)
    return out | {"attention_sink_bias": config.attention_sinks}


# ---------------------------------------------------------------------------------------------- transformers

TENSOR_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
# Written where no layer has a window: transformers wants an integer, and does not use it then.
_UNUSED_WINDOW = 2048
# Its cache keeps sliding_window - 1 positions, which must not be negative.
_SMALLEST_WINDOW = 2


def to_transformers(config: DraftConfig) -> dict[str, Any]:
    """Return the ``config.json`` of the DFlash drafter in transformers, `MuseGlimmerAssistantModel`.

    Raises:
        ValueError: that class cannot express something that changes the math.
    """
    _expect_transformers(config)
    # Its windows do not count the query's own position.
    window = max(config.window) - 1 if any(config.window) else _UNUSED_WINDOW
    out = {
        **_shape(config),
        "architectures": ["MuseGlimmerAssistantModel"],
        "mask_token_id": config.mask_token_id,
        "model_type": "muse_glimmer_assistant",
        "sliding_window": window,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.max_position_embeddings is not None:
        out["max_position_embeddings"] = config.max_position_embeddings
    return out


def _expect_transformers(config: DraftConfig) -> None:
    """Raise unless transformers' class can express everything that changes the math."""
    what = "transformers' drafter class"
    if config.scales_like_target:
        raise ValueError("a Muse Glimmer assistant is in transformers' layout already: use its folder as it is")
    if config.dflash2 is not None:
        raise ValueError(f"{what} is of the first generation, and this is a DFlash 2 drafter: use the published layout")
    if config.markov_rank or config.predicts_from_anchor:
        raise ValueError(f"{what} is of the first generation, and this is a DSpark drafter: use the published layout")
    if config.own_parts:
        raise ValueError(f"{what} uses the target's head and embedding, not this drafter's {listed(config.own_parts)}")
    config.expect_defaults(what, *SCALES, "attention_bias", "attention_sinks")
    if any(config.causal):
        raise ValueError(f"{what} is not causal inside a block, and this drafter's layers are {list(config.causal)}")
    if len(windows := set(config.window) - {0}) > 1:
        raise ValueError(f"{what} has one window, and this drafter has {list(config.window)}")
    if windows and min(windows) < _SMALLEST_WINDOW:
        raise ValueError(f"{what} needs a window of at least {_SMALLEST_WINDOW}, and this drafter has {min(windows)}")


# ---------------------------------------------------------------------------------------------- serving engines

# Read from vLLM 0.33: model_executor/models/qwen3_dflash.py has none of these keys, qwen3_dflash2.py has all.
_IGNORED_BY_VLLM = {
    "input_embedding_scale": (1.0, "it accepts fewer drafts there"),
    "output_multiplier": (1.0, "drafts are sampled from another distribution there; greedy drafts are the same"),
    "final_logit_softcapping": (0.0, "drafts are sampled from another distribution there; greedy drafts are the same"),
}


def engine_warnings(config: DraftConfig) -> list[str]:
    """Return what serving engines would read differently in this drafter, a sentence per difference."""
    if config.dflash2 is not None:
        if not config.predicts_from_anchor:
            return []
        return ["vLLM refuses DFlash 2 drafters whose anchor's row predicts (sample_from_anchor), as this one's does"]
    return [
        f"vLLM ignores {key} of drafters of the first generation, and this one has {getattr(config, key)}: {effect}"
        for key, (neutral, effect) in _IGNORED_BY_VLLM.items()
        if getattr(config, key) != neutral
    ]


def speculators_warnings(raw: Mapping[str, Any], config: DraftConfig) -> list[str]:
    """Return how vLLM reads the causality of a checkpoint in the speculators layout, where that differs.

    Args:
        raw: the parsed ``config.json`` of the checkpoint.
        config: what this package reads from it, as the speculators library does.
    """
    if not is_speculators(raw):
        return []
    theirs = vllm_causality(raw, config.num_hidden_layers)
    if theirs == config.causal:
        return []
    key = "sliding_window_non_causal"
    if raw["speculators_model_type"] == "dspark":
        reason = f"it does not read {key} of DSpark drafters"
    else:
        given = json.dumps(raw[key]) if key in raw else "missing"
        reason = f"it reads one rule for all layers, and {key} is {given} there"
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
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> Path:
    """Write a drafter in the published, the speculators or transformers' layout.

    Warns of what vLLM reads differently, and of targets that it does not find by itself.

    Args:
        draft: a folder or a hub repository, in the published or the speculators layout.
        out: a folder that does not exist or is empty. It is written atomically.
        layout: ``"published"`` (the reference package, SGLang, vLLM), ``"speculators"`` (vLLM, speculators) or
            ``"transformers"`` (``generate(speculation_type="dflash")``).
        target: folder or hub repository of the target, which the speculators layout stores. A folder is stored with
            its absolute path.
        dtype: dtype of the written weights; None keeps them bit for bit.
        revision: revision of the hub repository.

    Returns:
        ``out``.

    Raises:
        FileNotFoundError: the drafter does not exist.
        ValueError: the drafter cannot be read, ``out`` is not empty, or the layout cannot describe the drafter. Nothing
            is written.
        OSError: the disk is full or cannot be written.
    """
    # 1. Check the arguments
    if layout not in FORMATS:
        raise ValueError(f"the format must be {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {layout!r}")
    if layout == "speculators" and not target:
        raise ValueError("the speculators layout stores the target's name: give it (--target)")
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is not an empty folder: choose another")
    check_writable(out.parent)
    # 2. Read the drafter, and describe it in the layout
    folder = draft_folder(draft, revision)
    drafter = load_draft(folder, dtype=dtype)
    raw = read_json(folder / "config.json")
    verifier, architectures = _verifier(target) if layout == "speculators" else ("", [])
    config = _config(raw, drafter, layout, verifier, architectures)
    # 3. Write it
    try:
        _write(out, config, drafter, TENSOR_NAMES if layout == "transformers" else {})
    except Exception as error:
        raise OSError(f"{out} could not be written: {' '.join(str(error).split())}") from error
    # 4. Say what engines read differently
    differences = speculators_warnings(raw, drafter.config)
    if layout != "transformers":
        differences += engine_warnings(drafter.config)
    if Path(verifier).is_absolute():
        differences.append(
            "vLLM looks for the target of a speculators checkpoint on the hub only, and this target is a folder: start "
            "it with " + vllm_command(verifier, out.absolute(), drafter.config)
        )
    for difference in differences:
        warnings.warn(difference, UserWarning, stacklevel=2)
    return out


def _write(out: Path, config: dict[str, Any], drafter: Drafter, names: Mapping[str, str]) -> None:
    """Write a checkpoint's folder. ``names`` has the tensors that the layout calls differently."""
    tensors = {names.get(name, name): part.detach().contiguous().clone() for name, part in drafter.state_dict().items()}
    mask_embedding = tensors.pop("mask_embedding", None)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(out) as unfinished:
        save_tensors(tensors, unfinished / "model.safetensors", {"format": "pt"})
        if mask_embedding is not None:  # engines read it from a file of its own
            content = {"embedding": mask_embedding, "mask_token_id": drafter.config.mask_token_id}
            torch.save(content, unfinished / MASK_EMBEDDING_FILE)
        write_json(config, unfinished / "config.json")


def _config(
    raw: Mapping[str, Any], drafter: Drafter, layout: str, verifier: str, architectures: list[str]
) -> dict[str, Any]:
    """Return the ``config.json`` to write for a drafter that was read from ``raw``."""
    dtype = str(drafter.dtype).removeprefix("torch.")
    if layout == "transformers":
        return to_transformers(drafter.config) | {"dtype": dtype}
    if drafter.config.scales_like_target:
        raise ValueError(
            "a Muse Glimmer assistant cannot be exported: the multiplier and the softcap of its logits are the "
            "target's, which no other layout can say"
        )
    if layout == "published" and drafter.config.predicts_from_anchor and drafter.config.dflash2 is not None:
        raise ValueError(
            "the published layout cannot say that the anchor's row of a DFlash 2 drafter predicts too, as this one's "
            "does: keep the speculators layout"
        )
    config = from_speculators(raw) if is_speculators(raw) else dict(raw)
    _state_what_was_read(config, drafter.config)
    if layout == "speculators":
        config = to_speculators(config, drafter.config, verifier, architectures)
    config.pop("torch_dtype", None)
    return config | {"dtype": dtype}


def _state_what_was_read(config: dict[str, Any], read: DraftConfig) -> None:
    """Write what was read from a published ``config`` to where engines look, and into every copy of a key."""
    # 1. What may have been left to defaults, or stood at the top level only, where vLLM does not look
    inner = dict(config.get("dflash_config") or {})
    values = section_values(read)
    for level in (config, inner):
        level.update({key: value for key, value in values.items() if key in level})
    config["dflash_config"] = inner | dflash_section(read)
    config["block_size"] = read.rows_per_pass
    if config.get("rope_theta") is not None:
        config["rope_theta"] = read.rope.theta  # the one in rope_parameters counts, where there are two
    # 2. The one of two keys that SGLang reads
    if config.get("is_causal") is None and inner.get("causal") is not None:
        config["is_causal"] = inner["causal"]
    # 3. The taps as older engines count them: vLLM would take these instead
    config.pop("eagle_aux_hidden_state_layer_ids", None)


def _verifier(target: str) -> tuple[str, list[str]]:
    """Return a target's name as an engine finds it from any folder, and the class names in its config.

    There are no class names for a repository that is not a local folder.
    """
    folder = Path(target).expanduser()
    path = folder / "config.json"
    if not path.is_file():
        return target, []
    return str(folder.resolve()), read_architectures(read_json(path), path)
