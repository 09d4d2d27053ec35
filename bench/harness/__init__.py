"""What every ``bench_<op>.py`` shares: sizes, operands, interleaved timing, the lines and the JSON rows.

A bench file yields `Case` objects and calls `main`; ``bench_all.py`` runs them all. Prints; asserts
nothing. How to read a line: bench/README.md.
"""

from .cases import MODELS, TINY, Case, Model, Options, full_width, rotate
from .command import finish, main, parser
from .machine import commit, driver, header, processor
from .timing import Timer, copy_bandwidth, read_bandwidth

__all__ = [
    "MODELS",
    "TINY",
    "Case",
    "Model",
    "Options",
    "Timer",
    "commit",
    "copy_bandwidth",
    "driver",
    "finish",
    "full_width",
    "header",
    "main",
    "parser",
    "processor",
    "read_bandwidth",
    "rotate",
]
