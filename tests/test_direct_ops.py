"""Ops that plain tensors reach past Python's checks: the same results, and nothing else gets through."""

import os
import subprocess
import sys

import pytest
import torch

from dflash import _C, ops
from dflash.ops.registry import CpuLauncher

DTYPES = [torch.float32, torch.bfloat16]
ROWS, WIDTH, OUT = 5, 24, 18


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def operands(name: str, dtype: torch.dtype) -> list:
    """Return every argument of a call that goes past Python."""
    x, weight, bias = random(2, ROWS, WIDTH, dtype=dtype), random(OUT, WIDTH, dtype=dtype), random(OUT, dtype=dtype)
    first, second = (
        ops.Int8Weight.of(random(OUT, WIDTH)[:, order]) for order in (slice(None), range(WIDTH - 1, -1, -1))
    )
    values, scales = [first.values, second.values], torch.cat([first.scales, second.scales])
    key, value = (random(2, 4, 3, size, dtype=dtype).transpose(1, 2) for size in (8, 6))
    k_cache, v_cache = (random(2, 3, 9, size, dtype=dtype) for size in (8, 6))
    return {
        "linear": [x, weight, bias, False, None],
        "linear, int8": [x, first.values, bias, False, first.scales],
        "linears": [x, [weight, weight[:7]], [bias, bias[:7]], False, None],
        "linears, no biases": [x, (weight,), (), False, None],
        "linears, int8": [x, values, [], False, scales],
        "swiglu": [x, weight, weight.flip(0), False, None],
        "swiglu, int8": [x, *values, False, scales],
        "silu_mul": [x],
        "sigmoid_mul": [x, random(2, ROWS, 2 * WIDTH, dtype=dtype)[..., WIDTH:]],
        "append_kv_": [key, value, torch.tensor([[0, 8, -1, 9], [3, 2, 1, 0]]), k_cache, v_cache],
        "gather_rows_": [x, torch.tensor([[1, 9, 0], [4, -1, 2]]), torch.zeros(2, 4, WIDTH, dtype=dtype)],
    }[name]


CALLS = [
    "linear", "linear, int8", "linears", "linears, no biases", "linears, int8", "swiglu", "swiglu, int8", "silu_mul",
    "sigmoid_mul", "append_kv_", "gather_rows_",
]  # fmt: skip


def directly(name: str, arguments: list) -> object:
    return getattr(ops, name.split(",")[0]).op.direct(*arguments)


def tensors(arguments: list) -> list[torch.Tensor]:
    every = [y for x in arguments for y in (x if isinstance(x, (list, tuple)) else [x])]
    return [x for x in every if isinstance(x, torch.Tensor)]


def replaced(arguments: list, old: torch.Tensor, new: torch.Tensor) -> list:
    def swap(x: object) -> object:
        return new if x is old else [swap(y) for y in x] if isinstance(x, list) else x

    return [swap(x) for x in arguments]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_plain_tensors_give_what_the_function_of_the_op_gives(name, dtype):
    arguments, expected = operands(name, dtype), operands(name, dtype)
    out = directly(name, arguments)
    reference = getattr(ops, name.split(",")[0]).op.run(CpuLauncher(), *expected)
    assert out is not NotImplemented
    assert (out is None) == (reference is None)
    if out is not None:
        assert out.dtype == dtype
        assert torch.equal(out, reference)
    assert all(map(torch.equal, tensors(arguments), tensors(expected)))


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def cut(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() - 1)
    return tensor


class Subclass(torch.Tensor):
    pass


