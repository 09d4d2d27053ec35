"""Compiles the CPU kernels for aarch64, in a program that runs them under qemu; ``build()`` gives its path.

``python tests/arm/build.py`` prints it, and with ``--sets`` the instruction sets. Objects are kept under build/ and
reused. Needs Debian's g++-12-aarch64-linux-gnu and qemu-user-static, or others of these (ARM_CXX, ARM_EMULATOR).
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "build" / "arm"
COMPILER = os.environ.get("ARM_CXX", "aarch64-linux-gnu-g++-12")
EMULATOR = os.environ.get("ARM_EMULATOR", "qemu-aarch64-static")
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"]
KERNEL_FLAGS = ["-fno-math-errno", "-fno-exceptions", "-ffp-contract=off"]


def instruction_sets() -> dict[str, list[str]]:
    """Return the sets that CMakeLists.txt has for Arm, with their own flags, from the plainest to the best."""
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.findall(r"instruction_set\((\w+) neon ?(.*)\)", text)
    return {isa: flags.split() + ["-DDFLASH_BASE=neon"] * (isa != "neon") for isa, flags in found}


def build() -> Path:
    """Compile what has changed and link it; the path of the program."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    csrc, version = ROOT / "csrc", subprocess.run([COMPILER, "--version"], capture_output=True, check=True).stdout
    common = hashlib.sha256(version + b"".join(path.read_bytes() for path in sorted(csrc.rglob("*.h"))))
    sets = instruction_sets()
    kernels = [path for path in sorted((csrc / "cpu").rglob("*.cpp")) if path.stem not in ("dispatch", "team")]
    names = re.findall(r"(?:PRODUCT|CPU)_KERNEL\((\w+)", (csrc / "binding" / "params.h").read_text())
    found = ["-DDFLASH_SETS=" + "".join(f"SET({isa})" for isa in sets)]
    jobs = [(path, [*found, "-fwrapv"]) for path in (csrc / "cpu/base/dispatch.cpp", csrc / "cpu/base/team.cpp")]
    jobs.append((HERE / "harness.cpp", []))
    for isa, flags in sets.items():
        own = kernels if isa == "neon" else [path for path in kernels if path.stem in {*names, "table"}]
        jobs += [(path, [*KERNEL_FLAGS, f"-DDFLASH_ISA={isa}", *flags]) for path in own]

    def compiled(job: tuple[Path, list[str]]) -> Path:
        source, flags = job
        key = common.copy()
        key.update(repr((FLAGS, flags)).encode() + source.read_bytes())
        target = FOLDER / f"{source.stem}-{key.hexdigest()[:16]}.o"
        if not target.exists():
            partial = target.with_suffix(".tmp")
            subprocess.run([COMPILER, *FLAGS, *flags, "-c", str(source), "-o", str(partial)], check=True)
            partial.rename(target)
        return target

    with FileLock(FOLDER / "lock"), ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, jobs))
        program = FOLDER / "harness"
        subprocess.run([COMPILER, "-static", *map(str, objects), "-o", str(program)], check=True)
    return program


if __name__ == "__main__":
    print(*instruction_sets() if "--sets" in sys.argv else [build()])
