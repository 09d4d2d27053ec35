"""What every op test uses: the error measure against float64, the storage types, and the places where kernels run."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import pytest
import torch
from torch.utils._pytree import tree_map_only

from dflash import ops
from dflash.ops.contract import Scope
from dflash.ops.registry import CudaLauncher

DTYPES = [torch.float32, torch.bfloat16]
CUDA_DTYPES = [*DTYPES, torch.float16]


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """``|out - exact| / |exact|`` over all elements, in float64; NaN stays NaN and so never passes."""
    exact = exact.double()
    return float((out.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def assert_as_exact_as_torch(out: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor, factor: float = 2.0) -> None:
    """The kernel's error against float64 is at most ``factor`` times the plain-torch twin's in the same dtype."""
    assert out.dtype == twin.dtype
    assert out.shape == twin.shape
    floor = torch.finfo(out.dtype).eps / 4  # times two: what rounding once may do to an element
    ours, theirs = relative_error(out, exact), relative_error(twin, exact)
    assert ours <= factor * max(theirs, floor), f"error {ours:.2e}, plain torch {theirs:.2e}"


def let_rows_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch's product as bad as it is on CPUs with AMX: in 16 bits, a row of NaN spoils the row before it.

    There it happens where the inner dimension is not a multiple of 32.
    """
    product = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = product(x, weight, bias)
        if x.dtype in (torch.bfloat16, torch.float16) and x.shape[-1] % 32:
            spoilt = x.flatten(0, -2).isnan().any(-1)
            out.flatten(0, -2)[:-1][spoilt[1:]] = float("nan")
        return out

    monkeypatch.setattr(torch.nn.functional, "linear", linear)


def skip_float32_on_cuda(kernels: object, dtype: torch.dtype) -> None:
    """Skip a test of our products' bits where torch multiplies."""
    if dtype == torch.float32 and kernels is not ops:
        pytest.skip("float32 goes through torch there")


def same(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    """True if both hold equal tensors, NaN in the same places."""
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in pairs)


class Emulated(CudaLauncher):
    """The functions of ``dflash.ops`` with their CUDA kernels run on CPU tensors, by the emulation.

    Each goes through the code that a GPU's tensors go through. ``overlapping()`` queues what is called in it: a kernel
    may then start before the one ahead of it has run. The tensors have to live until its end.
    """

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module)
        self._queues, self._scratch = False, []

    def __getattr__(self, name: str) -> Callable:
        public = getattr(ops, name)
        signature = inspect.signature(public)

        def call(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return public.op.run(self, *bound.args)

        return call

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        self._scratch.append(super().allocate(size, device))  # kept until the kernels have run
        return self._scratch[-1]

    def __call__(self, kernel: str, scope: Scope) -> None:
        self.kernels.launch(kernel, vars(scope), 0, 0)
        if not self._queues:
            self.kernels.synchronize()
            self._scratch.clear()

    @contextlib.contextmanager
    def overlapping(self) -> Iterator[None]:
        self._queues = True
        yield
        self._queues = False
        self.kernels.synchronize()

    def check_overlapping(self, run: Callable[[], Iterable[torch.Tensor]], seed: int = 0) -> list[torch.Tensor]:
        """Return what ``run()`` gives, which must be the same where kernels start before the one ahead has ended."""
        self.kernels.seed(seed)
        want = list(run())
        with self.overlapping():
            have = list(run())
        assert same(have, want)
        return want


class OpByOp:
    """These ops for `dflash.decoder`, which then runs op by op (set ``decoder.ops = OpByOp(...)``)."""

    def __init__(self, ops: object) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Callable:
        return getattr(self._ops, name)

    def skinny(self, rows: int, dtype: torch.dtype) -> bool:
        return False


class Cuda:
    """The functions of ``dflash.ops`` on a GPU, for CPU tensors: they and what is written travel there and back."""

    def __getattr__(self, name: str) -> Callable:
        public = getattr(ops, name)
        signature = inspect.signature(public)
        schema = getattr(torch.ops.dflash, name).default._schema

        def call(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            there = tree_map_only(torch.Tensor, lambda x: x.cuda(), list(bound.args))
            out = public(*there)
            for argument, here, moved in zip(schema.arguments, bound.args, there, strict=True):
                if argument.alias_info is not None and argument.alias_info.is_write and here is not None:
                    for old, new in zip(*((x if isinstance(x, list) else [x]) for x in (here, moved)), strict=True):
                        old.copy_(new)
            return tree_map_only(torch.Tensor, lambda x: x.cpu(), out)

        return call
