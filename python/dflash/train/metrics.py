"""The metrics of a run, the file that holds them, and its progress on standard error."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from ..evaluate.progress import bars
from ..files import write_atomically
from .checkpoint import CheckpointError
from .files import one_line_errors
from .loss import BlockLoss


class StepTotals:
    """Sums of `BlockLoss` over the steps between two log lines, and the tokens of these steps."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.tokens = 0
        self.sums: dict[str, Tensor] = {}

    def add(self, out: BlockLoss) -> None:
        for name, part in vars(out).items():
            if part is not None:
                self.sums[name] = self.sums.get(name, 0) + part.detach().double()

    def means(self, accelerator: Any) -> dict[str, Any]:
        """Return the means over all processes. All processes must call this."""
        sums = {name: accelerator.reduce(part.float(), reduction="sum").tolist() for name, part in self.sums.items()}
        right, counted, blocks = (sums.get(name) for name in ("correct", "counted", "blocks"))
        out = {
            "loss": sums["loss"] / sums["weight"],
            "cross_entropy": sums["cross_entropy"] / sums["weight"],
            "accuracy": [round(c / n, 4) if n else None for c, n in zip(right, counted, strict=True)],
            "train_acceptance": sums["accepted"] / blocks if blocks else None,
            "tokens_per_second": self.tokens / (time.monotonic() - self.began),
        }
        if "selector_loss" in sums:
            recall = sums["found"] / sum(counted) if sum(counted) else None
            out |= {"selector_loss": sums["selector_loss"] / sums["weight"], "candidate_recall": recall}
        return out


class MetricsFile:
    """``metrics.jsonl`` of a run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"

    def append(self, line: dict[str, Any]) -> None:
        with one_line_errors(f"{self.path} could not be written (the checkpoints are intact)", CheckpointError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def drop_after(self, step: int) -> None:
        """Drop lines after ``step``. A run that was killed before its next checkpoint leaves such lines."""
        if not self.path.is_file():
            return
        kept = []
        for line in self.path.read_bytes().splitlines():
            with contextlib.suppress(ValueError, LookupError, TypeError):  # cut short by a kill
                kept += [line + b"\n"] if json.loads(line)["step"] <= step else []
        write_atomically(self.path, lambda unfinished: unfinished.write_bytes(b"".join(kept)))


_SECONDS = 10  # between lines

Show = Callable[[Any, dict[str, Any] | None], None]


@contextlib.contextmanager
def progress(steps: int, shown: bool) -> Iterator[Show]:
    """Yield ``show(trainer, metrics or None)``, to be called after every step: a bar on a terminal, else lines."""
    printed, text = 0.0, ""
    with bars(["steps"], shown=shown) as show_bar:

        def show(trainer: Any, metrics: dict[str, Any] | None) -> None:
            nonlocal printed, text
            text = text if metrics is None else _text(trainer.last)
            show_bar("steps", trainer.step, steps, text)
            now = time.monotonic()
            is_due = now - printed >= _SECONDS or trainer.step >= steps
            if shown and metrics is not None and is_due and not sys.stderr.isatty():
                printed, left = now, (steps - trainer.step) * trainer.seconds / max(1, trainer.step)
                line = f"step {trainer.step} of {steps}  {text}  {left / 60:.1f} min left"
                print(line, file=sys.stderr, flush=True)

        yield show


def _text(last: dict[str, Any]) -> str:
    parts = [f"loss {last['loss']:.3f}"]
    for name, key in (("train", "train_acceptance"), ("held-out", "acceptance_length")):
        if last.get(key) is not None:
            parts.append(f"{name} acceptance {last[key]:.2f}")
    return "  ".join([*parts, f"{last['tokens_per_second']:,.0f} tokens/s"])
