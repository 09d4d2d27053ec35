"""Drafts in the published layout, and checkpoints that resume a run bit for bit.

A checkpoint folder is written under a temporary name and then renamed, so it is either complete or absent. It holds a
draft that `dflash.load_draft` reads, and the trainer's state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash import Drafter
from dflash.internals import files, targets
from dflash.light import terminal

from .export import published_config
from .files import atomic_folder, one_line_errors, remove_unfinished, save_tensors, write_json

if TYPE_CHECKING:
    from .trainer import Trainer

_STATE, _PROGRESS, _NAME = "trainer.pt", "trainer.json", re.compile(r"step-\d{8}")
_COUNTERS = ("step", "epoch", "place", "tokens", "seconds")  # trainer attributes that checkpoints store
# Settings that a resumed run may change; of accumulate, only its product with the number of processes matters.
_MAY_CHANGE = ("accumulate", "keep", "log_every", "save_every", "eval_every")


class CheckpointError(OSError):
    """A checkpoint or a draft cannot be read or written. A failed write leaves the previous files intact."""


def save_draft(drafter: Drafter, folder: str | os.PathLike, *, dtype: torch.dtype | None = torch.bfloat16) -> Path:
    """Write ``drafter`` in the published layout: ``config.json`` and ``model.safetensors``.

    Args:
        drafter: the drafter to save; it is not changed.
        folder: created if missing. Each of the two files is replaced atomically.
        dtype: dtype of the stored parameters; None for the drafter's own.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    folder, dtype = Path(folder), dtype or drafter.dtype
    with one_line_errors(f"the draft was not written to {folder}", CheckpointError):
        folder.mkdir(parents=True, exist_ok=True)
        stored = drafter.state_dict()
        kinds = {name: dtype if tensor.is_floating_point() else None for name, tensor in stored.items()}
        tensors = {name: x.detach().to("cpu", kinds[name]).contiguous().clone() for name, x in stored.items()}
        config = published_config(drafter.config, dtype)
        files.write_atomically(folder / "model.safetensors", lambda path: save_tensors(tensors, path, {"format": "pt"}))
        files.write_atomically(folder / "config.json", lambda path: write_json(config, path))
    return folder


# ---------------------------------------------------------------------------------------------- checkpoints


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """Return the checkpoints in ``folder``, oldest first. Folders with other names are ignored."""
    found = [path for path in Path(folder).glob("step-*") if _NAME.fullmatch(path.name)]
    return sorted(path for path in found if (path / _PROGRESS).is_file())


def save_checkpoint(
    folder: str | os.PathLike, step: int, drafter: Drafter, state: dict[str, Any], progress: dict[str, Any], keep: int
) -> Path:
    """Write checkpoint ``step``, with ``state`` by ``torch.save``, and drop all but the last ``keep``.

    Raises:
        CheckpointError: the disk is full or cannot be written; the existing checkpoints are intact.
    """
    folder = Path(folder)
    final, last = folder / f"step-{step:08d}", checkpoints(folder)
    good = f"the last good one is {last[-1]}" if last else "there is no earlier one"
    with one_line_errors(f"checkpoint {final} was not written ({good})", CheckpointError):
        remove_unfinished(folder)  # left by a run that was killed
        with atomic_folder(final) as unfinished:
            save_draft(drafter, unfinished, dtype=None)
            with open(unfinished / _STATE, "wb") as file:  # given a path, torch does not say why it cannot write
                torch.save(state, file)
            files.fsync(unfinished / _STATE)
            write_json(progress, unfinished / _PROGRESS)
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_checkpoint(
    path: str | os.PathLike, drafter: Drafter, expected: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a checkpoint's weights into ``drafter`` in place, and return its ``state`` and ``progress``.

    ``expected`` is the `fingerprint` of the run that continues.

    Raises:
        CheckpointError: the checkpoint is damaged; ``drafter`` is unchanged.
        ValueError: the checkpoint is of another run; the difference is named.
    """
    from safetensors.torch import load_file

    path = Path(path)
    with _reading(path):
        progress = json.loads((path / _PROGRESS).read_bytes())
        theirs = {} if expected is None else dict(progress["fingerprint"])
    for name, ours in (expected or {}).items():
        if name in theirs and theirs[name] != ours:
            differs = f"its {name} is {terminal.named(theirs[name])}, this run's is {terminal.named(ours)}"
            raise ValueError(f"{path} belongs to another run: {differs}")
    with _reading(path):
        weights = load_file(path / "model.safetensors")
        state = torch.load(path / _STATE, map_location="cpu", weights_only=True)  # runs no code
        shapes, own = ({n: (x.shape, x.dtype) for n, x in part.items()} for part in (weights, drafter.state_dict()))
        if shapes != own:
            raise ValueError("model.safetensors holds another drafter's weights")
    drafter.load_state_dict(weights)
    return state, progress


def _reading(path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn what torch raises for an empty, truncated or foreign file into an error that says what to do."""
    return one_line_errors(f"checkpoint {path} cannot be read; remove that folder to do without it", CheckpointError)


# ---------------------------------------------------------------------------------------------- runs


def fingerprint(trainer: Trainer) -> dict[str, Any]:
    """Return the settings that must match for a checkpoint to be resumed."""
    config = dataclasses.asdict(trainer.config).items()
    kept = {name: value for name, value in config if name not in _MAY_CHANGE and not name.startswith("eval_")}
    features = "of the running target" if trainer.features is None else f"cached in {trainer.features.dtype}"
    target = f"{targets.describe_config(trainer.target)} {targets.sample_digest(trainer.target)}"
    return kept | {
        "rows": len(trainer.index),
        "row_tokens": int(trainer.batches.lengths.sum()),
        "data": _digest(trainer.rows_digest.encode() + array("q", trainer.index).tobytes()),
        "micro_batches": trainer.batches.group,
        "steps": trainer.steps,
        "target": _digest(target.encode()),
        "target's dtype": str(next(trainer.target.parameters()).dtype),
        "features": features,
        "drafter": json.loads(json.dumps(dataclasses.asdict(trainer.drafter.config))),
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def save_run(trainer: Trainer) -> None:
    """Write a checkpoint of the trainer's step. All processes must call this."""
    if trainer.accelerator.is_main_process:
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        state = {"optimizers": states, "random": torch.get_rng_state()}
        progress = {name: getattr(trainer, name) for name in (*_COUNTERS, "steps", "last")}
        progress["fingerprint"] = fingerprint(trainer)
        folder, keep = trainer.output / "checkpoints", trainer.config.keep
        save_checkpoint(folder, trainer.step, trainer.drafter, state, progress, keep)
    trainer.accelerator.wait_for_everyone()


def resume_run(trainer: Trainer) -> bool:
    """Continue from the last readable checkpoint. Return False if there is none. See `Trainer.resume`."""
    found, is_main = checkpoints(trainer.output / "checkpoints"), trainer.accelerator.is_main_process
    expected, last_error = fingerprint(trainer), None
    for path in reversed(found):
        try:
            state, progress = load_checkpoint(path, trainer.drafter, expected)
            with _reading(path):
                for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(saved)
                torch.set_rng_state(state["random"])
                vars(trainer).update({name: progress[name] for name in (*_COUNTERS, "last")})
            break
        except CheckpointError as error:
            last_error = last_error or error
            if is_main and path != found[0]:
                print(f"dflash: {terminal.printable(error)}; trying the one before it", file=sys.stderr)
    else:
        if last_error is not None:
            raise last_error
    if is_main:
        trainer.metrics.drop_after(trainer.step)
    return bool(found)
