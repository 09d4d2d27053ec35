"""The number of threads on CPUs: a container's quota may allow less than the processors that it shows."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from pathlib import Path

import torch


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many processors the cgroups of this process may use together; None without a limit.

    Reads cgroup v1 and v2, of the process's group and of those around it. ``root`` has the folders ``proc`` and
    ``sys``.
    """
    groups = []
    with contextlib.suppress(OSError):
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    found = [math.inf]
    for _, controllers, path in groups:
        mounts = ("cpu", "cpu,cpuacct") if "cpu" in controllers.split(",") else ("", "unified")
        for mount in () if controllers and mounts[0] != "cpu" else mounts:
            base = root / "sys/fs/cgroup" / mount
            group = base / path.lstrip("/")
            found += [_quota(folder) for folder in (group, *group.parents) if folder.is_relative_to(base)]
    return None if math.isinf(least := min(found)) else least


def _quota(group: Path) -> float:
    with contextlib.suppress(OSError, ValueError):  # "max" is no number
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    return math.inf


def _processors() -> int:
    """Return how many this process may use, as far as the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache  # once per process: a number that somebody sets later stays too
def fit_threads(root: Path = Path("/")) -> None:
    """Lower torch's own number of threads to the container's quota; one that somebody has chosen stays.

    More threads than the quota wait for each other while the kernel holds them back: on half a processor of two, two
    threads take 1.5 to 2.4 times as long as one.
    """
    processors, quota = _processors(), cpu_quota(root)
    # torch begins with a thread per processor, or with one per core, which may be two processors.
    is_chosen = "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() not in (processors, processors // 2)
    if quota is not None and not is_chosen and (fitting := max(1, round(quota))) < torch.get_num_threads():
        torch.set_num_threads(fitting)


def describe_threads(root: Path = Path("/")) -> str:
    """Say how many threads compute, on how many processors, and what the container's quota is, if there is one."""
    processors, quota = _processors(), cpu_quota(root)
    text = f"{torch.get_num_threads()} on {processors} processors"
    return text if quota is None else f"{text}, of which the container's quota is {quota:g}"
