"""Ops of plain CPU tensors run past Python's checks; what only some of them take is left to the function of the op."""

import os
import subprocess
import sys

import pytest
import torch

from dflash import ops
from dflash.ops import registry
from dflash.ops.registry import CpuLauncher

ROWS, WIDTH, OUT = 5, 24, 18


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def products(dtype: torch.dtype) -> list[tuple[str, list]]:
    """Return calls of the ops with products, with and without biases and scales."""
    x, weight, bias = random(2, ROWS, WIDTH, dtype=dtype), random(OUT, WIDTH, dtype=dtype), random(OUT, dtype=dtype)
    first, second = (
        ops.PackedWeight.of(random(OUT, WIDTH)[:, order], "w8a8") for order in (range(WIDTH), range(WIDTH)[::-1])
    )
    values, scales = [first.packed, second.packed], torch.cat([first.scales, second.scales])
    return [
        ("linear", [x, weight, bias, False, None, "dense"]),
        ("linear", [x, first.packed, bias, False, first.scales, "w8a8"]),
        ("linears", [x, [weight, weight[:7]], [bias, bias[:7]], False, None, "dense"]),
        ("linears", [x, (weight,), (), False, None, "dense"]),
        ("linears", [x, values, [], False, scales, "w8a8"]),
        ("swiglu", [x, weight, weight.flip(0), False, None, "dense"]),
        ("swiglu", [x, *values, False, scales, "w8a8"]),
    ]


def directly(name: str, arguments: list) -> object:
    return getattr(ops, name).op.direct(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_plain_tensors_are_those_of_checked_calls(dtype):
    for name, arguments in products(dtype):
        out = directly(name, arguments)
        assert out.dtype == dtype
        assert torch.equal(out, getattr(ops, name).op.run(CpuLauncher(), *arguments))


def test_weights_live_as_long_as_the_call():
    weights = [random(OUT, WIDTH)]
    expected, x = ops.linears(random(ROWS, WIDTH), weights), random(ROWS, WIDTH)

    class Emptying(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            weights.clear()
            return function(*args, **(kwargs or {}))

    with Emptying():
        assert torch.equal(directly("linears", [x, weights, [], False, None, "dense"]), expected)
    assert not weights


def test_an_instruction_set_that_cannot_run_is_an_error():
    code = "import torch; from dflash import ops; ops.silu_mul(torch.ones(2, 2))"
    environment = os.environ | {"DFLASH_ISA": "none"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "RuntimeError: DFLASH_ISA=none cannot run here" in run.stderr


@pytest.mark.parametrize(("lasts", "asked"), [(True, 1), (False, 3)])
def test_a_gpu_without_kernels_runs_twins_and_says_so_once(monkeypatch, lasts, asked):
    """A reason that may pass, such as full memory, is looked up again."""
    reason, questions = f"the driver is busy ({lasts})", []
    monkeypatch.setattr(registry, "_STATUS", {})
    registry._warn_of_twins.cache_clear()
    monkeypatch.setattr(registry._C, "cuda_status", lambda device: questions.append(device) or (reason, lasts))
    x = random(ROWS, 2 * WIDTH)
    with pytest.warns(UserWarning, match="plain torch") as warned:
        results = [ops.silu_mul.op.on_cuda(x) for _ in range(3)]
    assert len(warned) == 1
    assert f"plain torch on this GPU, since {reason}" in str(warned[0].message)
    assert len(questions) == asked
    for result in results:
        torch.testing.assert_close(result, ops.silu_mul(x))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_an_exported_program_has_the_op(strict, plain):
    class Product(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.x, weight = random(ROWS, WIDTH), random(OUT, WIDTH)
            self.weight = weight if plain else torch.nn.Parameter(weight)

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return ops.linear(self.x if plain else y, self.weight) + y[0, 0]

    product, y = Product(), random(ROWS, WIDTH)
    exported = torch.export.export(product, (y,), strict=strict)
    assert torch.ops.dflash.linear.default in [node.target for node in exported.graph.nodes]
    assert torch.equal(exported.module()(y), product(y))
