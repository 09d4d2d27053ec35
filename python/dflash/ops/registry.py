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
from .checks import expect_apart, expect_memory, expect_one_device, expect_strided, explain_failure, tensors_of

_LIBRARY = torch.library.Library("dflash", "DEF")
_DLPACK = {torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.int64: (0, 64)}  # code, bits
_C.use_torch(Tensor, torch.nn.Parameter, [(dtype, *kind) for dtype, kind in _DLPACK.items()])
_CUDA_DTYPES = {getattr(torch, name): code for name, code in _C.DTYPES.items()}  # the code of each in params.h
_CPU_DTYPES = {dtype: code for dtype, code in _CUDA_DTYPES.items() if dtype != torch.float16}


def isa() -> str:
    """Return the CPU kernels' instruction set: ``scalar``, ``avx2``, ``avx512``, ``avx512_bf16`` or ``amx``.

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

    def workspace(self, kernel: str, device: torch.device, *shapes: object) -> tuple[int, Tensor | None]:
        """Return ``(splits, workspace)`` as the kernel's file answers for these shapes."""
        return 1, None

    def counters(self, device: torch.device) -> Tensor | None:
        """Return int32 zeros, zero again after every kernel, where blocks count themselves; None on the CPU."""
        return None

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
        self._counters: dict[tuple, tuple[int, Tensor]] = {}

    def __call__(self, kernel: str, *arguments: object) -> None:
        device = arguments[0].device
        stream = torch.cuda.current_stream(device).cuda_stream
        getattr(self.kernels, f"{kernel}_cuda")(*arguments, device.index, stream)

    def dtype(self, op: str, name: str, tensor: Tensor) -> int:
        return _CUDA_DTYPES[tensor.dtype]

    def workspace(self, kernel: str, device: torch.device, *shapes: object) -> tuple[int, Tensor | None]:
        splits, size = getattr(self.kernels, f"{kernel}_workspace")(*shapes)
        return splits, self.allocate(size, device) if size else None

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

        Kernels that run at the same time never share them: each stream has its own, and each capture, whose graph
        zeroes them at every replay. Those of a capture are let go when the next one begins on its stream; their memory
        stays in the graph's pool, where nothing else of that graph has it.
        """
        stream, capture = _stream_and_capture(device)
        key = (device, stream, capture > 0)
        held, counters = self._counters.get(key, (-1, None))
        if counters is None or held != capture:
            counters = torch.zeros(self.kernels.NUM_COUNTERS, dtype=torch.int32, device=device)
            self._counters[key] = capture, counters
        return counters


def _stream_and_capture(device: torch.device) -> tuple[int, int]:
    """Return the current stream, and the number of the capture that it takes part in; 0 for none."""
    if device.type != "cuda":
        return 0, 0
    stream = torch.cuda.current_stream(device).cuda_stream
    return stream, _C.capture_id(stream)


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
        name, signature = body.__name__, inspect.signature(body, eval_str=True)
        parameters = [*signature.parameters.values()][1:]
        in_torch = twin or getattr(reference, name)
        expect_sound = _sound_check(body, parameters, mutates)

        def on_cpu(*arguments):
            expect_sound(arguments)
            return body(_CPU, *arguments)

        def on_cuda(*arguments):
            expect_sound(arguments)
            known = arguments[0].dtype in _CUDA_DTYPES or not arguments[0].is_floating_point()
            if cuda_kernel and known and not cuda_status(arguments[0].device.index):
                return body(_CUDA, *arguments)
            body(_FAKE, *arguments)
            return in_torch(*arguments)

        def on_fake(*arguments):
            expect_one_device(name, arguments)
            return body(_FAKE, *arguments)

        def refuse(*arguments):
            expect_strided(name, [p.name for p in parameters], arguments)
            raise TypeError(f"{name}: tensors must be dense (torch.strided)")

        # 2. Register them under the schema of the signature
        _LIBRARY.define(name + _schema(parameters, signature.return_annotation, mutates), tags=_TAGS)
        for key, kernel in {"CPU": on_cpu, "CUDA": on_cuda, **dict.fromkeys(_UNSUPPORTED, refuse)}.items():
            _LIBRARY.impl(name, kernel, key)
        torch.library.register_fake(f"dflash::{name}", on_fake, lib=_LIBRARY)
        return _callable(body, parameters, signature.return_annotation, mutates)

    return register


_TAGS = (torch.Tag.pt2_compliant_tag,)
_UNSUPPORTED = [
    f"{kind}{device}" for kind in ("Sparse", "SparseCsr", "Quantized", "NestedTensor") for device in ("CPU", "CUDA")
] + ["MkldnnCPU", "AutogradNestedTensor"]


def _sound_check(body: Callable, parameters: list[inspect.Parameter], mutates: tuple[str, ...]) -> Callable:
    """Return a check that all tensors are in memory, on one device, and that what the op writes lies apart."""
    op, names = body.__name__, [p.name for p in parameters]
    written, read = _tensor_names(parameters, mutates)
    order = [names.index(name) for name in (*written, *read)]

    def expect_sound(arguments: tuple) -> None:
        expect_one_device(op, arguments)
        # torch leaves out arguments at the end that are as their defaults; what the op writes has none, or None.
        given = [arguments[i] if i < len(arguments) else None for i in order]
        if _C.sound(False, len(written), *given):
            return
        tensors = [*tensors_of(names, arguments)]
        for name, tensor in tensors:
            expect_memory(op, name, tensor)
        body(_FAKE, *arguments)  # errors of shape come first: a misfit may share memory because it is one
        for i, (name, tensor) in enumerate(tensors):
            if name.split("[")[0] not in mutates:
                continue
            for j, other in enumerate(tensors):
                if i != j:
                    expect_apart(op, name, tensor, *other)

    return expect_sound


def _tensor_names(parameters: list[inspect.Parameter], mutates: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the names of the parameters that hold tensors: those that the op writes, and the others."""
    tensors = [p.name for p in parameters if p.annotation in _TENSORS]
    return [name for name in tensors if name in mutates], [name for name in tensors if name not in mutates]


