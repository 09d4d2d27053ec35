"""Whether the CUDA kernels of this build compute on a GPU what plain torch computes there.

Users have GPUs, drivers and compilers that we have not tried, so each machine is asked once, at the first use of a GPU.
A kernel that differs is turned off, and its ops run in plain torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from .. import ops
from ..engine.graphs import captured
from ..files import version_of, write_atomically
from ..terminal import first_line
from . import reference
from .examples import Call, Sizes, calls
from .formats import PackedWeight
from .registry import CudaLauncher
from .switches import OVERLAP, PREFETCH, SELF_CHECK

# Sizes at which rows end within tiles; and those of a layer, whose products and keys are divided between blocks.
SIZES = (
    Sizes(batch=2, rows=13, hidden=136, heads=6, kv_heads=2, dim=72, width=200, capacity=60, vocab=1003),
    Sizes(batch=2, rows=16, hidden=2048, heads=8, kv_heads=2, dim=128, width=256, capacity=340, vocab=5000),
)
BOUND = 4  # roundings of the storage type, of the largest value: kernels round more than once
OVERLAPPING = "overlapping launches"
_REPLAYS = 20
PATIENCE = 20.0  # seconds that small launches may take
_PAUSE = 0.001  # seconds between two questions, once a launch takes long
_ROOM = 1 << 29  # bytes that must be free, those of torch's libraries included
_FAULTS: dict[str, str] = {}  # of all GPUs of this process
_CHECKED: set[tuple[torch.device, torch.dtype]] = set()
_ONE_AT_A_TIME = threading.Lock()


class KernelResult(NamedTuple):
    """What a check of one kernel found.

    Attributes:
        kernel: its name, or `OVERLAPPING`.
        error: the largest difference from plain torch in float64, over the largest value; infinite where integers,
            NaN or shapes differ, or where the kernel could not run.
        bound: the most that is right.
        microseconds: of the call with that error, its launch from Python included.
        fault: what went wrong; empty if nothing did.
        raised: True if it was an error: it may have another cause than the kernel, such as memory.
        broke: True if this process cannot use the GPU any more.
    """

    kernel: str
    error: float
    bound: float
    microseconds: float
    fault: str
    raised: bool = False
    broke: bool = False


class Gpu:
    """A GPU whose kernels are checked."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.launcher = device, CudaLauncher()

    def wait(self) -> None:
        """Wait for what was launched, and raise what went wrong in it.

        Raises:
            TimeoutError: it did not end within `PATIENCE`.
        """
        stream, end = torch.cuda.current_stream(self.device), time.monotonic() + PATIENCE
        while not stream.query():  # of this stream only: others may be captured at this moment
            time.sleep(_PAUSE if time.monotonic() > end - PATIENCE + 0.1 else 0)
            if time.monotonic() > end:
                raise TimeoutError(f"it did not end within {PATIENCE:.0f} seconds")

    def is_broken(self) -> bool:
        """Return True after an error, or with a kernel, that ends all work of this process on the GPU."""
        try:
            self.wait()
        except Exception:
            return True
        return False

    @contextlib.contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Let no kernel launched in this context start before the one ahead of it has ended."""
        ops.set_overlap(False)
        try:
            yield
        finally:
            ops.set_overlap(OVERLAP and OVERLAPPING not in _FAULTS)

    def overlapping(self, work: Callable[[], list[Tensor]]) -> Iterator[list[Tensor]]:
        """Yield the results of ``work``, captured as a graph, of one replay after another."""
        stream, results = torch.cuda.Stream(self.device), []
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            work()
            self.wait()
        replay = captured(lambda: results.extend(work()), None, stream)
        for _ in range(_REPLAYS):
            replay()
            self.wait()
            yield results


def check_kernels(gpu: Gpu, dtype: torch.dtype = torch.bfloat16, layers: int = 10) -> list[KernelResult]:
    """Compare every kernel with its twin in plain torch, and overlapping launches with those one by one.

    A kernel that breaks the GPU for this process is the last. Kernels have variants that are not asked for: other
    dtypes and head sizes, windows, soft caps.

    Args:
        gpu: where.
        dtype: of what is stored.
        layers: how often the kernels of attention follow each other, for overlapping launches.

    Raises:
        Exception: whatever plain torch raises, which says nothing of the kernels.
    """
    found: dict[str, KernelResult] = {}
    current = torch.cuda.device(gpu.device) if gpu.device.type == "cuda" else contextlib.nullcontext()
    plain = torch.inference_mode(False), torch.no_grad(), torch.autocast(gpu.device.type, enabled=False)
    with contextlib.ExitStack() as settings:  # not the caller's
        for setting in (current, torch.device("cpu"), *plain):
            settings.enter_context(setting)
        for sizes in SIZES:
            for name, call in _calls(sizes, dtype):
                kernel = getattr(ops, name).op.kernel
                finding = _compare(gpu, name, call, dtype)
                if finding.broke:
                    found.pop(kernel, None)
                    return [*found.values(), finding]
                found[kernel] = max(found.get(kernel, finding), finding, key=lambda each: each.error)
        if OVERLAPPING not in _FAULTS:
            found[OVERLAPPING] = _compare_overlapping(gpu, dtype, layers)
    return [*found.values()]


def _calls(sizes: Sizes, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Yield a call of every op that is one kernel; of attention also over a tree, and products of packed weights."""
    for name, make in calls(sizes, torch.Generator().manual_seed(0)).items():
        if name == "fuse_features":  # a product and a norm, which have their own
            continue
        yield name, make()
        if name == "block_attention":
            star = 1 | 1 << torch.arange(sizes.rows)  # each row sees the first and itself
            yield name, make() | {"ancestors": star.expand(sizes.batch, -1)[..., None].contiguous()}
        if name == "linear":
            for packed in _packed(make()["weight"], dtype):
                yield name, make() | {"weight": packed.packed, "scales": packed.scales, "format": packed.format}
        if name == "experts":
            call = make()
            for both in zip(*(_packed(call[part], dtype) for part in ("gate_up", "down")), strict=True):
                for part, packed, kind in zip(("gate_up", "down"), both, ("format", "down_format"), strict=True):
                    call |= {part: packed.packed, f"{part}_scales": packed.scales, kind: packed.format}
                yield name, make() | call


