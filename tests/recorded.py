"""A GPU's behavior on CPU: steps are recorded once and replayed, reports arrive one step late, no host reads.

``Recorded`` stands for the GPU of `dflash.engine.Replay`. A capture runs the step once under a dispatch
mode, records every torch call with its exact tensors, and restores what the step wrote. A replay repeats the calls. As
with a CUDA graph, a replay runs no Python of the step, so a moved tensor or a changed branch gives a wrong answer.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dflash
from dflash.engine.graphs import Device, Replay
from dflash.ops import registry

# Calls that make the host wait for a GPU, by torch's names below and above autograd.
_WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"),
    *("is_nonzero", "item", "repeat_interleave.Tensor", "lift_fresh", "_assert_async"),
}
_READING = {"tolist", "item", "numpy", "cpu", "to", "__bool__", "__int__", "__float__", "__index__", "__array__"}


class HostRead(AssertionError):
    """Raised when the host reads a tensor of the device."""


class _Calls(TorchDispatchMode):
    """Passes every torch call of a step to ``see``, which makes the call."""

    def __init__(self, see: Callable) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.see(func, args, kwargs or {})


def _written(func, args, kwargs) -> list[Tensor]:
    schema = func._schema.arguments
    named = {**dict(zip((a.name for a in schema), args, strict=False)), **kwargs}
    values = [named.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _refuse(func, args) -> None:
    name = func._schema.name.split("::")[1]
    overload = f"{name}.{func._overloadname}"
    masked = name in ("index", "index_put", "index_put_") and any(
        isinstance(leaf, Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1])
    )
    if name in _WAITING or overload in _WAITING or masked:
        raise HostRead(f"{overload} waits for the device")


@contextlib.contextmanager
def dispatched() -> Iterator[None]:
    """Let CPU ops go through torch's dispatcher too, where its modes see them."""
    registry.dispatches_all = True
    try:
        yield
    finally:
        registry.dispatches_all = False


class Tape:
    """The recorded torch calls of a step."""

    def __init__(self, step: Callable[[], None]) -> None:
        self.calls: list = []
        before: list[tuple[Tensor, Tensor]] = []

        def see(func, args, kwargs):
            _refuse(func, args)
            before.extend((tensor, tensor.clone()) for tensor in _written(func, args, kwargs))
            out = func(*args, **kwargs)
            self.calls.append((func, args, kwargs, out))
            return out

        with dispatched(), Peeking(), _Calls(see):
            step()
        for tensor, value in reversed(before):  # a capture runs nothing
            tensor.copy_(value)

    @torch.no_grad()
    def replay(self) -> None:
        with dispatched():
            for func, args, kwargs, out in self.calls:
                returns = func._schema.returns
                if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
                    continue  # a view of memory that stays where it is
                fresh = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(fresh), strict=True):
                    if isinstance(old, Tensor) and old is not new:
                        old.copy_(new)


class Peeking(TorchFunctionMode):
    """Raises when Python reads a tensor: any tensor, or those with storage in ``live``."""

    def __init__(self, live: set[int] | None = None) -> None:
        super().__init__()
        self.live = live

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _READING and isinstance(args[0], Tensor):
            # `.to(x.device)` does not copy; a device given by name counts as another device.
            moves = name != "to" or any(isinstance(a, str) for a in (*args, *(kwargs or {}).values()))
            if moves and (self.live is None or args[0].untyped_storage().data_ptr() in self.live):
                raise HostRead(f"Tensor.{name} waits for the device")
        if func is torch.tensor and self.live is None:
            raise HostRead("torch.tensor copies from the host")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise `HostRead` at any call that would make the host wait for a GPU. Ops of dflash are allowed."""

    def see(func, args, kwargs):
        _refuse(func, args)
        return func(*args, **kwargs)

    with dispatched(), Peeking(), _Calls(see):
        yield


@contextlib.contextmanager
def no_peeking(generator: dflash.Generator) -> Iterator[None]:
    """Raise `HostRead` when the host reads the generator's state, or anything computed from it."""
    state = [value for value in vars(generator.state).values() if isinstance(value, Tensor)]
    cache = generator.state.target_cache
    state += [generator.state.report.tensor, *cache.keys.values(), *cache.values.values()]
    live = {tensor.untyped_storage().data_ptr() for tensor in state}
    kept = []  # keeps these tensors alive, so that their addresses are not reused

    def see(func, args, kwargs):
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        touched = any(tensor.untyped_storage().data_ptr() in live for tensor in inputs)
        if touched:
            _refuse(func, args)
        out = func(*args, **kwargs)
        # A report on its way to the host: a tensor copied into a slot no longer belongs to the device.
        if touched and func is not torch.ops.aten.copy_.default:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.numel():
                    kept.append(leaf)
                    live.add(leaf.untyped_storage().data_ptr())
        return out

    with dispatched(), Peeking(live), _Calls(see):
        yield


class Recorded(Device):
    """A `Device` without a GPU, which counts what it does."""

    def __init__(self, report: Tensor) -> None:
        self.report, self.underway = report, [None, None]
        self.slots = [torch.empty_like(report) for _ in range(2)]  # these are the host's
        self.steps = {"eager": 0, "replayed": 0}  # before their capture, and after it
        self.captures = self.settled = 0  # settled: waits for what was queued before a call
        self.most_ahead = 0  # largest number of reports that were on their way
        self.waits = ""  # where `watch` says that a step waits for the device
        self.broken = None  # the exception that the next captures raise

    def warm_up(self, step) -> None:
        self.steps["eager"] += 1
        step()

    def watch(self, step) -> str:
        self.warm_up(step)
        return self.waits

    def capture(self, step):
        if self.broken is not None:
            raise self.broken
        self.captures += 1
        tape = Tape(step)

        def replay() -> None:
            self.steps["replayed"] += 1
            tape.replay()

        return replay

    def send(self, slot: int) -> None:
        self.underway[slot] = self.report.clone()
        self.most_ahead = max(self.most_ahead, sum(report is not None for report in self.underway))

    def receive(self, slot: int) -> list:
        report, self.underway[slot] = self.underway[slot], None
        return self.slots[slot].copy_(report).tolist()

    def drain(self) -> None:
        pass

    def follow(self) -> None:
        pass

    def settle(self) -> None:
        self.settled += 1


def recorder(report: Tensor, shares: bool = False) -> Replay:
    """Return what launches recorded steps; in the place of `dflash.engine.Direct`."""
    return Replay(report, Recorded(report))


def record(generator: dflash.Generator) -> dflash.Generator:
    """Return ``generator``, with its steps recorded and read late."""
    generator.runner = recorder(generator.state.report.tensor)
    return generator
