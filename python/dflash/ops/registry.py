"""How ops are registered and run: one function per op, which a launcher for each kind of device carries out.

`op` registers a function in the ``dflash`` library of torch, so that ``torch.compile`` sees the op whole. The
function checks, allocates and calls ``launch(kernel, ...)``. The schema is inferred from its signature; the fake
kernel is the same function with a launcher that launches nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .. import _C
from . import reference
from .checks import expect_one_device

_LIBRARY = torch.library.Library("dflash", "DEF")
_CUDA_DTYPES = {getattr(torch, name): code for name, code in _C.DTYPES.items()}  # the code of each in params.h
_CPU_DTYPES = {dtype: code for dtype, code in _CUDA_DTYPES.items() if dtype != torch.float16}


def isa() -> str:
    """Return the instruction set that the CPU kernels run on: ``scalar``, ``avx2`` or ``avx512``.

    It is chosen at first use from what the processor has; the environment variable ``DFLASH_ISA`` names another.
    """
    return _C.isa()


def has_cuda_kernels() -> bool:
    """Return True if this build holds CUDA kernels at all."""
    return _C.with_cuda()


@functools.cache
def cuda_status(device: int = 0) -> str:
    """Return why the CUDA kernels of this build cannot run on CUDA device ``device``; empty if they can.

    The build may hold no kernels, the driver may be missing or too old for them, or they may hold no code for the
    device. The ops then run their plain-torch twins. Looked up once per device.
    """
    return _C.cuda_status(device)


# ---------------------------------------------------------------------------------------------- launchers


class Launcher:
    """Runs kernels by name. Tensors are passed as they are: ``_C`` takes their addresses, in one place (pack.h)."""

    is_cpu = is_fake = False

    def __call__(self, kernel: str, *arguments: object) -> None:
        """Run a kernel with the fields of its params struct, in the order of ``wire()`` in params.h."""
        raise NotImplementedError

    def dtype(self, op: str, name: str, tensor: Tensor) -> int:
        """Return the kernels' code of a tensor's dtype."""
        raise NotImplementedError

    def workspace(self, kernel: str, device: torch.device, *shapes: object) -> tuple[int, Tensor | None, Tensor | None]:
        """Return ``(splits, workspace, counters)`` as the kernel's file answers for these shapes."""
        return 1, None, None

    def scratch(self, kernel: str, device: torch.device, *shapes: object) -> Tensor | None:
        """Return the scratch memory that the kernel's file asks for with these shapes."""
        return None

    def aligned(self, tensor: Tensor, strided: int = 0) -> Tensor:
        """Return the tensor, or a dense copy if 16-byte accesses may not start at its first ``strided`` dimensions."""
        return tensor


class CpuLauncher(Launcher):
    """Runs the CPU kernels."""

    is_cpu = True

    def __call__(self, kernel: str, *arguments: object) -> None:
        getattr(_C, kernel)(*arguments, torch.get_num_threads())

    def dtype(self, op: str, name: str, tensor: Tensor) -> int:
        code = _CPU_DTYPES.get(tensor.dtype)
        if code is None:
            raise TypeError(f"{op}: {name} must be float32 or bfloat16 on CPU, got {tensor.dtype}")
        return code


class CudaLauncher(Launcher):
    """Runs the CUDA kernels on the current stream.

    Args:
        kernels: the module that has them; the tests' emulation is another.
    """

    def __init__(self, kernels: object = _C) -> None:
        self.kernels = kernels
        self._counters: dict[tuple, Tensor] = {}

    def __call__(self, kernel: str, *arguments: object) -> None:
        device = arguments[0].device
        stream = torch.cuda.current_stream(device).cuda_stream
        getattr(self.kernels, f"{kernel}_cuda")(*arguments, device.index, stream)

    def dtype(self, op: str, name: str, tensor: Tensor) -> int:
        return _CUDA_DTYPES[tensor.dtype]

    def workspace(self, kernel: str, device: torch.device, *shapes: object) -> tuple[int, Tensor | None, Tensor | None]:
        splits, size = getattr(self.kernels, f"{kernel}_workspace")(*shapes)
        return (splits, self.allocate(size, device), self.counters(device)) if size else (splits, None, None)

    def scratch(self, kernel: str, device: torch.device, *shapes: object) -> Tensor | None:
        return self.allocate(getattr(self.kernels, f"{kernel}_workspace")(*shapes), device)

    def aligned(self, tensor: Tensor, strided: int = 0) -> Tensor:
        strides = [stride * tensor.element_size() for stride in tensor.stride()[:strided]]
        if self.kernels.aligned(tensor, strides):
            return tensor
        return tensor.clone(memory_format=torch.contiguous_format)

    def allocate(self, size: int, device: torch.device) -> Tensor:
        """Return ``size`` bytes."""
        return torch.empty(size, dtype=torch.uint8, device=device)

    def counters(self, device: torch.device) -> Tensor:
        """Return int32 zeros, zero again after every kernel, where blocks that share a result count themselves.

        There is one tensor per stream, and one per graph under capture, which zeroes its own at every replay: kernels
        that run at the same time never share one.
        """
        key: tuple = ()
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
            key = (device.index, stream, _C.capture_id(stream))
        counters = self._counters.get(key)
        if counters is None:
            if len(self._counters) >= 256:
                self._counters.pop(next(iter(self._counters)))
            counters = torch.zeros(self.kernels.NUM_COUNTERS, dtype=torch.int32, device=device)
            self._counters[key] = counters
        return counters


