"""A build log with ``ptxas -v`` in, one line a kernel out; exit code 1 if one spills, or if there is none."""

import re
import subprocess
import sys

KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for '(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def main() -> int:
    kernels = [match.groupdict() for match in KERNEL.finditer(sys.stdin.read())]
    names = "\n".join(kernel["name"] for kernel in kernels)
    demangled = subprocess.run(["c++filt", "-p"], input=names, capture_output=True, text=True, check=True).stdout
    for name, kernel in sorted(zip(demangled.splitlines(), kernels, strict=True), key=lambda pair: pair[0]):
        shared = re.search(r"(\d+) bytes smem", kernel["rest"])
        spilled = int(kernel["stores"]) + int(kernel["loads"])
        print(
            f"{kernel['arch']} {kernel['registers']:>4} registers {shared.group(1) if shared else 0:>6} B shared "
            f"{kernel['stack']:>4} B stack {spilled:>4} B spilled  {name.removeprefix('dflash::')}"
        )
    return 0 if kernels and not any(int(k["stores"]) + int(k["loads"]) for k in kernels) else 1


if __name__ == "__main__":
    sys.exit(main())
