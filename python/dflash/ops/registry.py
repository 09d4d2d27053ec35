"""How ops are registered in the ``dflash`` library of torch, and which launcher runs their kernels.

An op is its signature and its contract (`dflash.ops.contract`). Plain CPU tensors go from the contract in C++ straight
to the kernel; all others through torch's dispatcher, a check in Python and a launcher.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from .. import _C
from . import reference
from .contract import Contract, Scope

_LIBRARY = torch.library.Library("dflash", "DEF")
_C.use_torch(Tensor, torch.nn.Parameter)
_CUDA_DTYPES = {getattr(torch, name): code for name, code in _C.DTYPES.items()}  # the code of each in params.h
_CPU_DTYPES = {dtype: code for dtype, code in _CUDA_DTYPES.items() if dtype != torch.float16}


_SKINNY = {getattr(torch, dtype): rows for dtype, rows in _C.SKINNY_ROWS.items()}


def skinny(rows: int, dtype: torch.dtype) -> bool:
    """Return True if a product of this many rows goes through the kernel of `linear` on CPU, not torch."""
    return rows <= _SKINNY.get(dtype, 0)


def use_threads(count: int) -> None:
    """Let the calling thread compute in so many threads; torch's own setter changes other threads' number too."""
    _C.set_threads(count)


_STATUS: dict[int, str] = {}
_OFF: dict[str, str] = {}


def cuda_status(device: int = 0) -> str:
    """Return why this build's CUDA kernels cannot run on CUDA device ``device``; empty if they can.

    Looked up once, unless the reason may pass: a GPU without free memory, say.
    """
    if "all" in _OFF:
        return _OFF["all"]
    if device in _STATUS:
        return _STATUS[device]
    reason, lasts = _C.cuda_status(device)
    if lasts:
        _STATUS[device] = reason
    return reason


def turn_off(kernel: str, reason: str) -> None:
    """Run a CUDA kernel's ops in plain torch from now on; ``"all"`` stands for every kernel.

    Raises:
        ValueError: there is no such kernel.
    """
    known = {made.op.kernel for made in OPS.values()}
    if kernel not in known | {"all"}:
        raise ValueError(f"there is no kernel {kernel!r}; these can be turned off: {', '.join(sorted(known))}")
    _OFF[kernel] = reason


def kernels_off() -> dict[str, str]:
    """Return the CUDA kernels that are turned off, with the reasons."""
    return dict(_OFF)


@functools.cache
def _warn_of_twins(reason: str) -> None:
    """Say once that ops run without kernels on a GPU."""
    advice = "the results are right, but steps take longer. `dflash doctor` says what to do"
    warnings.warn(f"dflash runs its ops in plain torch on this GPU, since {reason}: {advice}", stacklevel=2)


# ---------------------------------------------------------------------------------------------- launchers


class Launcher:
    """Runs kernels by name. The fields of a kernel's params are the names of a scope, or as they are initialized.

    This one runs none: an op then only checks its arguments and allocates its results.
    """

    is_cpu, is_fake = False, True
    off: Mapping[str, str] = MappingProxyType({})  # kernels that must not run

    def __call__(self, kernel: str, scope: Scope) -> None:
        """Run a kernel."""

    def dtype(self, op: str, name: str, tensor: Tensor) -> int:
        """Return the kernels' code of a tensor's dtype."""
        return 0

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

    is_cpu, is_fake = True, False

    def __call__(self, kernel: str, scope: Scope) -> None:
        _C.run(kernel, vars(scope), torch.get_num_threads())

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

    is_fake, off = False, _OFF

    def __init__(self, kernels: object = _C) -> None:
        self.kernels = kernels
        self._counters: dict[tuple, tuple[int, Tensor]] = {}

    def __call__(self, kernel: str, scope: Scope) -> None:
        device = next(x.device for x in vars(scope).values() if isinstance(x, Tensor))
        self.kernels.launch(kernel, vars(scope), device.index, torch.cuda.current_stream(device).cuda_stream)

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
        zeroes them at every replay. Those of a capture are let go when the next one begins on its stream.
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


_CPU, _CUDA, _FAKE = CpuLauncher(), CudaLauncher(), Launcher()

# ---------------------------------------------------------------------------------------------- registration

OPS: dict[str, Callable] = {}
"""Every op by its name."""

dispatches_all = False
"""Set it to True to let CPU ops go through torch's dispatcher too, where its modes see them."""


