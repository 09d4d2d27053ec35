"""Ops under torch function modes, which torch.device as a context is."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from dflash import ops

pytestmark = pytest.mark.op


def overlapping() -> dict[str, torch.Tensor | float]:
    x = torch.randn(4, 16)
    return {"x": x, "residual": x.clone(), "weight": torch.ones(16), "tap": x, "eps": 1e-6}


def another_op() -> None:
    ops.rms_norm(torch.zeros(1, 16), torch.ones(16), 1e-6)


class Calls(TorchFunctionMode):
    """Notes the functions of torch that are called, and calls an op from each."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(getattr(function, "__name__", str(function)))
        with torch._C.DisableTorchFunction():
            another_op()
        return function(*args, **(kwargs or {}))


def test_an_op_asks_no_mode_about_its_tensors():
    x, weight = torch.randn(4, 16), torch.ones(16)
    with Calls() as mode:
        ops.rms_norm(x, weight, 1e-6)
    assert not {"untyped_storage", "storage_offset", "is_neg"} & set(mode.names)


def test_a_mode_that_calls_ops_hides_no_overlap():
    call = overlapping()
    with pytest.raises(ValueError, match="must not share memory"), Calls():
        ops.add_rms_norm(**call)
