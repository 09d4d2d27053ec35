"""Which instruction set the CPU kernels run on, with and without ``DFLASH_ISA``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash import _C

pytestmark = pytest.mark.linux  # reads /proc

LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
print(_C.isa())
"""

AVX2 = {"avx2", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
NEEDED = {
    "scalar": set(),
    "avx2": AVX2,
    "avx_vnni": AVX2 | {"avx_vnni"},
    "avx512": AVX512,
    "avx512_bf16": AVX512 | {"avx512_bf16", "avx512_vnni"},
    "amx": AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"},
    "neon": {"asimd"},
    "dotprod": {"asimd", "asimddp"},
    "i8mm": {"asimd", "asimddp", "i8mm"},
}
TILERELEASE = bytes.fromhex("c4e27849c0")  # an instruction that a build which emulates tiles does not have
BUILD = Path(_C.__file__).read_bytes()
FLAGS = set(Path("/proc/cpuinfo").read_text().split()) if sys.platform == "linux" else set()
BUILT = [name for name in NEEDED if f"{name}\0".encode() in BUILD]  # a compiler may not know the last ones
RUNNING = [name for name in BUILT if NEEDED[name] <= FLAGS and (name != "amx" or TILERELEASE in BUILD)]
EMULATED = [name for name in BUILT if name == "amx" and AVX512 <= FLAGS and TILERELEASE not in BUILD]


def choose(name: str | None) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "DFLASH_ISA"}
    environment |= {"DFLASH_ISA": name} if name is not None else {}
    command = [sys.executable, "-c", LOAD, _C.__file__]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_sets_of_the_processor_are_listed():
    assert _C.isas() == RUNNING + EMULATED


@pytest.mark.parametrize("name", RUNNING + EMULATED)
def test_every_set_that_runs_here_can_be_named(name):
    assert choose(name).stdout.strip() == name


@pytest.mark.parametrize("name", [None, ""])
def test_the_best_set_of_the_processor_is_chosen_and_none_that_is_emulated(name):
    assert choose(name).stdout.strip() == RUNNING[-1]


@pytest.mark.parametrize("name", ["avx3", *(name for name in NEEDED if name not in RUNNING + EMULATED)])
def test_a_set_that_cannot_run_here_is_refused_with_those_that_can(name):
    refused = choose(name)
    assert refused.returncode == 1
    error = refused.stderr.strip().splitlines()[-1]
    assert error == (
        f"RuntimeError: DFLASH_ISA={name} cannot run here: this build and processor have "
        f"{', '.join(RUNNING + EMULATED)}"
    )
