"""Exit 1 unless torch and dflash share one OpenMP runtime; the threads of two would spin against each other."""

import re
import sys

import torch  # noqa: F401

import dflash  # noqa: F401

with open("/proc/self/maps") as maps:
    paths = {line.split()[-1] for line in maps if re.search(r"/lib(gomp|omp|iomp5)[^/]*\.so", line)}
print("OpenMP runtimes:", *sorted(paths))
sys.exit(len(paths) != 1)
