"""Set up accelerate for a run: devices, processes, mixed precision, trackers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from torch import nn

from ..config import TrainConfig
from ..model import TrainableDrafter

__all__ = ["make_accelerator", "prepare_model"]

_TRACKERS = ("tensorboard", "trackio")


def make_accelerator(config: TrainConfig, output: str | Path, *, cpu: bool = False, tracker: str | None = None) -> Any:
    """Return the accelerator that a `dflash.train.Trainer` runs on.

    Args:
        config: settings of the run.
        output: folder that a tracker writes to.
        cpu: use no GPU even if there is one.
        tracker: "tensorboard", "trackio" or None.

    Raises:
        ValueError: the tracker is unknown, or a package is not installed. The message names it.
    """
    if tracker not in (None, *_TRACKERS):
        raise ValueError(f"tracker must be {' or '.join(_TRACKERS)}, got {tracker!r}")
    for name, extra in (("accelerate", "'.[train]'"), (tracker, tracker)):
        if name is not None and importlib.util.find_spec(name) is None:
            raise ValueError(f"this needs the {name} package: pip install {extra}")
    from accelerate import Accelerator

    return Accelerator(cpu=cpu, mixed_precision=config.mixed_precision, log_with=tracker, project_dir=str(output))


def prepare_model(accelerator: Any, model: TrainableDrafter) -> nn.Module:
    """Return ``model`` wrapped for training on all processes."""
    # The buffers are the packed parameters: no need to broadcast them before every forward pass.
    buffers = [name for name, _ in model.named_buffers()]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    return accelerator.prepare_model(model)
