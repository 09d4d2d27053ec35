"""Which instruction set the CPU kernels run on, with and without ``DFLASH_ISA``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash import _C

LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
print(_C.isa())
"""


def choose(name: str | None) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "DFLASH_ISA"}
    environment |= {"DFLASH_ISA": name} if name is not None else {}
    command = [sys.executable, "-c", LOAD, _C.__file__]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", _C.isas())
def test_every_set_that_runs_here_can_be_named(name):
    assert choose(name).stdout.strip() == name


@pytest.mark.parametrize("name", [None, ""])
def test_the_best_set_of_the_processor_is_chosen(name):
    flags = Path("/proc/cpuinfo").read_text()
    real = [isa for isa in _C.isas() if isa != "amx" or "amx_bf16" in flags]  # a build may emulate it
    assert choose(name).stdout.strip() == real[-1]


def test_a_set_that_cannot_run_here_is_refused_with_those_that_can():
    refused = choose("avx3")
    assert refused.returncode == 1
    error = refused.stderr.strip().splitlines()[-1]
    assert error == (
        f"RuntimeError: DFLASH_ISA=avx3 cannot run here: this build and processor have {', '.join(_C.isas())}"
    )