class Op:
    """An op: its contract, and what runs it.

    Attributes:
        body: ``body(launch, scope)`` runs a call that fits; None for the contract's kernel on the contract's tensors.
        prepare: ``prepare(launch, scope)`` sets further fields of that kernel, such as its workspace; False leaves the
            call to the twin.
        kernel: the name under which its CUDA kernel can be turned off.
        direct: a function that runs a plain call on the CPU, or returns NotImplemented.
        twin: the op in plain torch, for CUDA tensors that the kernel cannot take.
    """

    def __init__(
        self, contract: Contract, body: Callable | None, prepare: Callable | None, twin: Callable, kernel: str
    ) -> None:
        self.contract, self.body, self.prepare, self.twin, self.kernel = contract, body, prepare, twin, kernel
        self.direct = contract.run or self._matched

    def run(self, launch: Launcher, *arguments: object) -> object:
        """Check a call and run it."""
        return self.launch(launch, self.contract.check(arguments))

    def call(self, launch: Launcher, *arguments: object) -> object:
        """Run a call that is part of another op."""
        result = self.direct(*arguments) if launch is _CPU else NotImplemented
        return self.run(launch, *arguments) if result is NotImplemented else result

    def launch(self, launch: Launcher, scope: Scope) -> object:
        """Run a call that fits."""
        if self.kernel in launch.off:
            return self.twin(*scope.arguments)
        contract = self.contract
        if contract.storage and contract.has_dtype and not hasattr(scope, "dtype"):
            scope.dtype = launch.dtype(contract.op, contract.storage, getattr(scope, contract.storage))
        made = contract.allocate(scope) if contract.outputs else ()
        results = None if not made else made[0] if len(made) == 1 else tuple(made)
        if launch.is_fake and (made or not self.body):
            return results
        if self.body:
            return self.body(launch, scope)
        if self.prepare and self.prepare(launch, scope) is False:
            return self.twin(*scope.arguments)
        launch(contract.kernel, scope)
        return results

    def _matched(self, *arguments: object) -> object:
        """Run a plain call on the CPU; NotImplemented if it has to be looked at more closely."""
        names = self.contract.match(*arguments) if getattr(arguments[0], "is_cpu", False) else NotImplemented
        return names if names is NotImplemented else self.launch(_CPU, Scope(arguments=arguments, **names))

    def on_cpu(self, *arguments: object) -> object:
        """Run a call on the CPU, whatever its tensors look like."""
        arguments = self._completed(arguments)
        if (result := self.direct(*arguments)) is not NotImplemented:
            return result
        return self.launch(_CPU, self._checked(arguments))

    def on_cuda(self, *arguments: object) -> object:
        """Run a call on a GPU: its kernel, or the twin in torch."""
        arguments = self._completed(arguments)
        names = self.contract.match(*arguments)
        scope = self._checked(arguments) if names is NotImplemented else Scope(arguments=arguments, **names)
        first = next(x for x in arguments if isinstance(x, Tensor))
        is_known = first.dtype in _CUDA_DTYPES or not first.is_floating_point()
        if not is_known:
            return self.twin(*arguments)
        if reason := cuda_status(first.device.index):
            _warn_of_twins(reason)
            return self.twin(*arguments)
        return self.launch(_CUDA, scope)

    def on_fake(self, *arguments: object) -> object:
        """Check a call of tensors without memory and allocate its results."""
        return self.run(_FAKE, *self._completed(arguments))

    def _checked(self, arguments: tuple) -> Scope:
        """Check a call that is not plain, its memory too."""
        scope = self.contract.check(arguments)  # first: a misfit may share memory because it is one
        self.contract.check_memory(arguments)
        return scope

    def _completed(self, arguments: tuple) -> tuple:
        """Return all arguments: torch leaves out those at the end that are as their defaults."""
        missing = [*self.contract.parameters.values()][len(arguments) :]
        return (*arguments, *(p.default for p in missing))


