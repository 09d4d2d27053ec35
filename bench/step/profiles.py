"""Profiles."""

import math
from collections import defaultdict

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .meter import SKIPPED, Meter
from .setting import Run

_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")


def profiled(run: Run, accepted: int, device: torch.device, shapes: bool = False) -> profile:
    """``Meter.profiled`` steps of a runner."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    profiler = profile(activities=activities, record_shapes=shapes)
    run(Meter(device, profiler), accepted, SKIPPED + Meter.profiled + 1)
    return profiler


def counted(profiler: profile) -> tuple[float, float]:
    """Launches by the host and kernels of the device, a step."""
    events = profiler.events()
    on_device = [event for event in events if event.device_type == DeviceType.CUDA]
    kernels = sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_device)
    calls = [event.name for event in events if event.name.startswith("cu")]
    launches = sum(any(part in name for part in _LAUNCHES) for name in calls)
    return launches / Meter.profiled, kernels / Meter.profiled


def kernel_table(profiler: profile) -> list[dict]:
    """The kernels of a step by name: how many, and their time."""
    found: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            found[event.name].append(event.time_range.elapsed_us())
    rows = [
        {"kernel": name, "count": len(times) / Meter.profiled, "us": sum(times) / Meter.profiled}
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])


def _op_bytes(name: str, shapes: list, size: int, length: int, features: float) -> float | None:
    """The bytes that a call of an op cannot do without, of its operands' shapes; None where that is not known.

    The profiler does not record the shapes of a list: ``features`` is what a call of ``linears`` has on average.
    """
    of = [math.prod(shape) for shape in shapes]
    match name.removeprefix("aten::").removeprefix("dflash::"):
        case "mm":
            return size * (of[0] + of[1] + shapes[0][0] * shapes[1][1])
        case "addmm":
            return size * (of[1] + of[2] + shapes[1][0] * shapes[2][1])
        case "linear" if name.startswith("dflash::"):
            return size * (of[0] + of[1] + of[0] // shapes[0][-1] * shapes[1][0])
        case "linears":
            return size * (of[0] + features * shapes[0][-1] + of[0] // shapes[0][-1] * features)
        case "block_attention":
            batch, kv_heads, _, head_dim = shapes[1]
            return size * (2 * of[0] + 2 * batch * kv_heads * length * head_dim)
        case "rms_norm":
            return size * 2 * of[0]
        case "add_rms_norm":
            return size * 4 * of[0]
        case "silu_mul":
            return size * of[0] * 3 // 2
        case "qkv_norm_rope_append_" | "append_kv_":
            return size * 2 * of[0] * (1 if "qkv" in name else 2)
        case "select_tokens":
            return size * of[0]
    return None


def op_table(profiler: profile, size: int, length: int, features: float, copy: float) -> list[dict]:
    """The ops of an eager step by shape: how many, their time on the device, bytes and share of the bandwidth."""
    rows = []
    on_gpu = torch.cuda.is_available()
    for entry in profiler.key_averages(group_by_input_shape=True):
        time_us = (entry.self_device_time_total if on_gpu else entry.self_cpu_time_total) / Meter.profiled
        if not time_us or entry.device_type == DeviceType.CUDA or entry.key.startswith("cuda"):
            continue
        shapes = [shape for shape in entry.input_shapes if shape]
        try:
            moved = _op_bytes(entry.key, shapes, size, length, features)
        except (IndexError, ValueError, TypeError):
            moved = None
        count = entry.count / Meter.profiled
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


def show_tables(runner: str, kernels: list[dict], ops: list[dict]) -> None:
    total = sum(row["us"] for row in kernels)
    if kernels:
        print(f"{runner}: kernels of the step, {total:.1f} us in all")
    for row in kernels[:25]:
        print(f"    {row['us']:9.1f} us {100 * row['us'] / total:5.1f} %  {row['count']:6.1f} x {row['kernel'][:90]}")
    print(f"{runner}: ops of the same step, kernel by kernel")
    for row in ops[:30]:
        moved = "" if row["mb"] is None else f"{row['mb']:9.1f} MB {100 * row['share_of_copy']:4.0f} % of copy"
        print(f"    {row['us']:9.1f} us {row['count']:6.1f} x {row['op']:<30} {row['shapes']:<44} {moved}")
