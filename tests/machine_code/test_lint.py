"""The lint of machine code: sound kernels pass, and each planted fault is found."""

import os
import shutil
import subprocess
from pathlib import Path

import lint
import pytest
from cubins import kernels_of, readable

HERE = Path(__file__).parent
FAULTS = {
    "reads_early": "touches memory before the wait: LDG",
    "block_attention_kernel_hits_l1": "touches memory before the wait: LDG.E.64",
    "qkv_norm_rope_append_kernel_early": "lets the next kernel start before its own wait",
    "writes_early": "touches memory before the wait: STG", "copies_early": "touches memory before the wait: LDGSTS",
    "waits_on_one_path": "touches memory before the wait: LDG", "ends_early": "may end before the wait",
    "never_waits": "never waits", "uses_local_memory": "local memory: LDL", "loads_stale": "may be stale",
    "copies_four_bytes": "less than 16 bytes",
}  # fmt: skip
SOUND = ["sound_plain", "sound_with_branches", "linear_kernel_copies"]
SOUND += ["block_attention_kernel_reads", "qkv_norm_rope_append_kernel_late"]


def compiled(folder, target):
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    path = folder / f"faults.{target}.cubin"
    command = [nvcc, "-std=c++17", f"-arch=sm_{target}", "-cubin", "-I", HERE.parents[1] / "csrc", HERE / "faults.cu"]
    subprocess.run([*map(str, command), "-o", str(path)], check=True)
    return path


def findings_of(cubin):
    kernels = kernels_of(cubin)
    return dict(zip(readable([k.name for k in kernels]), map(lint.findings, kernels), strict=True))


@pytest.fixture(scope="module")
def cubin(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("faults"), 90)


@pytest.fixture(scope="module")
def found(cubin):
    return findings_of(cubin)


def test_every_planted_kernel_is_looked_at(found):
    assert set(found) == {*FAULTS, *SOUND}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_kernel_passes(found, name):
    assert found[name] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(found, name):
    assert any(FAULTS[name] in rule for rule in found[name])


def test_only_what_overlaps_has_to_wait(tmp_path):
    found = {name: rules for name, rules in findings_of(compiled(tmp_path, 80)).items() if rules}
    assert found.keys() == {"uses_local_memory", "copies_four_bytes"}


def test_the_command_fails_if_a_rule_is_broken(cubin, capsys):
    assert lint.main([str(cubin)]) == 1
    assert f"16 kernels, {len(FAULTS)} with findings" in capsys.readouterr().out
