"""Save a run's checkpoints, and resume from one bit for bit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...targets import describe_config, sample_digest
from ...terminal import named, printable
from ..checkpoint import CheckpointError, checkpoints, load_checkpoint, read_progress, save_checkpoint
from ..optimizers import check_state

if TYPE_CHECKING:
    from .trainer import Trainer

__all__ = ["data_digest", "fingerprint", "resume", "save", "target_digest"]

_COUNTERS = ("step", "epoch", "place", "tokens", "seconds")  # trainer attributes that checkpoints store
_IDENTITY = {"drafter", "target", "data", "steps"}  # of the fingerprint; a newer dflash may compare more settings
_MAY_CHANGE = ("keep", "log_every", "save_every", "eval_every")  # settings that a resumed run may change


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


def save(trainer: Trainer) -> None:
    """Write a checkpoint of this step. All processes must call this."""
    if trainer.accelerator.is_main_process:
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        state = {"optimizers": states, "random": torch.get_rng_state()}
        progress = {name: getattr(trainer, name) for name in (*_COUNTERS, "steps")}
        progress |= {"fingerprint": fingerprint(trainer), "last": trainer.last}
        folder, keep = trainer.output / "checkpoints", trainer.config.keep
        save_checkpoint(folder, trainer.step, trainer.drafter, state, progress, keep)
    trainer.accelerator.wait_for_everyone()


def resume(trainer: Trainer) -> bool:
    """Load the last readable checkpoint. Return False if there is none. See `Trainer.resume`."""
    found = _last_readable(trainer)
    main = trainer.accelerator.is_main_process
    if found is None:
        if main:
            trainer.metrics.drop_after(0)
        return False
    state, progress = found
    for optimizer, saved in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    torch.set_rng_state(state["random"])
    for name in _COUNTERS:
        setattr(trainer, name, progress[name])
    trainer.last = progress["last"]
    if main:
        trainer.metrics.drop_after(trainer.step)
    return True


def _last_readable(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Load the last readable checkpoint's weights into the drafter; return its state and progress."""
    damaged = []
    found = checkpoints(trainer.output / "checkpoints")
    for path in reversed(found):
        try:
            return _read(trainer, path)
        except CheckpointError as error:
            damaged.append(error)
            if trainer.accelerator.is_main_process and path != found[0]:
                print(f"dflash: {printable(error)}; trying the one before it", file=sys.stderr)
    if damaged:
        raise damaged[0]
    return None


def _read(trainer: Trainer, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a checkpoint's weights into the drafter; return its state and progress. Refuse one of another run."""
    progress = read_progress(path)
    if not _is_progress(progress, trainer.steps):
        raise CheckpointError(f"checkpoint {path} was not written by dflash train; move that folder elsewhere")
    theirs = progress["fingerprint"]
    for name, ours in fingerprint(trainer).items():
        if name in theirs and theirs[name] != ours:
            other = named(theirs[name])
            raise ValueError(f"{path} belongs to another run: its {name} is {other}, this run's is {named(ours)}")
    return load_checkpoint(path, trainer.drafter, lambda state: _check_state(trainer, state))


def _is_progress(progress: dict[str, Any], steps: int) -> bool:
    """True if ``progress`` has the types and ranges of what `save` writes in a run of at most ``steps``."""
    *counters, seconds = (progress.get(name) for name in _COUNTERS)
    return (
        all(type(counter) is int and 0 <= counter < 2**63 for counter in counters)
        and type(seconds) in (int, float)
        and 0 <= seconds < math.inf
        and all(isinstance(progress.get(name), dict) for name in ("fingerprint", "last"))
        and progress["fingerprint"].keys() >= _IDENTITY
        and (progress["step"] <= steps or progress["fingerprint"]["steps"] != steps)  # `_read` names the latter
    )


def _check_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Raise ``ValueError`` unless ``state`` is what `save` writes."""
    saved, random = state.get("optimizers"), state.get("random")
    if not isinstance(saved, list) or len(saved) != len(trainer.optimizers):
        raise ValueError(f"it must hold the states of {len(trainer.optimizers)} optimizers")
    for optimizer, one in zip(trainer.optimizers, saved, strict=True):
        check_state(optimizer, one)
    if not isinstance(random, torch.Tensor):
        raise ValueError("it must hold the state of the random numbers")
    torch.Generator().set_state(random)  # raises for anything else
