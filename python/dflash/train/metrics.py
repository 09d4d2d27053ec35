"""The metrics of a run, the file that holds them, and its progress on standard error."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..files import one_line_errors, write_atomically
from ..terminal import bars
from .checkpoint import CheckpointError
from .loss import BlockLoss


class StepTotals:
    """Sums over the steps between two log lines. `means` reduces them over all processes, once per line."""

    def __init__(self, block_size: int) -> None:
        self.began = time.monotonic()
        self.tokens = 0
        self.has_selector = False
        # loss, weight, cross-entropy, selector's loss, accepted tokens, blocks, labels among the candidates; then right
        # tokens and tokens per slot. `add` moves it to the device.
        self.sums = torch.zeros(7 + 2 * (block_size - 1), dtype=torch.float64, device="cpu")

    def add(self, out: BlockLoss) -> None:
        """Add a micro-batch."""
        zero, self.has_selector = torch.zeros_like(out.weight), out.selector_loss is not None
        parts = [out.loss.detach(), out.weight, out.cross_entropy, out.selector_loss]
        if out.correct is not None:
            parts += [out.accepted, out.blocks, out.found, *out.correct, *out.counted]
        self.sums = self.sums.to(out.loss.device)
        self.sums[: len(parts)] += torch.stack([(zero if part is None else part).float() for part in parts])

    def means(self, accelerator: Any) -> dict[str, Any]:
        """Return the means over all processes. All processes must call this."""
        sums = accelerator.reduce(self.sums.float().to(accelerator.device), reduction="sum").tolist()
        (loss, weight, entropy, selector, accepted, blocks, found), counts = sums[:7], sums[7:]
        half = len(counts) // 2
        out = {
            "loss": loss / weight,
            "cross_entropy": entropy / weight,
            "accuracy": [round(c / n, 4) if n else None for c, n in zip(counts[:half], counts[half:], strict=True)],
            "train_acceptance": accepted / blocks if blocks else None,
            "tokens_per_second": self.tokens / (time.monotonic() - self.began),
        }
        if self.has_selector:
            labels = sum(counts[half:])
            out |= {"selector_loss": selector / weight, "candidate_recall": found / labels if labels else None}
        return out


class MetricsFile:
    """``metrics.jsonl`` of a run."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "metrics.jsonl"

    def append(self, line: dict[str, Any]) -> None:
        """Write one line."""
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
def progress(steps: int) -> Iterator[Show]:
    """Yield ``show(trainer, metrics or None)``, to be called after every step: a bar on a terminal, else lines."""
    printed, text = 0.0, ""
    with bars(["steps"]) as show_bar:

        def show(trainer: Any, metrics: dict[str, Any] | None) -> None:
            nonlocal printed, text
            text = text if metrics is None else _text(trainer.last)
            show_bar("steps", trainer.step, steps, text)
            now = time.monotonic()
            if sys.stderr.isatty() or metrics is None or (now - printed < _SECONDS and trainer.step < steps):
                return
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
