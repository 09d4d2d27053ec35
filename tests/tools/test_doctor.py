"""Test ``dflash doctor``: every fault of an installation is found, with one line of advice."""

import importlib.metadata
import json
import math

import pytest
import quantized_folders
import torch
from families import make_target
from gguf import GGMLQuantizationType
from gguf_files import write_llama

from dflash import ops
from dflash.loading import Pretrained
from dflash.ops import switches
from dflash.ops.check import OVERLAPPING, KernelResult
from dflash_tools.doctor import installation


@pytest.mark.parametrize(("tied", "kind"), [(False, "Q8_0"), (False, "Q4_0"), (True, "Q8_0")])
def test_the_weights_of_a_gguf_file_are_counted_without_loading_them(shell, tmp_path, monkeypatch, tied, kind):
    path = tmp_path / "x.gguf"
    write_llama(path, lambda name: GGMLQuantizationType["F16" if name == "output.weight" and tied else kind])
    monkeypatch.setattr(Pretrained, "load_target", lambda *_, **__: pytest.fail("a model was loaded"))
    found = json.loads(shell("doctor", path, "--json", "--dtype", "float32").assert_done().out)
    kinds = {(each["type"], each["becomes"]): each for each in found["kinds"]}
    packed = kinds[kind, "stays packed"]
    assert packed["tensors"] == 4 * 7 + (1 if tied else 2)
    assert packed["read"] == packed["memory"] - 97 * 64 * (34 if kind == "Q8_0" else 18) / 32
    assert found["read"] < found["memory"]
    assert found["tokens_per_second"] > 0
    assert found["refused"] == ""


def test_the_weights_of_a_folder_and_what_is_refused_are_named(shell, tmp_path):
    make_target("qwen3", tie_word_embeddings=True, dtype=torch.bfloat16).save_pretrained(tmp_path / "folder")
    (kind,) = json.loads(shell("doctor", tmp_path / "folder", "--json").assert_done().out)["kinds"]
    assert (kind["type"], kind["memory"]) == ("BF16", kind["read"])
    quantized_folders.write_llama(tmp_path / "gptq", "gptq")
    shell("doctor", tmp_path / "gptq").assert_refused("was quantized by another library")
    write_llama(tmp_path / "x.gguf", GGMLQuantizationType.Q8_0, keys={"llama.rope.scaling.type": "spiral"})
    done = shell("doctor", tmp_path / "x.gguf")
    assert done.code == 1
    assert "it cannot be run: " in done.out
    assert "rope.scaling.type = spiral" in done.out
    shell("doctor", tmp_path / "x.gguf", "--model", "x", "--draft", "y").assert_refused("FILE is examined by itself")


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


def test_more_threads_than_the_containers_quota_are_a_warning(monkeypatch, set_threads):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    set_threads(2)
    assert find("CPU threads").status == "ok"
    monkeypatch.setattr("dflash.threads.cpu_quota", lambda _=None: 0.5)
    assert find("CPU threads").status == "warning"


def test_an_old_package_and_a_clash_are_errors(monkeypatch):
    versions(monkeypatch, torch="2.9.1+cpu", transformers="5.15.0", dflash="0.1.0")
    assert find("torch").status == "error"
    assert "torch>=2.11" in find("torch").advice
    assert find("transformers").status == "ok"
    assert find("import name").status == "error"
    assert "uninstall" in find("import name").advice


@pytest.mark.parametrize(
    ("chosen", "flag"),
    [("avx512", "avx512_bf16"), ("avx2", "avx_vnni"), ("avx2", "amx_bf16"), ("neon", "asimddp"), ("dotprod", "i8mm")],
)
def test_a_forced_instruction_set_or_one_below_the_processors_is_a_warning(monkeypatch, chosen, flag):
    monkeypatch.setattr(ops, "isa", lambda: chosen)
    monkeypatch.setattr(installation, "processor_flags", lambda: {"avx2", flag})
    assert find("CPU kernels").found.startswith(f"{chosen}: ")
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

    monkeypatch.setattr(installation.kernel_check, "check_gpu", check_gpu)
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


def test_the_command_prints_a_table_or_json(shell, monkeypatch):
    assert "CPU kernels" in shell("doctor").assert_done().out
    checks = json.loads(shell("doctor", "--json").out)
    assert [check["name"] for check in checks] == [check.name for check in installation.examine()]
    versions(monkeypatch, dflash="0.1.0")
    done = shell("doctor")
    assert done.code == 1
    assert "-> pip uninstall dflash" in done.out
