"""One line of progress on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from ...progress import bars

__all__ = ["progress"]


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Any]:
    """Yields ``show(trainer, metrics or None)``, to be called after every step."""
    if not sys.stderr.isatty():
        printed = [0.0]

        def line(trainer: Any, metrics: dict[str, Any] | None) -> None:
            now = time.monotonic()
            if metrics is None or (now - printed[0] < 10 and trainer.step < steps):
                return
            printed[0] = now
            left = (steps - trainer.step) * trainer.seconds / max(1, trainer.step)
            print(
                f"step {trainer.step} of {steps}  {_text(trainer)}  {left / 60:.1f} min left",
                file=sys.stderr,
                flush=True,
            )

        yield line
        return
    text = ""
    with bars(["steps"]) as show:

        def step(trainer: Any, metrics: dict[str, Any] | None) -> None:
            nonlocal text
            text = text if metrics is None else _text(trainer)
            show("steps", trainer.step, steps, text)

        yield step


def _text(trainer: Any) -> str:
    last = trainer.last
    parts = [f"loss {last['loss']:.3f}"]
    if last.get("train_acceptance") is not None:
        parts.append(f"train acceptance {last['train_acceptance']:.2f}")
    if last.get("acceptance_length") is not None:
        parts.append(f"held-out acceptance {last['acceptance_length']:.2f}")
    return "  ".join([*parts, f"{last['tokens_per_second']:,.0f} tokens/s"])