_TENSORS = (Tensor, Tensor | None, list[Tensor], Sequence[Tensor])


def _schema(parameters: list[inspect.Parameter], returns: object, mutates: tuple[str, ...]) -> str:
    """Infer the schema of a signature."""

    def prototype() -> None:
        pass

    # A schema has no default for a list; the function below always passes it.
    plain = [p.replace(default=p.empty) if p.default == () else p for p in parameters]
    prototype.__signature__ = inspect.Signature(plain, return_annotation=returns)
    return torch.library.infer_schema(prototype, mutates_args=mutates)


def _callable(
    body: Callable, parameters: list[inspect.Parameter], returns: object, mutates: tuple[str, ...]
) -> Callable:
    """Make the function that users call: on to the CPU kernel if all is there, else through torch's dispatcher.

    It is compiled from source so that a call pays for its own arguments only, by their names: looping over arguments
    takes as long as a small kernel does. Ops that ``_C`` has a ``direct_`` function for (direct.h) go there first.
    Compilers and torch.export see the op; torch.jit.trace and make_fx, on plain tensors, do not.
    """
    name, names = body.__name__, ", ".join(p.name for p in parameters)
    written, read = _tensor_names(parameters, mutates)
    direct = getattr(_C, f"direct_{name}", None)
    first = f"            if (result := direct({names})) is not NotImplemented:\n                return result\n"
    source = (
        f"def {name}({names}):\n"
        f"    if is_compiling():\n"
        f"        return dispatch({names})\n"
        f"    try:\n"
        f"        if type({parameters[0].name}) in direct_types:\n"
        f"{first if direct else ''}"
        f"            if sound(True, {len(written)}, {', '.join(written + read)}):\n"
        f"                return body(cpu, {names})\n"
        f"        return dispatch({names})\n"
        f"    except (AttributeError, RuntimeError, TypeError):\n"
        f"        explain_failure('{name}', parameters, written, ({names},))\n"
        f"        raise\n"
    )
    scope = {
        "is_compiling": torch.compiler.is_compiling,
        "direct_types": _direct_types,
        "direct": direct,
        "sound": _C.sound,
        "parameters": parameters,
        "written": written,
        "explain_failure": explain_failure,
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
