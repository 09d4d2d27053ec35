"""Check an installation: packages, instruction set, GPU and kernels. See `examine`."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.version import Version

from dflash.internals import captured, kernel_check, ops, targets, threads
from dflash.light import terminal

_MISSING = "not installed"  # as `version_of` says it


@dataclass(frozen=True)
class Check:
    """One line of the report. Its status is ``"ok"``, ``"warning"`` (works, but slower) or ``"error"``."""

    name: str
    found: str
    status: str = "ok"
    advice: str = ""


def _package(name: str, least: str) -> Check:
    version = targets.version_of(name)
    if version == _MISSING:
        return Check(name, version, "error", f"pip install '{name}>={least}'")
    if Version(version).release < Version(least).release:
        return Check(name, version, "error", f"pip install -U '{name}>={least}': older ones are not supported")
    return Check(name, version)


def _clash(name: str) -> Check:
    version = targets.version_of("dflash")
    if version == _MISSING:
        return Check(name, "dflash belongs only to dflash-engine")
    advice = "pip uninstall dflash dflash-engine, then install the one you want"
    return Check(name, f"dflash {version} is installed too and owns the same import name", "error", advice)


# Instruction sets of each architecture, from the plainest on: Linux's name for what a processor must have, and what the
# set brings.
_SETS = (
    {
        "scalar": ("", "no vectors"),
        "avx2": ("avx2", "8 floats at a time"),
        "avx_vnni": ("avx_vnni", "8 floats at a time, dot products in 8 bits"),
        "avx512": ("avx512vl", "16 floats at a time"),
        "avx512_bf16": ("avx512_bf16", "16 floats at a time, dot products in bf16 and 8 bits"),
        "amx": ("amx_bf16", "16 floats at a time, products of tiles in bf16 and 8 bits"),
    },
    {
        "neon": ("asimd", "4 floats at a time"),
        "dotprod": ("asimddp", "4 floats at a time, dot products in 8 bits"),
        "i8mm": ("i8mm", "4 floats at a time, dot products and products of pairs of rows in 8 bits"),
    },
)


def _instruction_set(name: str) -> Check:
    chosen, forced = ops.isa(), os.environ.get("DFLASH_ISA")
    known = next(row for row in _SETS if chosen in row)
    text = f"{chosen}: {known[chosen][1]}"
    if forced:
        return Check(name, f"{text}; because DFLASH_ISA is set", "warning", "unset DFLASH_ISA")
    better = [*known][[*known].index(chosen) + 1 :]
    if better := [each for each in better if known[each][0] in processor_flags()]:
        advice = "install on this machine, or with -C cmake.define.DFLASH_ALL_ISAS=ON"
        return Check(name, f"{text}; this processor has {', '.join(better)} too", "warning", advice)
    if chosen == "scalar" and platform.machine() in ("x86_64", "AMD64"):
        return Check(name, text, "warning", "this processor has no AVX2: expect low speed")
    return Check(name, text)


def processor_flags() -> set[str]:
    """Return what Linux says that the processor has."""
    path = Path("/proc/cpuinfo")
    return set(path.read_text().split()) if path.exists() else set()


def _gpu_present() -> bool:
    """Return True if the machine has an NVIDIA GPU, even if torch does not see it."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def _gpu(name: str) -> Check:
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return Check(name, f"{names} (torch CUDA {torch.version.cuda})")
    if not _gpu_present():
        return Check(name, "none")
    if torch.version.cuda is None:
        found, advice = "present, but this torch is a CPU build", "install a CUDA build of torch (pytorch.org)"
    else:
        found, advice = "present, but torch cannot use it", "check the driver with nvidia-smi"
    return Check(name, found, "warning", advice)


_REBUILD, _FREE = "rebuild with CMAKE_CUDA_ARCHITECTURES for this GPU", "free the GPU and try again"
_CUDA_ADVICE = {"driver": "update the driver", "out of memory": _FREE, "busy": _FREE}
_SLOW = "until then a target runs its own layers, and ops run in plain torch"


