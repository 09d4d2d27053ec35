"""The first use of a GPU: its kernels are compared with plain torch, and what is wrong is turned off by name."""

import contextlib
import importlib
import math

import pytest
import torch
from op_checks import Emulated

from dflash import _C, ops
from dflash.ops import check, reference, registry, switches
from dflash.ops.examples import calls

GPU = torch.device("cuda", 0)


class EmulatedGpu:
    """An emulated GPU, with faults: ``{kernel: change(fields of its params)}``."""

    device = torch.device("cpu")

    def __init__(self, module, faults=()):
        self.launcher, self.faults = Emulated(module), dict(faults)
        self.spoilt = []  # launches that overlap read it later
        launch = self.launcher.kernels.launch
        self.launcher.kernels = Spoiled(
            module, lambda kernel, fields, *rest: launch(kernel, self.spoil(kernel, fields), *rest)
        )

    def spoil(self, kernel, fields):
        self.spoilt.append(self.faults.get(kernel, lambda _fields: {})(fields))
        return fields | self.spoilt[-1]

    def wait(self):
        pass

    def is_broken(self):
        return False

    def one_by_one(self):
        return contextlib.nullcontext()

    def overlapping(self, work):
        with self.launcher.overlapping():
            results = work()
        yield results


class Spoiled:
    """The module of kernels with another ``launch``."""

    def __init__(self, module, launch):
        self.module, self.launch = module, launch

    def __getattr__(self, name):
        return getattr(self.module, name)


@pytest.fixture
def none_off():
    """Kernels that the test turns off are on again after it."""
    kept = registry._OFF, check._FAULTS
    before = [dict(each) for each in kept]
    yield
    for each, old in zip(kept, before, strict=True):
        each.clear()
        each.update(old)


FAULTS = {
    "rms_norm": lambda fields: {"weight": 1.5 * fields["weight"]},
    "block_attention": lambda fields: {"scale": 1.1 * fields["scale"]},
    "linear": lambda fields: {"x": 1.1 * fields["x"]} if fields["format"] == _C.FORMATS["w4a16g32m"] else {},
    "select_tokens": lambda fields: {"seeds": fields["seeds"] + 1, "temperature": fields["temperature"] * 2 + 1},
}


def test_overlapping_launches_that_do_not_end_break_the_gpu(emulation):
    class Stuck(EmulatedGpu):
        def overlapping(self, work):
            raise TimeoutError("it did not end within 20 seconds")  # on a stream of its own
            yield

    found = check.check_kernels(Stuck(emulation), layers=1)
    assert (found[-1].kernel, found[-1].broke) == (check.OVERLAPPING, True)


def test_right_kernels_pass_in_float16(emulation):
    found = check.check_kernels(EmulatedGpu(emulation), torch.float16, layers=2)
    assert not [each for each in found if each.fault]


