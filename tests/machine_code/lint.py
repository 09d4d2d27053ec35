"""Checks that need no GPU, on the machine code of CUDA kernels: ``python tests/machine_code/lint.py FILE``.

A file is a cubin, an object file or a shared library such as ``_C``. One line per kernel; exit code 1 if one breaks a
rule. A compiler may move an access over a wait in another version; the source would not show it.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from cubins import Instruction, Kernel, kernels_of, readable

_GLOBAL = ("LDG", "STG", "LDGSTS", "ATOMG", "ATOM", "RED", "REDG", "LD", "ST", "UBLKCP", "UTMALDG", "UTMASTG")
# Parts of kernels' names, and the opcodes that these may have where others may not. Before the wait: weights, see
# `prefetch` in linear.cu; past the L1, lengths and all that they lead to in append.cu, lengths and old
# keys and values in block_attention.cu.
EARLY = {
    "linear_kernel": ("LDGSTS",),
    "block_attention_kernel": ("LDG.E.64.STRONG.GPU", "LDGSTS"),
    "qkv_norm_rope_append_kernel": tuple(f"LDG.E.{width}STRONG.GPU" for width in ("128.", "64.", "U16.", "")),
}
# Those behind may read early, as they start after its wait.
LATE = ("qkv_norm_rope_append_kernel", "draft_rows_kernel", "gather_rows_kernel")
_WAITS = 90  # the first target whose launches may overlap, and whose kernels wait
NARROW = ("gated_recurrence_kernel",)  # copies of 4 bytes, of rows at any address


def findings(kernel: Kernel) -> list[str]:
    """Return the rules that a kernel breaks."""
    every, early = kernel.instructions, _early(kernel)
    allowed = next((opcodes for part, opcodes in EARLY.items() if part in kernel.name), ())
    touched = [i for i in early if i.is_a(*_GLOBAL) and not i.opcode.startswith(allowed)]
    waits = any(i.is_a("ACQBULK") for i in every)
    overlaps, found = kernel.target >= _WAITS, []
    if overlaps and not waits and any(i.is_a(*_GLOBAL) for i in every):
        found.append("never waits for the kernel ahead")
    elif touched:
        found.append(f"touches memory before the wait: {_opcodes(touched)}")
    if waits and any(i.is_a("EXIT") for i in early):
        found.append("may end before the wait")
    if any(part in kernel.name for part in LATE) and any(i.is_a("PREEXIT") for i in early):
        found.append("lets the next kernel start before its own wait")
    if local := [i for i in every if i.is_a("LDL", "STL")]:
        found.append(f"local memory: {_opcodes(local)}")
    if overlaps and (constant := [i for i in every if i.is_a("LDG") and ".CONSTANT" in i.opcode]):
        found.append(f"loads that may be stale in a kernel that overlaps: {_opcodes(constant)}")
    narrow = [i for i in every if i.is_a("LDGSTS") and ".128" not in i.opcode]
    if narrow and not any(part in kernel.name for part in NARROW):
        found.append(f"asynchronous copies of less than 16 bytes: {_opcodes(narrow)}")
    return found


@functools.cache  # the walk takes most of the time
def _early(kernel: Kernel) -> list[Instruction]:
    """Return what a thread may run before it waits for the kernel ahead; nothing where it never has to."""
    return kernel.before("ACQBULK") if kernel.target >= _WAITS else []


def _opcodes(instructions: list[Instruction]) -> str:
    return ", ".join(sorted({i.opcode for i in instructions}))


def main(paths: list[str]) -> int:
    kernels = [kernel for path in paths for kernel in kernels_of(Path(path))]
    broken = 0
    for name, kernel in sorted(
        zip(readable([k.name for k in kernels]), kernels, strict=True), key=lambda pair: pair[0]
    ):
        found = findings(kernel)
        broken += bool(found)
        count = {kind: sum(i.opcode.startswith(kind) for i in kernel.instructions) for kind in ("HMMA", "MEMBAR.SC")}
        early = sum(i.is_a("LDGSTS") for i in _early(kernel))
        rules = "".join(f"  <-- {rule}" for rule in found)
        print(
            f"sm_{kernel.target:<3d} {len(kernel.instructions):6d} instructions {early:3d} copies before the wait "
            f"{count['HMMA']:4d} mma {count['MEMBAR.SC']:2d} MEMBAR.SC  {name[:90]}{rules}"
        )
    print(f"{len(kernels)} kernels, {broken} with findings")
    return int(broken > 0 or not kernels)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
