"""Drafts in the published layout, and checkpoints that resume a run bit for bit.

A checkpoint folder is written under a temporary name and then renamed, so it is either complete or absent. It holds a
draft that `dflash.load_draft` reads, and the trainer's state.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..drafter import Drafter
from ..files import atomic_folder, fsync, remove_unfinished, save_tensors, write_atomically, write_json
from ..targets import describe_config, sample_digest
from ..terminal import named, printable
from .export import published_config

if TYPE_CHECKING:
    from .trainer import Trainer

_STATE, _PROGRESS, _NAME = "trainer.pt", "trainer.json", re.compile(r"step-\d{8}")
_COUNTERS = ("step", "epoch", "place", "tokens", "seconds")  # trainer attributes that checkpoints store
_MAY_CHANGE = ("keep", "log_every", "save_every", "eval_every")  # settings that a resumed run may change


class CheckpointError(OSError):
    """A checkpoint or a draft cannot be read or written. A failed write leaves the previous files intact."""


def _failure(what: str, error: Exception) -> CheckpointError:
    errors = [error]
    while errors[-1].__context__ is not None:
        errors.append(errors[-1].__context__)
    cause = next((one for one in errors if isinstance(one, OSError)), error)  # "disk full", not what torch makes of it
    reason = printable(" ".join(str(cause).split()))[:400] or type(error).__name__
    return CheckpointError(f"{printable(what)}: {reason}")


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


# ---------------------------------------------------------------------------------------------- checkpoints


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first. Folders with other names are ignored."""
    found = [path for path in Path(folder).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(path for path in found if (path / _PROGRESS).is_file())


def save_checkpoint(
    folder: str | os.PathLike, step: int, drafter: Drafter, state: dict[str, Any], progress: dict[str, Any], keep: int
) -> Path:
    """Write checkpoint ``step`` and drop all but the last ``keep``.

    ``state`` goes through ``torch.save``: optimizers and random generators. ``progress`` becomes ``trainer.json``.

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


def load_checkpoint(path: str | os.PathLike, drafter: Drafter) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a checkpoint's weights into ``drafter`` in place, and return its ``state`` and ``progress``.

    Raises:
        CheckpointError: the checkpoint is damaged; ``drafter`` is unchanged.
    """
    path = Path(path)
    try:
        progress, weights, state = _read_progress(path), _read_weights(path, drafter), _read_state(path)
    except Exception as error:  # torch raises many types for empty, truncated or foreign files
        raise _unreadable(path, error) from error
    drafter.load_state_dict(weights)
    return state, progress


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return _failure(f"checkpoint {path} cannot be read; remove that folder to do without it", error)


def _read_progress(path: Path) -> dict[str, Any]:
    progress = json.loads((path / _PROGRESS).read_bytes())
    if not isinstance(progress, dict):
        raise ValueError(f"{_PROGRESS} must hold an object")
    return progress


def _read_weights(path: Path, drafter: Drafter) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    weights, own = load_file(path / "model.safetensors"), drafter.state_dict()
    shapes, own_shapes = ({name: (x.shape, x.dtype) for name, x in tensors.items()} for tensors in (weights, own))
    if shapes != own_shapes:
        raise ValueError("model.safetensors holds another drafter's weights")
    return weights


def _read_state(path: Path) -> dict[str, Any]:
    return torch.load(path / _STATE, map_location="cpu", weights_only=True)  # runs no code


# ---------------------------------------------------------------------------------------------- runs


def data_digest(rows: str, index: Sequence[int]) -> str:
    """Return a digest of the training rows, from the digest of all rows and the numbers of those in use."""
    return hashlib.sha256(rows.encode() + array("q", index).tobytes()).hexdigest()[:16]


def target_digest(target: nn.Module) -> str:
    """Return a digest of the target's config and a sample of its weights."""
    return hashlib.sha256(f"{describe_config(target)} {sample_digest(target)}".encode()).hexdigest()[:16]


def fingerprint(trainer: Trainer) -> dict[str, Any]:
    """Return the settings that must match for a checkpoint to be resumed."""
    config = dataclasses.asdict(trainer.config)
    config = {k: v for k, v in config.items() if k not in _MAY_CHANGE and not k.startswith("eval_")}
    config |= {"rows": len(trainer.index), "row_tokens": int(trainer.batches.lengths.sum())}
    config |= {"data": trainer.data_digest, "micro_batches": trainer.batches.group, "steps": trainer.steps}
    config.pop("accumulate")  # only processes times accumulation matters
    dtype = str(next(trainer.target.parameters()).dtype)
    config |= {"target": trainer.target_digest, "target's dtype": dtype}
    online = trainer.features is None
    config["features"] = "of the running target" if online else f"cached in {trainer.features.dtype}"
    draft = json.loads(json.dumps(dataclasses.asdict(trainer.drafter.config)))
    return {**config, "drafter": draft}


def save_run(trainer: Trainer) -> None:
    """Write a checkpoint of the trainer's step. All processes must call this."""
    if trainer.accelerator.is_main_process:
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        state = {"optimizers": states, "random": torch.get_rng_state()}
        progress = {name: getattr(trainer, name) for name in (*_COUNTERS, "steps")}
        progress |= {"fingerprint": fingerprint(trainer), "last": trainer.last}
        folder, keep = trainer.output / "checkpoints", trainer.config.keep
        save_checkpoint(folder, trainer.step, trainer.drafter, state, progress, keep)
    trainer.accelerator.wait_for_everyone()


def resume_run(trainer: Trainer) -> bool:
    """Continue from the last readable checkpoint. Return False if there is none. See `Trainer.resume`."""
    found, damaged = checkpoints(trainer.output / "checkpoints"), []
    is_main = trainer.accelerator.is_main_process
    for path in reversed(found):
        try:
            _resume_from(trainer, path)
            break
        except CheckpointError as error:
            damaged.append(error)
            if is_main and path != found[0]:
                print(f"dflash: {printable(error)}; trying the one before it", file=sys.stderr)
    else:
        if damaged:
            raise damaged[0]
    if is_main:
        trainer.metrics.drop_after(trainer.step)
    return bool(found)


def _resume_from(trainer: Trainer, path: Path) -> None:
    """Load a checkpoint into the trainer. Raise ``ValueError`` for one of another run, naming the difference."""
    try:
        theirs = dict(_read_progress(path)["fingerprint"])
    except Exception as error:
        raise _unreadable(path, error) from error
    for name, ours in fingerprint(trainer).items():
        if name in theirs and theirs[name] != ours:
            other = named(theirs[name])
            raise ValueError(f"{path} belongs to another run: its {name} is {other}, this run's is {named(ours)}")
    state, progress = load_checkpoint(path, trainer.drafter)
    try:
        for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state["random"])
        counters = {name: progress[name] for name in (*_COUNTERS, "last")}
    except Exception as error:
        raise _unreadable(path, error) from error
    vars(trainer).update(counters)
