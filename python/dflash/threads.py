"""The number of threads on CPUs: a container's quota and other programs may leave less than the processors shown."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
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


class Neighbors:
    """Leaves the processors that other programs use to them, so that threads do not wait for one that is held back.

    Where one of two processors is taken, two threads wait for each other at every op: one is faster. Processors are
    counted every ``period`` seconds, from /proc/stat; where that is not to be read, nobody is seen. Programs of lower
    priority than this one do not count: they give way.

    Args:
        root: has the folder ``proc``.
        period: in seconds.
    """

    def __init__(self, root: Path = Path("/"), period: float = 0.3) -> None:
        self._stat, self._period, self._taken = root / "proc/stat", period, 0
        self._last: tuple[float, float] | None = None

    def fitting(self, most: int) -> int:
        """Return how many of ``most`` threads find a processor, at least one."""
        now, last = time.monotonic(), self._last
        if last is None or now - last[0] >= self._period:
            used = self._used()
            if last is not None and used is not None:
                self._taken = round((used - last[1]) / (now - last[0]))
            self._last = None if used is None else (now, used)
        return most if self._taken < 1 else min(most, max(1, _processors() - self._taken))

    def _used(self) -> float | None:
        """Return the seconds for which others have used this process's processors; None if unknown."""
        try:
            lines = map(str.split, self._stat.read_text().splitlines())
            names = {f"cpu{index}" for index in os.sched_getaffinity(0)}
            columns = (1, 3, 6, 7) if os.nice(0) < 1 else (1, 2, 3, 6, 7)  # user, (nice,) system, irq and softirq
            ticks = sum(int(line[column]) for line in lines if line[0] in names for column in columns)
        except (OSError, AttributeError, ValueError, IndexError):
            return None
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


NEIGHBORS = Neighbors()