def test_right_kernels_pass_and_wrong_ones_are_named_whatever_the_callers_settings(emulation):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu"):
            found = check.check_kernels(EmulatedGpu(emulation, FAULTS), layers=2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {each.kernel for each in found} == {getattr(ops, name).op.kernel for name in calls(check.SIZES[0])} | {
        check.OVERLAPPING
    }
    assert {each.kernel for each in found if each.fault} == FAULTS.keys()
    assert all(each.error <= each.bound < math.inf for each in found if not each.fault)
    wrong = next(each for each in found if each.kernel == "block_attention")
    assert wrong.error > wrong.bound
    assert "it differs from plain torch (error " in wrong.fault


def test_a_kernel_that_cannot_run_and_launches_that_overlap_wrongly_are_named(emulation):
    class Late(EmulatedGpu):
        def overlapping(self, work):
            yield [x + 1 for x in work()]

    def fails(fields):
        raise RuntimeError("no kernel image")

    found = {each.kernel: each for each in check.check_kernels(Late(emulation, {"silu_mul": fails}), layers=1)}
    assert {name for name, each in found.items() if each.fault} == {"silu_mul", check.OVERLAPPING}
    assert "no kernel image" in found["silu_mul"].fault
    assert "start early" in found[check.OVERLAPPING].fault


def test_a_kernel_that_is_off_runs_in_plain_torch_and_takes_its_family_along(emulation, none_off):
    on = Emulated(emulation)
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    on.kernels = Spoiled(emulation, lambda kernel, *rest: pytest.fail(f"{kernel} ran"))
    check.turn_off_faulty({"linear": "it differs"})
    assert ops.kernels_off() == {"linear": "it differs"}
    assert torch.equal(on.linear(x, weight), reference.linear(x, weight))
    assert torch.equal(on.swiglu(x, weight, weight), reference.swiglu(x, weight, weight))
    with pytest.raises(pytest.fail.Exception, match="rms_norm ran"):
        on.rms_norm(x, torch.ones(16), 1e-6)


def test_overlap_goes_off_alone(monkeypatch, none_off):
    switched = []
    monkeypatch.setattr(ops, "set_overlap", switched.append)
    check.turn_off_faulty({check.OVERLAPPING: "they differ"})
    assert switched == [False]
    assert ops.kernels_off() == {}


@pytest.mark.cuda
def test_the_kernels_of_this_gpu_pass():
    found = check.check_kernels(check.Gpu(GPU))
    assert not [each for each in found if each.fault]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a GPU, as far as `self_check` asks; returns the list of its checks."""
    made = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(ops, "cuda_status", lambda _index: "")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 << 30, 1 << 34))
    monkeypatch.setattr(check.Gpu, "is_broken", lambda _gpu: False)
    monkeypatch.setattr(check, "check_kernels", lambda gpu, dtype: made.append(dtype) or [])
    check._CHECKED.clear()
    yield made
    check._CHECKED.clear()


def new_process():
    """Forget what is not in the file."""
    for kept in (check._CHECKED, check._FAULTS, registry._OFF):
        kept.clear()


def test_a_machine_is_checked_once(machine, monkeypatch):
    def checks(*dtypes: torch.dtype) -> int:
        check._CHECKED.clear()  # as in another process
        for dtype in dtypes or (torch.bfloat16,) * 2:
            check.self_check(GPU, dtype)
        return len(machine)

    assert [checks(), checks()] == [1, 1]
    assert checks(torch.float32, torch.float16, torch.float16) == 2
    assert machine == [torch.bfloat16, torch.float16]
    machine.pop()
    monkeypatch.setattr(torch, "__version__", "another")
    assert checks() == 2
    monkeypatch.setattr(check, "SELF_CHECK", "always")
    assert checks() == 3
    monkeypatch.setattr(check, "SELF_CHECK", "0")
    check.self_check(torch.device("cpu"))
    assert checks() == 3


def test_an_error_counts_in_its_process_only_and_a_full_gpu_is_not_checked(machine, monkeypatch, none_off):
    def turned_off(raised):
        registry._OFF.clear()
        check._CHECKED.clear()
        monkeypatch.setattr(check, "check_kernels", lambda *_: [check.KernelResult("linear", 1, 0.1, 0, "x", raised)])
        check.self_check(GPU)
        return [*ops.kernels_off()]

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 << 28, 1 << 34))
    assert turned_off(raised=False) == []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 << 30, 1 << 34))
    with pytest.warns(UserWarning, match="linear: x"):
        assert turned_off(raised=True) == ["linear"]
    assert not check._file().exists()
    with pytest.warns(UserWarning, match="linear: x"):
        assert turned_off(raised=False) == ["linear"]
    assert check._file().exists()


def test_a_fault_is_remembered_and_what_torch_raises_is_not(machine, monkeypatch, none_off):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(check, "check_kernels", full)
    check.self_check(GPU)
    check._CHECKED.clear()
    monkeypatch.setattr(check, "check_kernels", lambda *_: [check.KernelResult("linear", 1.0, 0.1, 0, "it differs")])
    with pytest.warns(UserWarning, match=r"turns off CUDA kernels on a GPU.* linear: it differs") as warned:
        check.self_check(GPU)
    assert len(warned) == 1
    assert check._file().exists()
    new_process()
    monkeypatch.setattr(check, "check_kernels", full)  # not asked
    with pytest.warns(UserWarning, match="linear: it differs"):
        check.self_check(GPU)


def test_a_kernel_that_breaks_the_gpu_is_off_in_the_next_process_and_the_others_are_checked(
    machine, monkeypatch, none_off
):
    off = []

    def check_kernels(*_):
        off.append([*ops.kernels_off()])
        found = [check.KernelResult("linear", math.inf, 0.1, 0, "illegal", raised=True, broke=True)]
        return [check.KernelResult("silu_mul", 1, 0.1, 0, "it differs")] if "linear" in ops.kernels_off() else found

    monkeypatch.setattr(check, "check_kernels", check_kernels)
    with pytest.raises(RuntimeError, match=r"the CUDA kernel linear failed \(illegal\).* Start it again"):
        check.self_check(GPU)
    for _ in range(2):
        new_process()
        with pytest.warns(UserWarning, match="linear: illegal; silu_mul: it differs"):
            check.self_check(GPU)
        assert ops.kernels_off().keys() == {"linear", "silu_mul"}
    assert off == [[], ["linear"]]  # once each: the second check is remembered
    new_process()
    monkeypatch.setattr(check, "SELF_CHECK", "always")
    with pytest.warns(UserWarning, match="linear: illegal"):
        check.self_check(GPU)
    new_process()
    assert {each.kernel: each.fault for each in check.check_gpu(GPU)} == {"silu_mul": "it differs", "linear": "illegal"}
    assert off[2:] == [["linear"]] * 2


def test_a_gpu_that_broke_elsewhere_is_no_kernels_fault(machine, monkeypatch):
    def fails(*_):
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(check, "check_kernels", fails)
    check.self_check(GPU)  # plain torch could not; the next use asks again
    monkeypatch.setattr(check.Gpu, "is_broken", lambda _gpu: True)
    with pytest.raises(RuntimeError, match="an illegal address"):
        check.self_check(GPU)
    assert not check._file().exists()


def test_a_kernel_that_does_not_end_is_given_up(monkeypatch):
    class Stream:
        def query(self):
            return False

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream())
    monkeypatch.setattr(check, "PATIENCE", 0.01)
    gpu = check.Gpu(GPU)
    with pytest.raises(TimeoutError, match="did not end"):
        gpu.wait()
    assert gpu.is_broken()


def test_the_kernel_that_breaks_the_gpu_is_the_last(emulation):
    class Fragile(EmulatedGpu):
        def is_broken(self):
            return True

    def fails(fields):
        raise RuntimeError("an illegal address")

    found = check.check_kernels(Fragile(emulation, {"draft_rows": fails}))
    assert found[-1].kernel == "draft_rows"
    assert [each.broke for each in found] == [False] * (len(found) - 1) + [True]


def test_work_that_failed_before_is_not_blamed_on_a_kernel(emulation):
    class Broken(EmulatedGpu):
        def wait(self):
            raise RuntimeError("from elsewhere")

    with pytest.raises(RuntimeError, match="from elsewhere"):
        check.check_kernels(Broken(emulation))


@pytest.mark.parametrize(("value", "names"), [("-linear,-silu_mul", ["linear", "silu_mul"]), ("0", ["all"])])
def test_the_environment_turns_kernels_off(value, names, monkeypatch, none_off):
    monkeypatch.setenv("DFLASH_KERNELS", value)
    importlib.reload(ops)  # as an import does
    assert sorted(ops.kernels_off()) == names


@pytest.mark.parametrize(("name", "value", "words"), [
    ("DFLASH_KERNELS", "linear", "must be 0, 1 or names such as -linear"),
    ("DFLASH_KERNELS", "-lineer", "there is no kernel 'lineer'; these can be turned off: accept_path, "),
    ("DFLASH_SELF_CHECK", "no", "DFLASH_SELF_CHECK must be 0, 1 or always, got 'no'"),
])  # fmt: skip
def test_a_variable_that_says_something_else_is_refused_by_the_import(name, value, words, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        importlib.reload(switches if name == "DFLASH_SELF_CHECK" else ops)
