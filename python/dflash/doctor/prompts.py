"""The prompts that a pair is examined on: from a file, next to the target, or a few of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..evaluate.datasets import load_prompts

__all__ = ["find_prompts"]

COUNT = 8
_OWN = (
    "Write a Python function that merges two sorted lists.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Explain step by step.",
    "Summarize the plot of Romeo and Juliet in five sentences.",
    "Translate into French: The weather was so bad that we stayed at home and read.",
    "List the planets of the solar system in order, with one fact about each.",
    "Write a SQL query for the ten customers with the largest total of orders in 2023.",
    "Explain to a child why the sky is blue.",
    "Solve 3x + 7 = 25 and check the result.",
)


def find_prompts(file: str | None, model: str) -> list[dict[str, Any]]:
    """Return the prompts to answer, each ``{"prompt"}`` or ``{"messages"}``.

    Args:
        file: JSON lines as `dflash.evaluate.datasets.load_prompts` takes them, of which all are used; None for the
            first few of ``prompts.jsonl`` next to the target's folder, if it is there, else prompts of our own.
        model: the target's folder or hub id.

    Raises:
        ValueError: the file cannot be read.
    """
    beside = Path(model).absolute().parent / "prompts.jsonl"
    if file is not None:
        found = load_prompts(file)
    elif Path(model).is_dir() and beside.is_file():
        found = load_prompts(str(beside), limit=COUNT)
    else:
        return [{"prompt": text} for text in _OWN]
    return [_as_row(prompt.turns[0], prompt.history) for prompt in found]


def _as_row(turn: str, history: tuple[dict[str, str], ...]) -> dict[str, Any]:
    return {"messages": [*history, {"role": "user", "content": turn}]} if history else {"prompt": turn}