def _packed(weight: Tensor, dtype: torch.dtype) -> Iterator[PackedWeight]:
    """Yield weights of a shape ``[..., out, in]`` in formats that each take another way through a kernel.

    All but the first need columns that are a multiple of 256.
    """
    yield PackedWeight.of(weight, "w8a16")
    columns = weight.shape[-1]
    if columns % 256:
        return
    codes, scales = (weight * 2 + 8).clamp_(0, 15).byte(), (weight[..., ::32] / 32).half()
    for bits, minima in itertools.product((4, 8), (None, -scales)):
        every = codes * 17 if bits == 8 else codes
        made = PackedWeight.of_integers(every, scales, minima=minima, group=32, bits=bits).in_groups(dtype)
        yield cast(PackedWeight, made)
    for kind, size in (("q4_k", 144), ("q6_k", 210)):
        # Small bytes, of which half-precision numbers are small too
        shape = *weight.shape[:-1], columns // 256 * size
        blocks = torch.arange(math.prod(shape)).remainder(19).byte().view(shape)
        yield cast(PackedWeight, PackedWeight.of_blocks(blocks, kind, columns).in_groups(dtype))


def _compare(gpu: Gpu, name: str, call: Call, dtype: torch.dtype) -> KernelResult:
    op = getattr(ops, name).op
    stored = {spec.name for spec in op.contract.tensors if spec.dtype in (None, "W") or spec.dtype.startswith("T|")}
    for argument, value in call.items():
        to = dtype if argument in stored else None
        call[argument] = tree_map_only(Tensor, functools.partial(_moved, device=gpu.device, dtype=to), value)
    bound, seconds = BOUND * torch.finfo(dtype).eps, 0.0
    for _ in range(2):  # the first call loads the kernel
        copy = tree_map_only(Tensor, torch.clone, call)
        gpu.wait()  # what fails here is not this kernel's
        begin = time.perf_counter()
        try:
            out = _run(name, gpu.launcher, **copy)
            gpu.wait()
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:
            return KernelResult(op.kernel, math.inf, bound, 0.0, first_line(failure), True, _breaks(gpu, failure))
        seconds = time.perf_counter() - begin
    ours = _results(name, copy, out)
    if all(x.is_floating_point() for x in ours):
        call = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, call)
    error = max(map(_difference, ours, _results(name, call, getattr(reference, name)(**call))))
    fault = "" if error <= bound else f"it differs from plain torch (error {error:.2g} > {bound:.2g})"
    return KernelResult(op.kernel, error, bound, seconds * 1e6, fault)