def _cuda_kernels(name: str) -> Check:
    if not ops.has_cuda_kernels():
        if not torch.cuda.is_available():
            return Check(name, "not in this build")
        return Check(name, "not in this build", "warning", f"install the CUDA toolkit (nvcc) and reinstall; {_SLOW}")
    if not torch.cuda.is_available():
        return Check(name, "in this build; there is no GPU to run on")
    if reason := ops.cuda_status(torch.cuda.current_device()):
        advice = next((advice for word, advice in _CUDA_ADVICE.items() if word in reason), _REBUILD)
        return Check(name, f"in this build, but: {reason}", "warning", f"{advice}; {_SLOW}")
    return Check(name, "in this build and running; each next to plain torch, on small tensors:")


def _kernel_checks() -> Iterator[Check]:
    """Compare each kernel with plain torch on the current GPU."""
    if not torch.cuda.is_available() or ops.cuda_status(torch.cuda.current_device()):
        return
    off, index = ops.kernels_off(), torch.cuda.current_device()
    try:
        every = kernel_check.check_gpu(torch.device("cuda", index))
    except Exception as error:
        yield Check("- kernels", f"not compared: {terminal.first_line(error)}", "warning", _FREE)
        return
    for found in every:
        name = f"- {found.kernel}"
        if found.kernel in off:
            yield Check(name, f"off: {off[found.kernel]}", "warning", "unset DFLASH_KERNELS to use it")
        elif found.fault:
            advice = "runs turn it off (DFLASH_SELF_CHECK), which are right but slower; please report this"
            yield Check(name, found.fault, "error", advice)
        elif found.kernel == kernel_check.OVERLAPPING:
            yield Check(name, "the same bits as one by one" if ops.overlaps(index) else "none here")
        else:
            took = f"{found.microseconds:.0f} us with its launch"
            yield Check(name, f"error {found.error:.1e}, at most {found.bound:.1e}; {took}")


def _cuda_graphs(name: str) -> Check:
    if not torch.cuda.is_available():
        return Check(name, "no GPU to replay them on: steps run directly")
    if reason := _graph_error():
        return Check(name, f"cannot be used: {reason}", "warning", "steps run kernel by kernel, which is slower")
    return Check(name, "used: a step is one launch (if not, Generator.graph_reason says why)")


def _graph_error() -> str:
    """Capture one addition and replay it; return what went wrong."""
    try:
        x = torch.zeros(1, dtype=torch.float32, device="cuda")
        replay = captured(lambda: x.add_(1), None, torch.cuda.Stream())
        replay()
        return "" if x.item() == 1 else "a graph was replayed and did nothing"
    except Exception as error:
        return terminal.first_line(error)


def _overlap(name: str) -> Check:
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
    advice = f"{_REBUILD}; until then a step takes longer"
    return Check(name, "not used: the kernels are compiled for older GPUs", "warning", advice)


def _threads(name: str) -> Check:
    threads.fit_threads()
    found, quota = threads.describe_threads(), threads.cpu_quota()
    if quota is None or torch.get_num_threads() <= max(1, round(quota)):
        return Check(name, found)
    return Check(name, found, "warning", "unset OMP_NUM_THREADS, or set it to the quota: more threads are slower")


def examine() -> list[Check]:
    """Check this installation: kernels run on the GPU, no model does. Changes nothing."""
    return [
        Check("dflash-engine", targets.version_of("dflash-engine")),
        Check("python", platform.python_version()),
        _package("torch", "2.11"),
        _package("transformers", "5.15"),
        _clash("import name"),
        _instruction_set("CPU kernels"),
        _threads("CPU threads"),
        _gpu("GPU"),
        _cuda_kernels("CUDA kernels"),
        *_kernel_checks(),
        _overlap("CUDA overlap"),
        _cuda_graphs("CUDA graphs"),
    ]
