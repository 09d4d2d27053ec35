"""Test ``dflash doctor``: every fault of an installation is found, with one line of advice."""

import importlib.metadata
import json
import sys

import pytest
import torch

from dflash import cli, ops
from dflash.cli import diagnosis as doctor
from dflash.engine import graphs
from dflash.ops import switches


def find(name: str) -> doctor.Check:
    return next(check for check in doctor.examine() if check.name == name)


def versions(monkeypatch, **known: str) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: known.get(name) or real(name))


def gpu(monkeypatch, *, seen: bool, present: bool, cuda: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _index: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "_gpu_present", lambda: present)


def test_this_installation_works():
    checks = doctor.examine()
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


def test_a_forced_instruction_set_is_a_warning(monkeypatch):
    monkeypatch.setenv("DFLASH_ISA", "scalar")
    monkeypatch.setattr(ops, "isa", lambda: "scalar")
    assert find("CPU kernels").status == "warning"
    assert "DFLASH_ISA" in find("CPU kernels").advice


@pytest.mark.parametrize(
    ("seen", "present", "cuda", "status", "words"),
    [
        (False, False, None, "ok", "none"),
        (False, True, None, "warning", "CPU build"),
        (False, True, "13.0", "warning", "cannot use it"),
        (True, True, "13.0", "ok", "a GPU"),
    ],
)
def test_the_state_of_the_gpu_is_reported(monkeypatch, seen, present, cuda, status, words):
    gpu(monkeypatch, seen=seen, present=present, cuda=cuda)
    monkeypatch.setattr(graphs, "graph_status", lambda: "")
    assert find("GPU").status == status
    assert words in find("GPU").found


@pytest.mark.parametrize(
    ("built", "reason", "status", "advice"),
    [
        (False, "", "warning", "nvcc"),
        (True, "the driver is made for CUDA 12, the kernels need one for CUDA 13", "warning", "update the driver"),
        (True, "no kernel image is available", "warning", "CMAKE_CUDA_ARCHITECTURES"),
        (True, "", "ok", ""),
    ],
)
def test_the_state_of_the_cuda_kernels_is_reported(monkeypatch, built, reason, status, advice):
    gpu(monkeypatch, seen=True, present=True, cuda="13.0")
    monkeypatch.setattr(ops, "has_cuda_kernels", lambda: built)
    monkeypatch.setattr(ops, "cuda_status", lambda _device: reason)
    monkeypatch.setattr(graphs, "graph_status", lambda: "")
    assert find("CUDA kernels").status == status
    assert advice in find("CUDA kernels").advice


@pytest.mark.parametrize(("reason", "status", "words"), [("", "ok", "used"), ("no memory", "warning", "no memory")])
def test_the_state_of_cuda_graphs_is_reported(monkeypatch, reason, status, words):
    assert "no GPU" in find("CUDA graphs").found or torch.cuda.is_available()
    gpu(monkeypatch, seen=True, present=True, cuda="13.0")
    monkeypatch.setattr(ops, "cuda_status", lambda _device: "")
    monkeypatch.setattr(graphs, "graph_status", lambda: reason)
    assert find("CUDA graphs").status == status
    assert words in find("CUDA graphs").found


@pytest.mark.parametrize(
    ("off", "overlaps", "capability", "status", "words"),
    [
        ((), True, (9, 0), "ok", "used: a kernel starts"),
        ((), False, (8, 6), "ok", "needs compute capability 9.0, this GPU has 8.6"),
        ((), False, (9, 0), "warning", "compiled for older GPUs"),
        (("OVERLAP",), False, (9, 0), "warning", "turned off by DFLASH_OVERLAP"),
        (("OVERLAP", "PREFETCH"), False, (9, 0), "warning", "DFLASH_OVERLAP and DFLASH_PREFETCH"),
    ],
)
def test_whether_kernels_overlap_is_reported(monkeypatch, off, overlaps, capability, status, words):
    gpu(monkeypatch, seen=True, present=True, cuda="13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(ops, "cuda_status", lambda _device: "")
    monkeypatch.setattr(ops, "overlaps", lambda _device: overlaps)
    for switch in off:
        monkeypatch.setattr(ops, switch, False)
    monkeypatch.setattr(graphs, "graph_status", lambda: "")
    assert find("CUDA overlap").status == status
    assert words in find("CUDA overlap").found


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
    assert [check["name"] for check in json.loads(text)] == [check.name for check in doctor.examine()]
    versions(monkeypatch, dflash="0.1.0")
    code, text = call()
    assert code == 1
    assert "-> pip uninstall dflash" in text