def _breaks(gpu: Gpu, failure: Exception) -> bool:
    """Return True after a failure that ends all work on the GPU; what does not end may be on another stream."""
    return isinstance(failure, TimeoutError) or gpu.is_broken()


def _moved(x: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    return x.to(device, dtype if x.is_floating_point() else None)


def _run(name: str, launcher: CudaLauncher, **call: Any) -> object:
    op = getattr(ops, name).op
    return op.run(launcher, *(call.get(p.name, p.default) for p in op.contract.parameters.values()))


def _results(name: str, call: Call, out: object) -> list[Tensor]:
    """Return what a call returned and what it wrote."""
    writes = getattr(ops, name).op.contract.writes
    return [x for x in tree_leaves([out, *(call[argument] for argument in writes)]) if isinstance(x, Tensor)]


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference over the largest value; infinite where it has no number."""
    if ours.shape != theirs.shape or not ours.is_floating_point():
        return 0.0 if torch.equal(ours, theirs) else math.inf
    ours, theirs = ours.double(), theirs.double()
    is_number = theirs.isfinite()
    rest = torch.stack([ours, theirs]).masked_fill(is_number, 0)
    if not torch.equal(is_number, ours.isfinite()) or not torch.equal(*rest.nan_to_num(0.5)):
        return math.inf
    ours, theirs = ours[is_number], theirs[is_number]
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)) if theirs.numel() else 0.0


def _compare_overlapping(gpu: Gpu, dtype: torch.dtype, layers: int) -> KernelResult:
    """Run the four kernels of attention again and again: each reads what the one ahead of it writes."""
    launcher, g = gpu.launcher, torch.Generator().manual_seed(0)
    batch, rows, _, heads, kv_heads, dim, _, capacity, _ = SIZES[1]
    hidden, wide = heads * dim, (heads + 2 * kv_heads) * dim

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float32).to(gpu.device, dtype)

    x, qkv, out = draw(batch, rows, hidden), draw(wide, hidden) / hidden**0.5, draw(hidden, hidden) / hidden**0.5
    lengths = torch.tensor([capacity - rows - i for i in range(batch)], device=gpu.device)
    cos, sin = (table.to(gpu.device) for table in torch.rand(2, capacity, dim // 2, generator=g, dtype=torch.float32))
    k_cache, v_cache, norm = draw(batch, kv_heads, capacity, dim), draw(batch, kv_heads, capacity, dim), draw(dim)
    tables = {"num_context": None, "depth": None, "cos": cos, "sin": sin, "eps": 1e-6}
    norms = {"q_norm_weight": norm, "k_norm_weight": norm}
    kept = []  # what kernels read must live until they have run

    def work() -> list[Tensor]:
        keys, values, hidden_states = k_cache.clone(), v_cache.clone(), x.clone()
        states = {"lengths": lengths, "k_cache": keys, "v_cache": values}
        for _ in range(layers):
            kept.append(hidden_states)
            projected = _run("linear", launcher, x=hidden_states, weight=qkv, prefetch=True)
            q = torch.empty(batch, rows, heads, dim, device=gpu.device, dtype=dtype)
            _run("qkv_norm_rope_append_", launcher, qkv=projected, **states, **tables, **norms, q_out=q)
            attended = _run("block_attention", launcher, q=q, **states, scale=dim**-0.5, causal=True, fresh=0)
            kept.extend((projected, q, attended))
            hidden_states = _run("linear", launcher, x=attended.flatten(2), weight=out, prefetch=True)
        return [hidden_states, keys, values]

    raised, broke = False, False
    try:
        with gpu.one_by_one():
            wanted = work()
            gpu.wait()
        is_equal = all(
            torch.equal(a, b) for results in gpu.overlapping(work) for a, b in zip(results, wanted, strict=True)
        )
        fault = "" if is_equal else "results of kernels that start early differ from those one by one"
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        raised, broke, fault = True, _breaks(gpu, failure), first_line(failure)
    return KernelResult(OVERLAPPING, math.inf if fault else 0.0, 0.0, 0.0, fault, raised, broke)


# ---------------------------------------------------------------------------------------------- once per machine


def self_check(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Check the kernels at the first use of a GPU, unless this machine has done so; turn off what is wrong.

    Warns once of what is turned off. With less than 512 MB free the next use asks again. ``DFLASH_SELF_CHECK=0`` leaves
    it out (see `dflash.ops.switches`).

    Args:
        device: the GPU; there is nothing to check on a CPU.
        dtype: of the target's weights; bfloat16 stands for all but float16.

    Raises:
        RuntimeError: a kernel broke the GPU for this process. It is off in the next one.
    """
    if device.type == "cuda" and SELF_CHECK != "0" and not ops.cuda_status(device.index):
        asked = device, torch.float16 if dtype == torch.float16 else torch.bfloat16
        with _ONE_AT_A_TIME:
            if asked not in _CHECKED and _check(*asked):
                _CHECKED.add(asked)


def _check(device: torch.device, dtype: torch.dtype) -> bool:
    """Check a GPU, or remember how it was; return False if that has to wait."""
    turn_off_faulty(breaking := _read().get(_machine(device), {}))
    key = _machine(device) + _settings(dtype)
    faults = None if SELF_CHECK == "always" else _read().get(key)
    if faults is None:
        free = torch.cuda.mem_get_info(device)[0]
        if free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) < _ROOM:
            return False
        try:
            found = check_gpu(device, dtype)
        except Exception:
            if Gpu(device).is_broken():
                raise
            return False  # plain torch could not
        if breaks := next((each for each in found if each.broke), None):
            raise RuntimeError(
                f"the CUDA kernel {breaks.kernel} failed ({breaks.fault}), and this process cannot use the GPU any "
                f"more. Start it again: the kernel is off from now on (to check it again, delete {_file()})"
            )
        faults = {each.kernel: each.fault for each in found if each.fault}
        if not any(each.raised and each.kernel not in breaking for each in found):
            _remember(key, faults)
    turn_off_faulty(faults)
    if every := breaking | faults:
        each = "; ".join(f"{kernel}: {fault}" for kernel, fault in every.items())
        warnings.warn(
            f"dflash turns off CUDA kernels on {torch.cuda.get_device_name(device)}, and runs their ops in plain "
            f"torch: {each}. The results are right, but steps take longer. Please report what `dflash doctor` prints. "
            f"What is remembered of checks is in {_file()}",
            stacklevel=2,
        )
    return True


