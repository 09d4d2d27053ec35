"""A step under torch.profiler: launches, kernels by name, ops by shape with the bytes each must move."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .meter import SKIPPED, Meter
from .setting import Run

_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")


def profiled(run: Run, accepted: int, device: torch.device, shapes: bool = False) -> profile:
    """Profile ``Meter.profiled`` steps of a runner."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    profiler = profile(activities=activities, record_shapes=shapes)
    run(Meter(device, profiler), accepted, SKIPPED + Meter.profiled + 1)
    return profiler


def counted(profiler: profile) -> tuple[float, float]:
    """Count, per step, what the host launched and the kernels that the device ran."""
    events = profiler.events()
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    kernels = sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_device)
    calls = [event.name for event in events if event.name.startswith("cu")]
    launches = sum(any(part in name for part in _LAUNCHES) for name in calls)
    return launches / Meter.profiled, kernels / Meter.profiled


def kernel_table(profiler: profile) -> list[dict]:
    """List the kernels of a step by name, with their number and total time per step."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us())
    rows = [
        {"kernel": name, "count": len(times) / Meter.profiled, "us": sum(times) / Meter.profiled}
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


@dataclass(frozen=True)
class Sizes:
    """What the bytes of an op depend on besides the shapes that the profiler records.

    Attributes:
        element: bytes per element.
        length: positions in the cache.
        features: outputs of a ``linears`` call; the profiler does not record the shapes of a list.
    """

    element: int
    length: int
    features: float


# Elements that a call must move, from its operands' shapes.
_ELEMENTS: dict[str, Callable[[list[list[int]], Sizes], float]] = {
    "aten::mm": lambda s, _: _count(s[0]) + _count(s[1]) + s[0][0] * s[1][1],
    "aten::addmm": lambda s, _: _count(s[1]) + _count(s[2]) + s[1][0] * s[2][1],
    "dflash::linear": lambda s, _: _count(s[0]) + _count(s[1]) + _rows(s[0]) * s[1][0],
    "dflash::linears": lambda s, z: _count(s[0]) + z.features * s[0][-1] + _rows(s[0]) * z.features,
    "dflash::block_attention": lambda s, z: 2 * _count(s[0]) + 2 * s[1][0] * s[1][1] * z.length * s[1][3],
    "dflash::rms_norm": lambda s, _: 2 * _count(s[0]),
    "dflash::add_rms_norm": lambda s, _: 4 * _count(s[0]),
    "dflash::dynamic_conv": lambda s, _: 2 * _count(s[0]) + _count(s[1]) + _count(s[2]),
    "dflash::conv_add_rms_norm": lambda s, _: 4 * _count(s[0]) + _count(s[1]) + _count(s[2]),
    "dflash::swiglu": lambda s, _: _count(s[0]) + 2 * _count(s[1]) + _rows(s[0]) * s[1][0],
    "dflash::silu_mul": lambda s, _: _count(s[0]) * 3 / 2,
    "dflash::qkv_norm_rope_append_": lambda s, _: 2 * _count(s[0]),
    "dflash::append_kv_": lambda s, _: 4 * _count(s[0]),
    "dflash::select_tokens": lambda s, _: _count(s[0]),
    "dflash::top_candidates": lambda s, _: _count(s[0]),
    "dflash::walk_candidates": lambda s, _: _count(s[0]) + (_count(s[4]) + _rows(s[0])) * s[0][-1],
}


def _count(shape: list[int]) -> int:
    return math.prod(shape)


def _rows(shape: list[int]) -> int:
    return math.prod(shape[:-1])


def _op_bytes(name: str, shapes: list, sizes: Sizes) -> float | None:
    """Return the bytes that a call must move, None where that is not known."""
    if name not in _ELEMENTS:
        return None
    try:
        return sizes.element * _ELEMENTS[name](shapes, sizes)
    except (IndexError, ValueError, TypeError):
        return None


def op_table(profiler: profile, sizes: Sizes, copy: float) -> list[dict]:
    """List the ops of an eager step by shape: number, time, bytes, share of the bandwidth ``copy``."""
    rows = []
    on_gpu = torch.cuda.is_available()
    for entry in profiler.key_averages(group_by_input_shape=True):
        time_us = (entry.self_device_time_total if on_gpu else entry.self_cpu_time_total) / Meter.profiled
        if not time_us or entry.device_type == DeviceType.CUDA or entry.key.startswith("cuda"):
            continue
        shapes = [shape for shape in entry.input_shapes if shape]
        moved, count = _op_bytes(entry.key, shapes, sizes), entry.count / Meter.profiled
        rows.append(
            {
                "op": entry.key,
                "shapes": str(shapes[:2]),
                "count": count,
                "us": time_us,
                "mb": None if moved is None else moved * count / 1e6,
                "share_of_copy": None if moved is None else moved * count / (time_us * 1e-6) / copy,
            }
        )
    return sorted(rows, key=lambda row: -row["us"])


def show_tables(runner: str, kernels: list[dict], ops: list[dict], overlap: bool) -> None:
    """Print both tables."""
    total = sum(row["us"] for row in kernels)
    if kernels:
        print(f"{runner}: kernels of the step, {total:.1f} us in total")
    if overlap:
        print(
            "    kernels overlap: their times count while they wait, and the total exceeds the step (DFLASH_OVERLAP=0)"
        )
    for row in kernels[:25]:
        print(f"    {row['us']:9.1f} us {100 * row['us'] / total:5.1f} %  {row['count']:6.1f} x {row['kernel'][:90]}")
    print(f"{runner}: ops of the same step, kernel by kernel")
    for row in ops[:30]:
        moved = "" if row["mb"] is None else f"{row['mb']:9.1f} MB {100 * row['share_of_copy']:4.0f} % of copy"
        print(f"    {row['us']:9.1f} us {row['count']:6.1f} x {row['op']:<30} {row['shapes']:<44} {moved}")
