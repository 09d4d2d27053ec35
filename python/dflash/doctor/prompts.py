"""The prompts that a pair is examined on: from a file, next to the target, or a few of our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..evaluate.prompts import parse_prompt
from ..files import read_jsonl

__all__ = ["find_prompts"]

_COUNT = 8  # of the prompts next to a target
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
        file: JSON lines with ``prompt``, ``question``, ``turns`` (of which the first is asked) or ``messages``, of
            which all are used; None for a few of ``prompts.jsonl`` next to the target's folder, from all over the file,
            if it is there, else prompts of our own.
        model: the target's folder or hub id.

    Raises:
        ValueError: the file is missing, holds no prompt, or one of its lines is wrong.
    """
    if file is not None:
        return _read(Path(file))
    beside = Path(model).absolute().parent / "prompts.jsonl"
    if Path(model).is_dir() and beside.is_file():
        found = _read(beside)
        count = min(_COUNT, len(found))
        return [found[index * len(found) // count] for index in range(count)]
    return [{"prompt": text} for text in _OWN]


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"--prompts {str(path)!r} is not a file: name a file of JSON lines, each with a prompt")
    found: list[dict[str, Any]] = []
    for where, _, row in read_jsonl(path):
        messages, turns = parse_prompt(row, where)
        found.append({"prompt": turns[0]} if messages is None else {"messages": messages})
    if not found:
        raise ValueError(f"--prompts {str(path)!r} is empty: a line is a JSON object with a prompt")
    return found