def on_cpu(launch: Launcher, _scope: Scope) -> bool:
    """Return True on a CPU, the only device that an op has a kernel for."""
    return launch.is_cpu


def op(
    tensors: str, returns: str = "", *, kernel: str = "", body: Callable | None = None,
    prepare: Callable | None = None, twin: Callable | None = None, **contract: object,
) -> Callable:  # fmt: skip
    """Register a function as the op ``dflash::name`` of torch, so that ``torch.compile`` sees it whole.

    The function is its signature and its docstring. What it takes, makes and does is its contract and a kernel of the
    same names, or ``body``. What the decorator returns has the `Op` as ``.op``.

    Args:
        tensors: the tensors among its arguments, see `Contract`.
        returns: new tensors, which an op without body returns.
        kernel: the op's name without a trailing underscore, if it is not another.
        body, prepare: see `Op`.
        twin: see `Op`; None for the one in `dflash.ops.reference`.
        contract: further arguments of `Contract`.
    """

    def register(function: Callable) -> Callable:
        name, signature = function.__name__, inspect.signature(function, eval_str=True)
        parameters, its_kernel = [*signature.parameters.values()], kernel or name.rstrip("_")
        parsed = Contract(name, parameters, tensors, returns, kernel="" if body else its_kernel, **contract)
        made = Op(parsed, body, prepare, twin or getattr(reference, name), its_kernel)
        schema = _schema(parameters, signature.return_annotation, parsed.writes)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, made.on_cpu, "CPU")
        _LIBRARY.impl(name, made.on_cuda, "CUDA")
        torch.library.register_fake(f"dflash::{name}", made.on_fake, lib=_LIBRARY)
        OPS[name] = _callable(function, made, signature)
        return OPS[name]

    return register


def _schema(parameters: list[inspect.Parameter], returns: object, mutates: list[str]) -> str:
    """Infer the schema of a signature."""

    def prototype() -> None:
        pass

    # A schema has no default for a list; the function below always passes it.
    plain = [p.replace(default=p.empty) if p.default == () else p for p in parameters]
    prototype.__signature__ = inspect.Signature(plain, return_annotation=returns)
    return torch.library.infer_schema(prototype, mutates_args=mutates)


def _callable(function: Callable, made: Op, signature: inspect.Signature) -> Callable:
    """Make the function that users call: the CPU kernel if the call is plain and fits, else torch's dispatcher.

    It is compiled from source: ``*arguments`` takes a third of a small kernel's time, and names and defaults as much.
    Compilers and torch.export see the op; torch.jit.trace and make_fx, on plain tensors, do not.
    """
    name, names = function.__name__, ", ".join(signature.parameters)
    source = (
        f"def {name}({names}):\n"
        f"    if is_tracing() or is_exporting() or registry.dispatches_all:\n"
        f"        return dispatch({names})\n"
        f"    if (result := direct({names})) is not NotImplemented:\n"
        f"        return result\n"
        f"    return dispatch({names})\n"
    )
    scope = {
        "is_tracing": torch.compiler.is_dynamo_compiling,  # with the next half the time of torch.compiler.is_compiling
        "is_exporting": torch.compiler.is_exporting,
        "registry": sys.modules[__name__],
        "direct": made.direct,
        "dispatch": getattr(torch.ops.dflash, name).default,
    }
    exec(compile(source, f"<dflash.ops.{name}>", "exec"), scope)
    call = functools.update_wrapper(scope[name], function)
    call.__defaults__ = function.__defaults__
    call.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    call.__annotations__ |= {"return": signature.return_annotation}
    del call.__wrapped__
    call.op = made
    return call
