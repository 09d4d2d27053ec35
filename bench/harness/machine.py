"""What a bench ran on."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from dflash import ops

ROOT = Path(__file__).resolve().parents[2]


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine(device: torch.device) -> str:
    """The name of what the numbers come from; for a GPU with its clocks and CUDA."""
    if device.type == "cuda":
        query = f"--id={device.index or 0}", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"
        clocks = _said("nvidia-smi", *query)
        return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, clocks {clocks or 'unknown'}"
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def driver(device: torch.device) -> str:
    """The version of the GPU's driver; empty without one."""
    if device.type != "cuda":
        return ""
    return _said("nvidia-smi", f"--id={device.index or 0}", "--query-gpu=driver_version", "--format=csv,noheader")


def header(device: torch.device, copy: float) -> dict[str, str | int | float]:
    """What a reader needs to compare two runs."""
    commit = _said("git", "rev-parse", "--short", "HEAD") or "unknown"
    return {
        "machine": machine(device),
        "isa": ops.isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit + ("+" if _said("git", "status", "--porcelain", "-uno") else ""),
        "copy_gb_s": copy / 1e9,
    }
