"""Checks of the installation, for ``dflash doctor``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import ops
from ..engine import runner as replay


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        name: the item that was checked.
        found: state of the item.
        status: ``"ok"``, ``"warning"`` (works, but slower than it could) or ``"error"`` (does not work).
        advice: what to do, in one line; empty if there is nothing to do.
    """

    name: str
    found: str
    status: str = "ok"
    advice: str = ""


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _at_least(version: str, wanted: tuple[int, int]) -> bool:
    parts = version.split("+")[0].split(".")
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts[:2]) >= wanted


def _package(name: str, wanted: tuple[int, int]) -> Check:
    version, least = _version(name), ".".join(map(str, wanted))
    if version is None:
        return Check(name, "not installed", "error", f"pip install '{name}>={least}'")
    if not _at_least(version, wanted):
        return Check(name, version, "error", f"pip install -U '{name}>={least}': older ones are not supported")
    return Check(name, version)


def _clash() -> Check:
    if _version("dflash") is None:
        return Check("import name", "dflash belongs only to dflash-engine")
    return Check(
        "import name",
        f"dflash {_version('dflash')} is installed too and owns the same import name",
        "error",
        "pip uninstall dflash dflash-engine, then install the one you want",
    )


def _instruction_set() -> Check:
    chosen, forced = ops.isa(), os.environ.get("DFLASH_ISA")
    if forced:
        return Check("CPU kernels", f"{chosen}, because DFLASH_ISA is set", "warning", "unset DFLASH_ISA")
    if chosen == "scalar" and platform.machine() in ("x86_64", "AMD64"):
        return Check("CPU kernels", "scalar", "warning", "this processor has no AVX2: expect low speed")
    return Check("CPU kernels", chosen)


def _gpu_present() -> bool:
    """Return True if the machine has an NVIDIA GPU, even if torch does not see it."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _gpu() -> Check:
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Check("GPU", f"{names} (torch CUDA {torch.version.cuda})")
    if not _gpu_present():
        return Check("GPU", "none")
    if torch.version.cuda is None:
        found, advice = "present, but this torch is a CPU build", "install a CUDA build of torch (pytorch.org)"
    else:
        found, advice = "present, but torch cannot use it", "check the driver with nvidia-smi"
    return Check("GPU", found, "warning", advice)


_SLOW = "until then a target runs its own layers, and ops run in plain torch"


def _cuda_kernels() -> Check:
    name = "CUDA kernels"
    if not ops.has_cuda_kernels():
        if not torch.cuda.is_available():
            return Check(name, "not in this build")
        return Check(name, "not in this build", "warning", f"install the CUDA toolkit (nvcc) and reinstall; {_SLOW}")
    if not torch.cuda.is_available():
        return Check(name, "in this build; there is no GPU to run on")
    if reason := ops.cuda_status(torch.cuda.current_device()):
        advice = "update the driver" if "driver" in reason else "rebuild with CMAKE_CUDA_ARCHITECTURES for this GPU"
        return Check(name, f"in this build, but: {reason}", "warning", f"{advice}; {_SLOW}")
    return Check(name, "in this build and running")


def _cuda_graphs() -> Check:
    name = "CUDA graphs"
    if not torch.cuda.is_available():
        return Check(name, "no GPU to replay them on: steps run directly")
    if reason := replay.graph_status():
        return Check(name, f"cannot be used: {reason}", "warning", "steps run kernel by kernel, which is slower")
    return Check(name, "used: a step is one launch (if not, Generator.graph_reason says why)")


def _overlap() -> Check:
    name = "CUDA overlap"
    switches = {"DFLASH_OVERLAP": ops.OVERLAP, "DFLASH_PREFETCH": ops.PREFETCH}
    if off := [switch for switch, is_on in switches.items() if not is_on]:
        return Check(name, f"turned off by {' and '.join(off)}", "warning", f"unset {' and '.join(off)}")
    if not torch.cuda.is_available() or ops.cuda_status(torch.cuda.current_device()):
        return Check(name, "no kernel runs on a GPU")
    if ops.overlaps(torch.cuda.current_device()):
        return Check(name, "used: a kernel starts, and reads weights, while the one ahead of it still runs")
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        return Check(name, f"not used: it needs compute capability 9.0, this GPU has {major}.{minor}")
    advice = "rebuild with CMAKE_CUDA_ARCHITECTURES for this GPU; until then a step takes longer"
    return Check(name, "not used: the kernels are compiled for older GPUs", "warning", advice)


def examine() -> list[Check]:
    """Check this installation. Runs no model and changes nothing."""
    return [
        Check("dflash-engine", _version("dflash-engine") or "not installed as a distribution"),
        Check("python", platform.python_version()),
        _package("torch", (2, 11)),
        _package("transformers", (5, 15)),
        _clash(),
        _instruction_set(),
        Check("CPU threads", f"{torch.get_num_threads()} of {os.cpu_count()} processors"),
        _gpu(),
        _cuda_kernels(),
        _overlap(),
        _cuda_graphs(),
    ]
