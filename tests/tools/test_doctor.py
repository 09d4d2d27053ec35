"""Test ``dflash doctor``: every fault of an installation is found, with one line of advice."""

import importlib.metadata
import json
import math
import sys

import pytest
import torch

from dflash import cli, ops
from dflash.ops import switches
from dflash.ops.check import OVERLAPPING, KernelResult
from dflash_tools.doctor import installation


def find(name: str) -> installation.Check:
    return next(check for check in installation.examine() if check.name == name)


def versions(monkeypatch, **known: str) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: known.get(name) or real(name))


def test_this_installation_works():
    checks = installation.examine()
    assert all(check.status != "error" for check in checks)
    assert find("torch").found == importlib.metadata.version("torch")
    assert find("CPU kernels").found.startswith(ops.isa())


def test_an_old_package_and_a_clash_are_errors(monkeypatch):
    versions(monkeypatch, torch="2.9.1+cpu", transformers="5.15.0", dflash="0.1.0")
    assert find("torch").status == "error"
    assert "torch>=2.11" in find("torch").advice
    assert find("transformers").status == "ok"
    assert find("import name").status == "error"
    assert "uninstall" in find("import name").advice


@pytest.mark.parametrize(("chosen", "flag"), [("avx512", "avx512_bf16"), ("avx2", "avx_vnni"), ("avx2", "amx_bf16")])
def test_a_forced_instruction_set_or_one_below_the_processors_is_a_warning(monkeypatch, chosen, flag):
    monkeypatch.setattr(ops, "isa", lambda: chosen)
    monkeypatch.setattr(installation, "processor_flags", lambda: {"avx2", flag})
    assert "DFLASH_ALL_ISAS=ON" in find("CPU kernels").advice
    monkeypatch.setenv("DFLASH_ISA", "scalar")
    assert "unset DFLASH_ISA" in find("CPU kernels").advice


DRIVER = "the driver is made for CUDA 12, the kernels need one for CUDA 13"
NONE, CPU = {"seen": False, "present": False, "cuda": None}, {"seen": False, "present": True, "cuda": None}
# What is reported, what the machine has, the status, and words of what was found or of the advice.
STATES = [
    ("GPU", NONE, "ok", "none"),
    ("GPU", CPU, "warning", "CPU build"),
    ("GPU", CPU | {"cuda": "13.0"}, "warning", "cannot use it"),
    ("GPU", {}, "ok", "a GPU"),
    ("CUDA kernels", {"has_cuda_kernels": False}, "warning", "nvcc"),
    ("CUDA kernels", {"cuda_status": DRIVER}, "warning", "update the driver"),
    ("CUDA kernels", {"cuda_status": "no kernel image is available"}, "warning", "CMAKE_CUDA_ARCHITECTURES"),
    ("CUDA kernels", {"cuda_status": "out of memory"}, "warning", "free the GPU"),
    ("CUDA kernels", {}, "ok", "running"),
    ("- linear", {}, "ok", "error 6.0e-03, at most 3.1e-02; 19 us"),
    ("- linear", {"findings": [KernelResult("linear", math.inf, 0.03, 0, "it differs")]}, "error", "please report"),
    ("- linear", {"kernels_off": {"linear": "DFLASH_KERNELS turns it off"}}, "warning", "unset DFLASH_KERNELS"),
    ("- overlapping launches", {"findings": [KernelResult(OVERLAPPING, 0, 0, 0, "")]}, "ok", "same bits"),
    ("- kernels", {"findings": RuntimeError("no room")}, "warning", "not compared: RuntimeError: no room"),
    ("CUDA graphs", NONE, "ok", "no GPU"),
    ("CUDA graphs", {}, "ok", "used"),
    ("CUDA graphs", {"graph_error": "no memory"}, "warning", "no memory"),
    ("CUDA overlap", {}, "ok", "used: a kernel starts"),
    ("CUDA overlap", {"overlaps": False, "capability": (8, 6)}, "ok", "needs compute capability 9.0, this GPU has 8.6"),
    ("CUDA overlap", {"overlaps": False}, "warning", "compiled for older GPUs"),
    ("CUDA overlap", {"off": ["OVERLAP"]}, "warning", "turned off by DFLASH_OVERLAP"),
    ("CUDA overlap", {"off": ["OVERLAP", "PREFETCH"]}, "warning", "DFLASH_OVERLAP and DFLASH_PREFETCH"),
]


@pytest.mark.parametrize(("name", "machine", "status", "words"), STATES)
def test_the_state_of_the_gpu_and_its_kernels_is_reported(monkeypatch, name, machine, status, words):
    of = {"seen": True, "present": True, "cuda": "13.0", "capability": (9, 0), "off": ()}
    of |= {"has_cuda_kernels": True, "cuda_status": "", "overlaps": True, "graph_error": "", "kernels_off": {}}
    of |= {"findings": [KernelResult("linear", 0.006, 0.031, 19, "")]} | machine
    monkeypatch.setattr(torch.cuda, "is_available", lambda: of["seen"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: of["capability"])
    monkeypatch.setattr(torch.version, "cuda", of["cuda"])
    monkeypatch.setattr(installation, "_gpu_present", lambda: of["present"])

    def check_gpu(_device):
        if isinstance(of["findings"], Exception):
            raise of["findings"]
        return of["findings"]

    monkeypatch.setattr(installation, "check_gpu", check_gpu)
    for ask in ("has_cuda_kernels", "cuda_status", "overlaps", "kernels_off"):
        monkeypatch.setattr(ops, ask, lambda *_, ask=ask: of[ask])
    for switch in of["off"]:
        monkeypatch.setattr(ops, switch, False)
    monkeypatch.setattr(installation, "_graph_error", lambda: of["graph_error"])
    check = find(name)
    assert check.status == status
    assert words in check.found + check.advice


def test_a_switch_is_0_or_1(monkeypatch):
    monkeypatch.delenv("DFLASH_OVERLAP", raising=False)
    assert switches.is_on("DFLASH_OVERLAP")
    for value in ("1", "0", ""):
        monkeypatch.setenv("DFLASH_OVERLAP", value)
        assert switches.is_on("DFLASH_OVERLAP") == (value != "0")
    monkeypatch.setenv("DFLASH_OVERLAP", "off")
    with pytest.raises(ValueError, match="DFLASH_OVERLAP must be 0 or 1, got 'off': unset it"):
        switches.is_on("DFLASH_OVERLAP")


def test_the_command_prints_a_table_or_json(monkeypatch, capsys):
    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["dflash", "doctor", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code or 0, capsys.readouterr().out

    code, text = call()
    assert code == 0
    assert "CPU kernels" in text
    code, text = call("--json")
    assert [check["name"] for check in json.loads(text)] == [check.name for check in installation.examine()]
    versions(monkeypatch, dflash="0.1.0")
    code, text = call()
    assert code == 1
    assert "-> pip uninstall dflash" in text