class FakeLauncher(Launcher):
    """Launches nothing: an op's function then only checks its arguments and allocates its results."""

    is_fake = True

    def __call__(self, kernel: str, *arguments: object) -> None:
        pass

    def dtype(self, op: str, name: str, tensor: Tensor) -> int:
        return 0


_CPU, _CUDA, _FAKE = CpuLauncher(), CudaLauncher(), FakeLauncher()

# ---------------------------------------------------------------------------------------------- registration

# CPU tensors of these types go to the kernels directly: torch's dispatcher costs more than a small kernel.
_direct_types = {Tensor, torch.nn.Parameter}


@contextlib.contextmanager
def dispatched() -> Iterator[None]:
    """Let CPU ops go through torch's dispatcher too, where its modes see them."""
    before = set(_direct_types)
    _direct_types.clear()
    try:
        yield
    finally:
        _direct_types.update(before)


def op(*, mutates: tuple[str, ...] = (), twin: Callable | None = None, cuda_kernel: bool = True) -> Callable:
    """Register a function ``name(launch, first tensor, ...)`` as the op ``dflash::name``.

    Args:
        mutates: the arguments that the op writes.
        twin: the op in plain torch, for CUDA tensors that the kernel cannot take; None for the one in
            `dflash.ops.reference`.
        cuda_kernel: False if there is no CUDA kernel.

    Returns:
        A decorator. What it returns is called without ``launch``; ``.body`` is the function with it.
    """

    def register(body: Callable) -> Callable:
        # 1. The ways to run it: on the CPU, on CUDA, and as the fake kernel
        name = body.__name__
        in_torch = twin or getattr(reference, name)

        def runs_kernel(first: Tensor) -> bool:
            known = first.dtype in _CUDA_DTYPES or not first.is_floating_point()
            return cuda_kernel and known and not cuda_status(first.device.index)

        def on(launch: Launcher) -> Callable:
            def run(*arguments):
                expect_one_device(name, arguments)
                return body(launch, *arguments)

            return run

        kernel, checked = on(_CUDA), on(_FAKE)

        def on_cuda(*arguments):
            expect_one_device(name, arguments)
            if runs_kernel(arguments[0]):
                return kernel(*arguments)
            checked(*arguments)
            return in_torch(*arguments)

        # 2. Register them under the schema of the signature
        signature = inspect.signature(body, eval_str=True)
        parameters = [*signature.parameters.values()][1:]
        _LIBRARY.define(name + _schema(parameters, signature.return_annotation, mutates), tags=_TAGS)
        _LIBRARY.impl(name, on(_CPU), "CPU")
        _LIBRARY.impl(name, on_cuda, "CUDA")
        torch.library.register_fake(f"dflash::{name}", checked, lib=_LIBRARY)
        return _callable(body, parameters, signature.return_annotation)

    return register


_TAGS = (torch.Tag.pt2_compliant_tag,)


def _schema(parameters: list[inspect.Parameter], returns: object, mutates: tuple[str, ...]) -> str:
    """Infer the schema of a signature."""

    def prototype() -> None:
        pass

    # A schema has no default for a list; the function below always passes it.
    plain = [p.replace(default=p.empty) if p.default == () else p for p in parameters]
    prototype.__signature__ = inspect.Signature(plain, return_annotation=returns)
    return torch.library.infer_schema(prototype, mutates_args=mutates)


def _callable(body: Callable, parameters: list[inspect.Parameter], returns: object) -> Callable:
    """Make the function that users call: on to the CPU kernel if all is there, else through torch's dispatcher.

    It is compiled from source so that a call pays for its own arguments only, by their names: looping over arguments
    takes as long as a small kernel does.
    """
    name, names = body.__name__, ", ".join(p.name for p in parameters)
    on_cpu = " and ".join(filter(None, map(_on_cpu, parameters)))
    source = (
        f"def {name}({names}):\n"
        f"    if not is_compiling() and type({parameters[0].name}) in direct_types and {on_cpu}:\n"
        f"        return body(cpu, {names})\n"
        f"    return dispatch({names})\n"
    )
    scope = {
        "is_compiling": torch.compiler.is_compiling,
        "direct_types": _direct_types,
        "body": body,
        "cpu": _CPU,
        "dispatch": getattr(torch.ops.dflash, name).default,
    }
    exec(compile(source, f"<dflash.ops.{name}>", "exec"), scope)
    call = scope[name]
    call.__doc__, call.__module__, call.__qualname__ = body.__doc__, body.__module__, body.__qualname__
    call.__defaults__ = tuple(p.default for p in parameters if p.default is not p.empty) or None
    call.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": returns}
    call.body = body
    return call


def _on_cpu(parameter: inspect.Parameter) -> str:
    """Return the source of "this argument is on the CPU"; empty for what is not a tensor."""
    name, kind = parameter.name, parameter.annotation
    if kind is Tensor:
        return f"{name}.is_cpu"
    if kind == Tensor | None:
        return f"({name} is None or {name}.is_cpu)"
    if kind in (list[Tensor], Sequence[Tensor]):
        return f"all([x.is_cpu for x in {name}])"
    return ""
