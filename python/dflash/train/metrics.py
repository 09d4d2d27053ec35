"""The metrics of a run, the file that holds them, and its progress on standard error."""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..files import write_atomically
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
        parts = [out.loss.detach(), out.weight, out.cross_entropy, out.selector_loss if self.has_selector else zero]
        if out.correct is not None:
            found = zero if out.found is None else out.found
            parts += [out.accepted, out.blocks, found, *out.correct, *out.counted]
        self.sums = self.sums.to(out.loss.device)
        self.sums[: len(parts)] += torch.stack([part.float() for part in parts])

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
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise CheckpointError(f"{self.path} could not be written ({error}); the checkpoints are intact") from error

    def drop_after(self, step: int) -> None:
        """Drop lines after ``step``. A run that was killed before its next checkpoint leaves such lines."""
        if not self.path.is_file():
            return
        lines = [line for line in self.path.read_bytes().splitlines() if _is_step(line, step)]
        kept = "".join(line.decode() + "\n" for line in lines)
        write_atomically(self.path, lambda unfinished: unfinished.write_text(kept, encoding="utf-8"))


def _is_step(line: bytes, last: int) -> bool:
    """True if ``line`` is complete and has the metrics of a step up to ``last``."""
    try:
        return json.loads(line)["step"] <= last
    except (ValueError, LookupError, TypeError):  # cut short by a kill
        return False


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: of the GPU, or of this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


_SECONDS = 10  # between lines

Show = Callable[[Any, dict[str, Any] | None], None]


def progress(steps: int) -> contextlib.AbstractContextManager[Show]:
    """Return a context manager that gives ``show(trainer, metrics or None)``, to be called after every step."""
    return _bar(steps) if sys.stderr.isatty() else contextlib.nullcontext(_lines(steps))


@contextlib.contextmanager
def _bar(steps: int) -> Iterator[Show]:
    text = ""
    with bars(["steps"]) as show:

        def step(trainer: Any, metrics: dict[str, Any] | None) -> None:
            nonlocal text
            text = text if metrics is None else _text(trainer)
            show("steps", trainer.step, steps, text)

        yield step


def _lines(steps: int) -> Show:
    printed = 0.0

    def line(trainer: Any, metrics: dict[str, Any] | None) -> None:
        nonlocal printed
        now = time.monotonic()
        if metrics is None or (now - printed < _SECONDS and trainer.step < steps):
            return
        printed = now
        left = (steps - trainer.step) * trainer.seconds / max(1, trainer.step)
        text = f"step {trainer.step} of {steps}  {_text(trainer)}  {left / 60:.1f} min left"
        print(text, file=sys.stderr, flush=True)

    return line


def _text(trainer: Any) -> str:
    last = trainer.last
    parts = [f"loss {last['loss']:.3f}"]
    if last.get("train_acceptance") is not None:
        parts.append(f"train acceptance {last['train_acceptance']:.2f}")
    if last.get("acceptance_length") is not None:
        parts.append(f"held-out acceptance {last['acceptance_length']:.2f}")
    return "  ".join([*parts, f"{last['tokens_per_second']:,.0f} tokens/s"])
