"""What a verification found, in words."""

from __future__ import annotations

import math
from typing import Any

from ..terminal import printable
from .mismatch import Mismatch
from .verification import CheckedAnswer, Verification

__all__ = ["lines_of"]


def lines_of(found: Verification, dtype: str, tokenizer: Any) -> list[str]:
    """Say what was found: a line per near-tie and one per answer.

    Args:
        found: by `dflash.verify`.
        dtype: of the target.
        tokenizer: of the target.
    """
    lines = []
    for number, answer in enumerate(found.answers, 1):
        where = f"answer {number}: " if len(found.answers) > 1 else ""
        for mismatch in answer.near_ties:
            lines.append(f"{where}near-tie in {dtype}: {_describe(mismatch, tokenizer)}")
        lines.append(where + _verdict(answer, tokenizer))
    return lines


def _verdict(answer: CheckedAnswer, tokenizer: Any) -> str:
    """Say in one line what was found about an answer."""
    if answer.mismatch is not None:
        return f"does not follow: {_describe(answer.mismatch, tokenizer)}"
    if answer.wrong_end:
        return f"does not follow: every token does, but {answer.wrong_end}"
    but = f", {len(answer.near_ties)} of them by a near-tie" if answer.near_ties else ""
    return f"every token follows from seed and weights: {answer.num_tokens} tokens{but}"


def _describe(mismatch: Mismatch, tokenizer: Any) -> str:
    recorded, chosen = (
        f"{token} {printable(repr(tokenizer.decode([token])))}" for token in (mismatch.token, mismatch.chosen)
    )
    margin = "a rule forbids it" if math.isinf(mismatch.margin) else f"it lost by {mismatch.margin:.3g}"
    return (
        f"token {mismatch.index + 1} is {recorded}, seed and weights choose {chosen}; {margin} "
        f"(up to {mismatch.rounding:.2g} may be rounding)"
    )
