"""Compiles csrc/cuda for the CPU: ``load()`` gives the module. Objects are kept under build/ and reused.

``python tests/cuda_emulation/build.py`` builds it and prints where it is; ``--sanitize`` with AddressSanitizer and
UndefinedBehaviorSanitizer. Needs g++ and the headers of the CUDA toolkit (CUDA_HOME, or where nvcc is).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from filelock import FileLock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "cuda_emulation"
SKIPPED = {"probe.cu"}  # asks the driver
MACHINE = ("cuda_emulation", "shadow", "ptx", "module")
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
SHARED = ".bss=emulated_shared,alloc,load,data,contents"  # see cuda_emulation.h
FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", *WARNINGS]
KERNEL_FLAGS = ["-O1", "-ftrivial-auto-var-init=pattern", "-include", "cuda_emulation.h", "-x", "c++"]
# Every access to memory calls a function of cuda_emulation.cpp; ThreadSanitizer itself is not linked.
WATCHED = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-threadsafe-statics"]
SANITIZERS = [
    "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer",
]  # fmt: skip


def cuda_include() -> Path | None:
    """The folder of the toolkit's headers, or None."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), str(Path(nvcc).resolve().parents[1]) if nvcc else None, "/usr/local/cuda"]
    for home in homes:
        if home and (Path(home) / "include" / "cuda_bf16.h").exists():
            return Path(home) / "include"
    return None


def missing() -> str:
    """What keeps the emulation from being built; empty if nothing does."""
    if importlib.util.find_spec("pybind11") is None:
        return "pybind11 is not installed"
    if cuda_include() is None:
        return "no CUDA headers (set CUDA_HOME)"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "no g++ (set CXX)"
    return ""


def build(sanitize: bool = False) -> Path:
    """Compile what has changed and link it; the path of the module."""
    import pybind11

    compiler = os.environ.get("CXX", "g++")
    csrc = ROOT / "csrc"
    FOLDER.mkdir(parents=True, exist_ok=True)
    includes = [HERE, csrc, cuda_include(), pybind11.get_include(), sysconfig.get_paths()["include"]]
    flags = [*FLAGS, *(word for path in includes for word in (["-I", str(path)]))]
    kernels = sorted(path for path in (csrc / "cuda").rglob("*.cu") if path.name not in SKIPPED)
    headers = [p for top in (csrc, HERE) for p in top.rglob("*") if p.suffix in {".h", ".cuh"}]
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    common = hashlib.sha256(version.encode())
    for path in sorted(headers):
        common.update(path.read_bytes())

    jobs = []  # (source, object, flags)
    for source in [*kernels, HERE / "self_test.cu", *(HERE / f"{name}.cpp" for name in MACHINE)]:
        own = list(flags)
        if source.suffix == ".cu":
            own += [*(SANITIZERS if sanitize else WATCHED), *KERNEL_FLAGS]
        elif source.stem != "module":
            own += ["-O2", "-fwrapv", "-frounding-math", f"-DEMULATION_ASAN={int(sanitize)}"]
        key = common.copy()
        key.update(repr((own, SHARED, source.name)).encode() + source.read_bytes())
        jobs.append((source, FOLDER / f"{source.stem}-{key.hexdigest()[:16]}.o", own))

    def compile_one(job: tuple[Path, Path, list[str]]) -> None:
        source, target, own = job
        if not target.exists():
            partial = target.with_suffix(f".{os.getpid()}.tmp")
            done = subprocess.run(
                [compiler, *own, "-c", str(source), "-o", str(partial)], capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(f"{source.name} does not compile:\n{done.stderr}")
            if source.suffix == ".cu":
                subprocess.run(["objcopy", "--rename-section", SHARED, str(partial)], check=True)
            partial.replace(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, jobs))
    objects = [str(target) for _, target, _ in jobs]
    place = FOLDER / hashlib.sha256(" ".join(objects).encode()).hexdigest()[:16]
    module = place / "cuda_emulation.so"
    if not module.exists():
        place.mkdir(exist_ok=True)
        partial = module.with_suffix(f".{os.getpid()}.tmp")
        link = ["-fsanitize=address,undefined"] if sanitize else []
        subprocess.run([compiler, "-shared", *link, "-o", str(partial), *objects], check=True)
        partial.replace(module)
    return module


def load(sanitize: bool = False) -> ModuleType:
    """Build and import the module. With sanitizers, libasan has to be loaded first (see README.md)."""
    with FileLock(FOLDER / "lock"):  # one process of `pytest -n` builds it
        path = build(sanitize)
    spec = importlib.util.spec_from_file_location("cuda_emulation", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(missing() or build("--sanitize" in sys.argv[1:]))
