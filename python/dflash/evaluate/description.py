"""What a measured speed depends on besides the settings: the machine, the versions and the models."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import ops
from ..drafter import Drafter
from ..targets import sample_digest, versions

__all__ = ["describe", "machine_name"]


def describe(target: nn.Module, draft: Drafter) -> dict[str, Any]:
    """Describe the machine, the versions and the models: what a speed depends on besides the settings."""
    device = target.get_input_embeddings().weight.device
    return {
        "machine": machine_name(device),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "isa": ops.isa(),
        **versions(),
        "python": platform.python_version(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "target_parameters": sum(parameter.numel() for parameter in target.parameters()),
        "draft_parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "weights": f"{sample_digest(target)}-{sample_digest(draft)}",
        "draft_config": hashlib.sha256(repr(draft.config).encode()).hexdigest()[:16],
    }


def machine_name(device: torch.device) -> str:
    """Return the name of the GPU, or that of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