MISFITS = {
    "on another device": lambda t: t.to("meta"),
    "freed": freed,
    "cut short": cut,
    "of a subclass": lambda t: t.as_subclass(Subclass),
    "in half precision": lambda t: t.to(torch.float16),
    "a dimension more": lambda t: t[None],
    "columns apart": lambda t: torch.stack([t, t], -1)[..., 0],
    "minus its bytes": lambda t: torch._neg_view(t),
    "sparse": lambda t: t.to_sparse(),
    "not a tensor": lambda t: t.tolist(),
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("name", CALLS)
def test_any_other_tensor_is_left_to_the_function_of_the_op(name, misfit):
    found = tensors(operands(name, torch.float32))
    for i in range(len(found)):
        arguments = operands(name, torch.float32)
        old = tensors(arguments)[i]
        if misfit == "a dimension more" and i == 0 and not name.startswith(("sigmoid", "append", "gather")):
            continue  # rows of x may have any number of dimensions
        arguments = replaced(arguments, old, MISFITS[misfit](old))
        if name == "linears, no biases" and i == 1:
            arguments[1] = [MISFITS[misfit](old)]
        before = operands(name, torch.float32)
        assert directly(name, arguments) is NotImplemented, f"argument {i}"
        for j, (tensor, same) in enumerate(zip(tensors(arguments), tensors(before), strict=False)):
            if j != i and misfit != "not a tensor":
                assert torch.equal(tensor, same), "nothing is written before all is checked"


SHAPES = {
    "linear": [(0, (2, ROWS, WIDTH + 1)), (1, (OUT, WIDTH + 1)), (2, (OUT + 1,)), (0, (WIDTH,)), (0, (65 * 8, WIDTH))],
    "swiglu": [(2, (OUT + 1, WIDTH)), (1, (OUT, WIDTH - 1))],
    "silu_mul": [(0, (2, 7)), (0, (8,))],
    "sigmoid_mul": [(0, (2, ROWS, WIDTH + 1)), (1, (2, ROWS + 1, WIDTH))],
    "append_kv_": [
        (0, (2, 3, 5, 8)), (1, (2, 3, 4, 7)), (1, (2, 2, 4, 6)), (3, (2, 3, 8, 8)), (3, (2, 3, 9, 7)),
        (4, (1, 3, 9, 6)), (4, (2, 3, 0, 6)),
    ],
    "gather_rows_": [(0, (2, 0, WIDTH)), (0, (2, ROWS, WIDTH + 1)), (2, (2, 2, WIDTH)), (2, (1, 4, WIDTH))],
}  # fmt: skip


@pytest.mark.parametrize(("name", "place", "shape"), [(name, *case) for name in SHAPES for case in SHAPES[name]])
def test_shapes_that_do_not_fit_are_left_to_the_function_of_the_op(name, place, shape):
    arguments = operands(name, torch.float32)
    arguments[place] = random(*shape)
    assert directly(name, arguments) is NotImplemented


def test_scales_of_another_length_are_left_to_the_function_of_the_op():
    for name, place in (("linear, int8", 4), ("linears, int8", 4), ("swiglu, int8", 4)):
        arguments = operands(name, torch.float32)
        arguments[place] = arguments[place][1:].clone()
        assert directly(name, arguments) is NotImplemented
        arguments[place] = None
        assert directly(name, arguments) is NotImplemented, "int8 weights need scales"


@pytest.mark.parametrize("weights", [[], [0] * 5])
def test_numbers_of_weights_that_no_kernel_takes_are_left_to_the_function_of_the_op(weights):
    arguments = operands("linears", torch.float32)
    arguments[1:3] = [arguments[1][0] for _ in weights], []
    assert directly("linears", arguments) is NotImplemented


def test_rows_that_torch_multiplies_faster_are_left_to_the_function_of_the_op():
    for rows, is_left in ((64, False), (65, True)):
        arguments = operands("linear", torch.bfloat16)
        arguments[0] = random(rows, WIDTH, dtype=torch.bfloat16)
        assert (directly("linear", arguments) is NotImplemented) == is_left


def test_more_dimensions_than_are_kept_are_left_to_the_function_of_the_op():
    assert directly("silu_mul", [random(1, 1, 1, 1, 1, 1, 2, 4)]) is not NotImplemented
    assert directly("silu_mul", [random(1, 1, 1, 1, 1, 1, 1, 2, 4)]) is NotImplemented


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("linear", 3, torch.ones(2)),
        ("linears", 3, None),
        ("swiglu", 3, ""),
    ],
)
def test_settings_of_another_kind_are_left_to_the_function_of_the_op(name, place, value):
    arguments = operands(name, torch.float32)
    arguments[place] = value
    assert directly(name, arguments) is NotImplemented


def test_no_scales_at_all_are_still_scales():
    with pytest.raises(TypeError, match=r"weight must be torch\.int8 exactly where scales are given"):
        ops.linear(torch.ones(2, WIDTH), torch.empty(0, WIDTH), scales=torch.empty(0))


def test_the_number_of_arguments_is_that_of_the_op():
    with pytest.raises(TypeError, match="takes 5 arguments, got 1"):
        _C.direct_linear(torch.ones(2, 2))


def test_weights_live_as_long_as_the_call():
    weights = [random(OUT, WIDTH)]
    expected, x = ops.linears(random(ROWS, WIDTH), weights), random(ROWS, WIDTH)

    class Emptying(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
            weights.clear()
            return function(*args, **(kwargs or {}))

    with Emptying():
        assert torch.equal(directly("linears", [x, weights, [], False, None]), expected)
    assert not weights


def test_written_tensors_that_share_memory_are_left_to_the_function_of_the_op():
    key, value, positions, k_cache, _ = operands("append_kv_", torch.float32)
    value = random(2, 3, 4, 8)
    assert directly("append_kv_", [key, value, positions, k_cache, k_cache]) is NotImplemented
    for place in (1, 2):
        arguments = operands("append_kv_", torch.float32)
        shared = torch.zeros(10_000, dtype=arguments[place].dtype)
        arguments[place] = shared[: arguments[place].numel()].view(arguments[place].shape)
        arguments[4] = shared.view(torch.float32)[: arguments[4].numel()].view(arguments[4].shape)
        assert directly("append_kv_", arguments) is NotImplemented
    inside = k_cache[:, :, :4]
    assert directly("append_kv_", [inside, value, positions, k_cache, random(2, 3, 9, 8)]) is NotImplemented
    x, path, _ = operands("gather_rows_", torch.float32)
    assert directly("gather_rows_", [x, path, x[:, :4].contiguous()]) is None
    assert directly("gather_rows_", [x, path, x]) is NotImplemented


def test_an_instruction_set_that_cannot_run_is_an_error():
    code = "import torch; from dflash import ops; ops.silu_mul(torch.ones(2, 2))"
    environment = os.environ | {"DFLASH_ISA": "none"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "RuntimeError: DFLASH_ISA=none cannot run here" in run.stderr


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
