"""Drafts in the published layout, and checkpoints that a run resumes from to the bit.

A checkpoint is a folder that appears whole or not at all: it is written under another name and renamed. Each one is a
draft that :func:`dflash.load_draft` reads, with the trainer's state beside it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from ..config import FULL, SLIDING, DraftConfig
from ..drafter import Drafter

__all__ = ["CheckpointError", "checkpoints", "load_checkpoint", "published_config", "save_checkpoint", "save_draft"]

_STATE, _PROGRESS, _PREFIX, _UNFINISHED = "trainer.pt", "trainer.json", "step-", ".unfinished-"
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class CheckpointError(OSError):
    """A checkpoint or a draft could not be written; what was there before is whole."""


def published_config(config: DraftConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The ``config.json`` of the published layout that reads back as ``config``; the inverse of ``from_config``."""
    windows = {window for window in config.window if window}
    if len(windows) > 1 or (len(set(config.causal)) > 1 and config.causal != tuple(w > 0 for w in config.window)):
        raise ValueError(f"the published layout has one window and one rule of causality, got {config}")
    sliding = bool(windows)
    rope: dict[str, Any] = {"rope_type": config.rope.type, "rope_theta": config.rope.theta}
    if config.rope.type != "default":
        rope["factor"] = config.rope.factor
    if config.rope.type in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = config.rope.original_max_position_embeddings
    if config.rope.type == "llama3":
        rope |= {"low_freq_factor": config.rope.low_freq_factor, "high_freq_factor": config.rope.high_freq_factor}
    if config.rope.type == "yarn":
        rope |= {key: getattr(config.rope, key) for key in ("beta_fast", "beta_slow", "truncate", "attention_scaling")}
        rope["attention_factor"] = rope.pop("attention_scaling")
    dflash: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    for key, neutral in (("input_embedding_scale", 1.0), ("output_multiplier", 1.0), ("final_logit_softcapping", 0.0)):
        if getattr(config, key) != neutral:
            dflash[key] = getattr(config, key)
    out: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "bos_token_id": None,
        "dflash_config": dflash,
        "dtype": _DTYPES[dtype],
        "eos_token_id": None,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": [SLIDING if window else FULL for window in config.window],
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.num_target_layers,
        "pad_token_id": None,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "rope_theta": config.rope.theta,
        "sliding_window": max(windows) if sliding else None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": sliding,
        "vocab_size": config.vocab_size,
    }
    if config.attention_sinks:
        dflash["attention_sink_bias"] = True
    if config.causal != tuple(window > 0 for window in config.window):
        out["is_causal"] = config.causal[0]
    return out


def save_draft(drafter: Drafter, folder: str | os.PathLike, *, dtype: torch.dtype | None = torch.bfloat16) -> Path:
    """Write ``drafter`` in the published layout: ``config.json`` and ``model.safetensors``.

    Args:
        drafter: any; it is not changed.
        folder: made if need be; the two files in it are replaced, each at once.
        dtype: of the stored parameters; None for the drafter's own.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    folder = Path(folder)
    dtype = dtype or drafter.dtype
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in (
            ("model.safetensors", lambda path: _write_weights(drafter, path, dtype)),
            ("config.json", lambda path: _write_json(published_config(drafter.config, dtype), path)),
        ):
            unfinished = folder / (_UNFINISHED + name)
            try:
                write(unfinished)
                os.replace(unfinished, folder / name)
            finally:
                unfinished.unlink(missing_ok=True)
    except Exception as error:
        raise _failure(f"the draft was not written to {folder}", error) from error
    return folder


def _write_weights(drafter: Drafter, path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    tensors = {name: p.detach().to("cpu", dtype).contiguous().clone() for name, p in drafter.named_parameters()}
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors makes it readable to its owner alone
    _flush(path)


def _write_json(content: Any, path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    """To the disk, before a rename makes it count."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _failure(what: str, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return CheckpointError(f"{what}: {reason}")


# ---------------------------------------------------------------------------------------------- checkpoints


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """The whole checkpoints under ``folder``, oldest first."""
    found = [path for path in Path(folder).glob(f"{_PREFIX}*") if (path / _PROGRESS).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def save_checkpoint(
    folder: str | os.PathLike, step: int, drafter: Drafter, state: dict[str, Any], progress: dict[str, Any], keep: int
) -> Path:
    """Write checkpoint ``step`` and drop all but the last ``keep``.

    Args:
        folder: of all checkpoints of the run.
        step: optimizer steps done.
        drafter: in float32; stored as it is.
        state: tensors and numbers for ``torch.save``: optimizer, schedule, random generators.
        progress: for ``trainer.json``: what a reader may want to know, and the sampler's place.
        keep: checkpoints to keep, 1 at least.

    Raises:
        CheckpointError: the disk is full or cannot be written; the checkpoints that were there are whole.
    """
    folder = Path(folder)
    final, unfinished = folder / f"{_PREFIX}{step:08d}", folder / f"{_UNFINISHED}{step:08d}"
    try:
        for left in folder.glob(f"{_UNFINISHED}*"):  # of a run that was killed
            shutil.rmtree(left)
        unfinished.mkdir(parents=True)
        save_draft(drafter, unfinished, dtype=None)
        torch.save(state, unfinished / _STATE)
        _flush(unfinished / _STATE)
        _write_json(progress, unfinished / _PROGRESS)
        if final.exists():
            shutil.rmtree(final)
        os.replace(unfinished, final)
        _flush(folder)
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        last = checkpoints(folder)
        good = f"the last good one is {last[-1]}" if last else "there is none before it"
        raise _failure(f"checkpoint {final.name} was not written ({good})", error) from error
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_checkpoint(path: str | os.PathLike, drafter: Drafter) -> tuple[dict[str, Any], dict[str, Any]]:
    """Put a checkpoint's weights into ``drafter``, in place; returns its ``state`` and ``progress``."""
    from safetensors.torch import load_file

    path = Path(path)
    progress = json.loads((path / _PROGRESS).read_text(encoding="utf-8"))
    state = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    with torch.no_grad():
        drafter.load_state_dict(load_file(path / "model.safetensors"))
    return state, progress
