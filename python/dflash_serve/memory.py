"""Memory that a context takes, and that is free for it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from dflash.internals import targets

_SLOTS = 64  # of a cache that is looked at
_OTHERS = 256  # bytes of ids and log probabilities per token


def bytes_per_token(target: Any, drafter: Any, window: int | None = None) -> int:
    """Return the bytes of a token in the caches of a target and its drafter (None for none), of one row.

    Runs the target on one token. States of recurrent layers, which do not grow, are not counted, nor are drafters all
    of whose layers have windows, their own or this ``window``.
    """
    size = _OTHERS + _slot_bytes(targets.Target(target))
    if (head := getattr(drafter, "target", None)) is not None:  # one in the target's own files, a layer of its family
        return size + _slot_bytes(head)
    if drafter is not None and not (window or min(drafter.config.window)):
        config = drafter.config
        size += 2 * config.num_hidden_layers * config.num_kv_heads * config.head_dim * drafter.dtype.itemsize
    return size


def _slot_bytes(target: Any) -> int:
    """Return the bytes of a position in a target's cache. Runs it on one token."""
    nothing, cache = torch.zeros(1, dtype=torch.int64, device=target.device), target.new_cache(1, _SLOTS, 1)
    with torch.no_grad():
        target.forward(nothing[None], nothing, cache, keep=nothing + 1)
    return sum(tensor.nbytes for kept in (cache.keys, cache.values) for tensor in kept.values()) // _SLOTS


def free_memory(device: torch.device) -> int:
    """Return the bytes that are free on a device; on the CPU, what the machine and the container leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if sys.platform == "darwin":
        return memory_of_vm_stat(subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout)
    free = 1024 * _numbers(Path("/proc/meminfo"))["MemAvailable:"]
    limit, used, parts = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current", "stat"))
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        dropped = _numbers(parts)["inactive_file"]  # files in memory, which give way
        free = min(free, max(0, int(text) - int(used.read_text()) + dropped))
    return free


def memory_of_vm_stat(text: str) -> int:
    """Return the bytes that macOS has free or gives away first, as its command ``vm_stat`` prints them."""
    pages = dict(re.findall(r"^Pages (\w+):\s+(\d+)\.$", text, re.MULTILINE))
    (size,) = re.findall(r"page size of (\d+) bytes", text)
    return int(size) * sum(int(pages[kind]) for kind in ("free", "inactive", "speculative", "purgeable"))


def _numbers(path: Path) -> dict[str, int]:
    """Return the first number of each line, by the word before it."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}
