"""Drafts in the published layout, and checkpoints that resume a run bit for bit.

A checkpoint folder is written under a temporary name and then renamed, so it is either complete or absent. It holds a
draft that `dflash.load_draft` reads, and the trainer's state.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..drafter import FULL, SLIDING, DraftConfig, Drafter, Rope
from ..files import (
    FLOATING,
    atomic_folder,
    fsync,
    read_header,
    read_json,
    read_tensor,
    read_torch_file,
    remove_unfinished,
    save_tensors,
    write_atomically,
    write_json,
)
from ..terminal import listed, printable

__all__ = [
    "CheckpointError",
    "checkpoints",
    "dflash_section",
    "load_checkpoint",
    "published_config",
    "read_progress",
    "rope_section",
    "save_checkpoint",
    "save_draft",
    "section_values",
]

_STATE, _PROGRESS, _NAME = "trainer.pt", "trainer.json", re.compile(r"step-\d{8}")
# Values of a dflash_config that say nothing.
_NEUTRAL = {
    "attention_value_scale": 1.0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
    "attention_sink_bias": False,
}
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class CheckpointError(OSError):
    """A checkpoint or a draft cannot be read or written. A failed write leaves the previous files intact."""


def published_config(config: DraftConfig, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the ``config.json`` that reads back as ``config``, in the published layout; see ``from_config``."""
    by_window = tuple(window > 0 for window in config.window)
    _expect_expressible(config, by_window)
    out: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if config.dflash2 is None else "DFlash2DraftModel"],
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "bos_token_id": None,
        "dflash_config": dflash_section(config),
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
        "rope_parameters": rope_section(config.rope),
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


def save_draft(drafter: Drafter, folder: str | os.PathLike, *, dtype: torch.dtype | None = torch.bfloat16) -> Path:
    """Write ``drafter`` in the published layout: ``config.json`` and ``model.safetensors``.

    Args:
        drafter: the drafter to save; it is not changed.
        folder: created if missing. Each of the two files is replaced atomically.
        dtype: dtype of the stored parameters; None for the drafter's own.

    Returns:
        ``folder`` as a path.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    folder = Path(folder)
    dtype = dtype or drafter.dtype
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: p.detach().to("cpu", dtype).contiguous().clone() for name, p in drafter.named_parameters()}
        config = published_config(drafter.config, dtype)
        write_atomically(folder / "model.safetensors", lambda path: save_tensors(tensors, path, {"format": "pt"}))
        write_atomically(folder / "config.json", lambda path: write_json(config, path))
    except Exception as error:
        raise _failure(f"the draft was not written to {folder}", error) from error
    return folder


def _failure(what: str, error: Exception) -> CheckpointError:
    errors = [error]
    while errors[-1].__context__ is not None:
        errors.append(errors[-1].__context__)
    cause = next((one for one in errors if isinstance(one, OSError)), error)  # "disk full", not what torch makes of it
    reason = printable(" ".join(str(cause).split()))[:400] or type(error).__name__
    return CheckpointError(f"{printable(what)}: {reason}")


# ---------------------------------------------------------------------------------------------- checkpoints


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first. Folders with other names are ignored."""
    found = [path for path in Path(folder).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(path for path in found if (path / _PROGRESS).is_file())


def save_checkpoint(
    folder: str | os.PathLike, step: int, drafter: Drafter, state: dict[str, Any], progress: dict[str, Any], keep: int
) -> Path:
    """Write checkpoint ``step`` and drop all but the last ``keep``.

    Args:
        folder: folder that holds all checkpoints of the run.
        step: optimizer steps done.
        drafter: the drafter, in float32; stored in its own dtype.
        state: tensors and numbers for ``torch.save``: optimizers and random generators.
        progress: content of ``trainer.json``: counters, the last metrics and the position in the data.
        keep: number of checkpoints to keep, at least 1.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: the disk is full or cannot be written; the existing checkpoints are intact.
    """
    folder = Path(folder)
    final = folder / f"step-{step:08d}"
    try:
        remove_unfinished(folder)  # left by a run that was killed
        with atomic_folder(final) as unfinished:
            save_draft(drafter, unfinished, dtype=None)
            with open(unfinished / _STATE, "wb") as file:  # given a path, torch does not say why it cannot write
                torch.save(state, file)
            fsync(unfinished / _STATE)
            write_json(progress, unfinished / _PROGRESS)
    except Exception as error:
        last = checkpoints(folder)
        good = f"the last good one is {last[-1]}" if last else "there is no earlier one"
        raise _failure(f"checkpoint {final} was not written ({good})", error) from error
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def read_progress(path: str | os.PathLike) -> dict[str, Any]:
    """Return a checkpoint's ``progress``.

    Raises:
        CheckpointError: the checkpoint is damaged, or another program wrote it.
    """
    path = Path(path)
    try:
        return read_json(path / _PROGRESS)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def load_checkpoint(
    path: str | os.PathLike, drafter: Drafter, check: Callable[[dict[str, Any]], None] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a checkpoint's weights into ``drafter`` in place, and return its ``state`` and ``progress``.

    Args:
        path: the checkpoint's folder.
        drafter: the drafter that was saved.
        check: raises if the ``state`` is not what was saved.

    Raises:
        CheckpointError: the checkpoint is damaged; ``drafter`` is unchanged.
    """
    path = Path(path)
    progress = read_progress(path)
    try:
        weights = _read_weights(path / "model.safetensors", drafter)
        state = _read_state(path / _STATE)
        if check is not None:
            check(state)
    except Exception as error:  # torch raises many types for empty, truncated or foreign files
        raise _unreadable(path, error) from error
    with torch.no_grad():
        drafter.load_state_dict(weights)
    return state, progress


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return _failure(f"checkpoint {path} cannot be read; remove that folder to do without it", error)


def _read_weights(path: Path, drafter: Drafter) -> dict[str, Tensor]:
    """Read the tensors of ``drafter``. The header is compared with them before anything is allocated."""
    stored = read_header(path)
    theirs = {name: (tensor.shape, FLOATING.get(tensor.kind)) for name, tensor in stored.items()}
    own = drafter.state_dict()
    if theirs != {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in own.items()}:
        raise ValueError(f"{path.name} holds another drafter's weights")
    return {name: read_tensor(stored[name]) for name in own}


def _read_state(path: Path) -> dict[str, Any]:
    """Read the trainer's state."""
    state = read_torch_file(path)
    if not isinstance(state, dict):
        raise ValueError(f"{path.name} must hold a dict, got {type(state).__name__}")
    return state