def check_gpu(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> list[KernelResult]:
    """Check the kernels of a GPU, but not again those that broke it in another process: these are off.

    A kernel that breaks it now is the last, and is remembered.
    """
    broke = _read().get(machine := _machine(device), {})
    turn_off_faulty(broke)
    found = {each.kernel: each for each in check_kernels(Gpu(device), dtype)}
    for each in found.values():
        if each.broke:
            _remember(machine, broke | {each.kernel: each.fault})
    remembered = {name: KernelResult(name, math.inf, 0.0, 0.0, fault, True) for name, fault in broke.items()}
    return [*(found | remembered).values()]


def turn_off_faulty(faults: dict[str, str]) -> None:
    """Turn off kernels, or overlapping launches."""
    _FAULTS.update(faults)
    for kernel, fault in faults.items():
        if kernel == OVERLAPPING:
            ops.set_overlap(False)
        else:
            ops.turn_off(kernel, fault)


def _machine(device: torch.device) -> str:
    """Return on what it depends whether a kernel breaks the GPU."""
    driver, extension = Path("/proc/driver/nvidia/version"), Path(ops.EXTENSION)
    name = torch.cuda.get_device_name(device), "{}.{}".format(*torch.cuda.get_device_capability(device))
    version = driver.read_text().splitlines()[0] if driver.exists() else ""
    build = version_of("dflash-engine"), f"{extension} {extension.stat().st_mtime_ns}"
    return " | ".join((*name, version, torch.__version__, *build))


def _settings(dtype: torch.dtype) -> str:
    """Return on what the results of a check depend besides; what is off passes."""
    off = sorted(ops.kernels_off().keys() | _FAULTS.keys())
    return " | ".join((f" | {dtype} overlap {OVERLAP} prefetch {PREFETCH}", *off))


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # "~" where there is no home
    return Path(cache) / "dflash" / "self-check.json"


def _read() -> dict[str, dict[str, str]]:
    """Return the kernels that broke a machine, and those that differed on a machine with some settings."""
    try:
        return dict(json.loads(_file().read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or not ours
        return {}


def _remember(key: str, faults: dict[str, str]) -> None:
    known = _read() | {key: faults}
    with contextlib.suppress(OSError):  # without the file every process checks
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_file(), lambda path: path.write_text(json.dumps(known, indent=1)))
