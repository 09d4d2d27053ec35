"""Faults in the PTX of kernels, which the emulation has to see when it runs it; `.ci/run ptx` runs these."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from op_checks import Emulated, relative_error
from test_self_check import EmulatedGpu

from dflash.ops import check, reference

sys.path.append(str(Path(__file__).resolve().parents[1] / "cuda_emulation"))
import ptx

PATH = Path(os.environ["DFLASH_PTX"])
SEEDS = range(4)


def replaced(pattern, new):
    return lambda body: re.sub(pattern, new, body)


def waits_last(body):
    """Every thread waits for the kernel ahead where it ends."""
    return body.replace("griddepcontrol.wait;", "").replace("ret;", "griddepcontrol.wait;\nret;")


FAULTS = {
    "a group of copies less is waited for": replaced(r"wait_group\s+2;", "wait_group 3;"),
    "copies are not waited for": replaced(r"cp\.async\.wait_group\s+\d;", ""),
    "matrices are transposed": replaced(r"m8n8\.x4\.shared", "m8n8.x4.trans.shared"),
    "matrices are not transposed": replaced(r"m8n8\.x4\.trans\.shared", "m8n8.x4.shared"),
    "products of another type": replaced(r"f32\.bf16\.bf16\.f32", "f32.f16.f16.f32"),
    "no barriers": replaced(r"bar\.sync\s+0;", ""),
    "blocks do not count": replaced(r"atom\.acq_rel\.gpu\.global\.inc\.u32", "atom.relaxed.gpu.global.inc.u32"),
    "never waits for the kernel ahead": replaced(r"griddepcontrol\.wait;", ""),
    "waits for the kernel ahead after its reads": waits_last,
}


@pytest.fixture
def plant(emulation):
    """Return a function that plants an edit in the PTX of all kernels; after the test there is none."""
    yield lambda edit: ptx.use(emulation, PATH, edit)
    ptx.use(emulation, PATH)


def layer(on, x, weight, norm, *attention):
    """A product in slices, a norm, and attention over two chunks of keys, as they follow each other in a layer."""
    y = on.linear(x, weight)
    return y, on.rms_norm(y, norm, 1e-6), on.block_attention(*attention, 0.125, True)


def draw():
    g = torch.Generator().manual_seed(0)
    shapes = (16, 512), (256, 512), (256,), (1, 16, 4, 64), (1, 1, 330, 64), (1, 1, 330, 64)
    return *(torch.randn(shape, generator=g).bfloat16() for shape in shapes), torch.tensor([300])


def is_right(emulation, seed):
    """Whether a layer is computed as by torch, launched one after the other and then overlapping."""
    emulation.seed(seed)
    on, inputs = Emulated(emulation), draw()
    try:
        outs = [layer(on, *inputs)]
        with on.overlapping():
            outs.append(layer(on, *inputs))
    except RuntimeError as error:
        assert "emulation: " in str(error)  # noqa: PT017
        return False
    twin = layer(reference, *inputs)
    return all(relative_error(a, b) < 0.01 for out in outs for a, b in zip(out, twin, strict=True))


def test_a_layer_is_right_without_a_fault(emulation):
    assert all(is_right(emulation, seed) for seed in SEEDS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(emulation, plant, fault):
    plant(FAULTS[fault])
    assert not any(is_right(emulation, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    "unknown",
    [
        "nanosleep.u32 20", "add.sat.f32 %f1, %f1, %f1", "fma.rn.ftz.f32 %f1, %f1, %f1, %f1",
        "cvt.rz.bf16.f32 %rs1, %f1", "cvt.rn.f16.s32 %rs1, %r1", "redux.sync.max.f32 %f1, %f1, -1",
        "lop3.or.b32 %r1|%p1, %r1, %r1, %r1, 3, %p1",
    ],
)  # fmt: skip
def test_unknown_instructions_are_named(emulation, plant, unknown):
    plant(replaced(r"griddepcontrol\.wait;", f"griddepcontrol.wait; {unknown};"))
    with pytest.raises(ValueError, match=rf"the PTX instruction {re.escape(unknown.split()[0])} is not known"):
        layer(Emulated(emulation), *draw())


def test_the_self_check_names_the_kernels_that_a_fault_spoils(emulation, plant):
    plant(FAULTS["matrices are transposed"])
    found = check.check_kernels(EmulatedGpu(emulation), layers=1)
    assert {each.kernel for each in found if each.fault} == {"linear", "experts", "block_attention"}
