"""What a run measures and writes down."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ...files import whole_file
from ..loss import BlockLoss


class _Meter:
    """Sums of what steps measured between two log lines; one reduction over the processes when read."""

    def __init__(self, block_size: int) -> None:
        self.began = time.monotonic()
        self.tokens = 0
        self.sums = torch.zeros(5 + 2 * (block_size - 1), dtype=torch.float64)  # moves to the device with the first

    def add(self, out: BlockLoss) -> None:
        parts = [out.loss.detach(), out.weight, out.cross_entropy]
        self.sums = self.sums.to(out.loss.device)
        if out.correct is None:
            self.sums[:3] += torch.stack(parts)
        else:
            parts += [out.accepted, out.blocks, *out.correct, *out.counted]
            self.sums += torch.stack([part.float() for part in parts])

    def read(self, accelerator: Any) -> dict[str, Any]:
        sums = accelerator.reduce(self.sums.float().to(accelerator.device), reduction="sum").tolist()
        (loss, weight, entropy, accepted, blocks), counts = sums[:5], sums[5:]
        half = len(counts) // 2
        return {
            "loss": loss / weight,
            "cross_entropy": entropy / weight,
            "accuracy": [round(c / n, 4) if n else None for c, n in zip(counts[:half], counts[half:], strict=True)],
            "train_acceptance": accepted / blocks if blocks else None,
            "tokens_per_second": self.tokens / (time.monotonic() - self.began),
        }


def _cut(path: Path, step: int) -> None:
    """Drop the lines of a metrics file that are past ``step``: the run that wrote them was killed."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a line that was not written to its end
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    whole_file(path, lambda unfinished: unfinished.write_text("".join(kept), encoding="utf-8"))


def _peak_memory() -> int:
    """Bytes that this process has held at most."""

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
