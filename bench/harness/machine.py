"""The machine, the software and the commit that numbers come from."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import torch

from dflash import ops

ROOT = Path(__file__).resolve().parents[2]


def processor() -> str:
    """Return the CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def driver(device: torch.device) -> str:
    """Return the version of the GPU's driver; empty on CPU."""
    return _nvidia_smi(device, "driver_version") if device.type == "cuda" else ""


def commit() -> str:
    """Return the short commit of this clone, with ``+`` if tracked files have changes."""
    name = _output("git", "rev-parse", "--short", "HEAD") or "unknown"
    return name + ("+" if _output("git", "status", "--porcelain", "-uno") else "")


def header(device: torch.device, copy: float) -> dict[str, str | int | float]:
    """Return what a reader needs to compare two runs; ``copy`` is the bandwidth of a large copy, bytes per second."""
    return {
        "machine": _machine(device),
        "isa": ops.isa(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
        "copy_gb_s": copy / 1e9,
    }


def _machine(device: torch.device) -> str:
    if device.type != "cuda":
        return processor()
    clocks = _nvidia_smi(device, "clocks.sm,clocks.mem") or "unknown"
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, clocks {clocks}"


def _nvidia_smi(device: torch.device, query: str) -> str:
    return _output("nvidia-smi", f"--id={device.index or 0}", f"--query-gpu={query}", "--format=csv,noheader")


def _output(*command: str) -> str:
    """Return what a command prints; empty if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
