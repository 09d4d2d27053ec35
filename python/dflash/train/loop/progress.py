"""Progress of a run on standard error: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...terminal import bars

__all__ = ["progress"]

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
