"""Acceptance and step time by context length: every step counts in the bucket of the position that it starts from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..engine import context_bucket
from .compare import Answer

__all__ = ["StepCounts", "count_steps", "summarize_steps"]

StepCounts = dict[str, list[float]]
"""By the first context length of a bucket: steps, tokens, rows and seconds."""


def count_steps(prompt_tokens: int, answer: Answer) -> StepCounts:
    """Return the steps of an answer by bucket."""
    counts: StepCounts = {}
    length = prompt_tokens  # the anchor's position: the first token comes from the prompt
    for tokens, rows, seconds in zip(answer.steps, answer.rows, answer.step_seconds, strict=True):
        found = counts.setdefault(str(context_bucket(length)), [0, 0, 0, 0.0])
        for place, number in enumerate((1, tokens, rows, seconds)):
            found[place] += number
        length += tokens
    return counts


def summarize_steps(drafted: Iterable[StepCounts], one_token: Iterable[StepCounts]) -> list[dict[str, Any]]:
    """Add up the steps of answers.

    Args:
        drafted: per answer, of DFlash.
        one_token: per answer, of one-token decoding.

    Returns:
        Per bucket in ascending order: ``from``, its first context length; steps; acceptance_length, tokens per step;
        rows, those that a step verified; step_seconds and one_token_step_seconds, means; and speedup, of steps only.
        The last two are None where one-token decoding took no step.
    """
    ours, theirs = _total(drafted), _total(one_token)
    return [_bucket(int(start), ours[start], theirs.get(start)) for start in sorted(ours, key=int)]


def _total(answers: Iterable[StepCounts]) -> Mapping[str, Sequence[float]]:
    total: dict[str, list[float]] = {}
    for counts in answers:
        for start, numbers in counts.items():
            total[start] = [a + b for a, b in zip(total.get(start, [0, 0, 0, 0.0]), numbers, strict=True)]
    return total


def _bucket(start: int, ours: Sequence[float], one_token: Sequence[float] | None) -> dict[str, Any]:
    steps, tokens, rows, seconds = ours
    theirs = None if one_token is None else one_token[3] / one_token[0]
    return {
        "from": start,
        "steps": steps,
        "acceptance_length": tokens / steps,
        "rows": rows / steps,
        "step_seconds": seconds / steps,
        "one_token_step_seconds": theirs,
        "speedup": None if theirs is None else theirs * tokens / seconds,
    }
