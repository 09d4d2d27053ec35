"""Whether a recorded answer ends where generation would have ended it."""

from __future__ import annotations

from collections.abc import Sequence

from ..streaming import StopCriterion, first_stop
from .receipt import Answer
from .settings import Settings

__all__ = ["wrong_end"]

_AT_ONCE = 512  # tokens that a stop-string criterion is asked about


def wrong_end(answer: Answer, settings: Settings, criteria: Sequence[StopCriterion]) -> str:
    """Return why an answer cannot end where it does; empty if it can.

    Args:
        answer: the recorded one.
        settings: of its call.
        criteria: transformers' criterion for the stop strings, if there are any.
    """
    count = len(answer.ids)
    if count > settings.max_new_tokens:
        return f"it has {count} tokens, and max_new_tokens is {settings.max_new_tokens}"
    stop = set(settings.stop_token_ids)
    ends = [next((index for index, token in enumerate(answer.ids, 1) if token in stop), None)]
    ends.append(_string_end(answer, criteria))
    end = min((end for end in ends if end is not None), default=None)
    if end is not None and end < count:
        return f"it has {count} tokens, and token {end} ends it"
    if end is None and count < settings.max_new_tokens:
        return f"it ends after {count} tokens, and nothing ends it before max_new_tokens, {settings.max_new_tokens}"
    reason = "length" if end is None else "stop"
    if reason != answer.finish_reason:
        return f'its finish_reason is "{answer.finish_reason}", and it ends by "{reason}"'
    return ""


def _string_end(answer: Answer, criteria: Sequence[StopCriterion]) -> int | None:
    """Return after how many tokens a stop string is complete; None if never."""
    if not criteria:
        return None
    width = max(criterion.maximum_token_len for criterion in criteria)
    history = [*answer.prompt, *answer.ids]
    for start in range(0, len(answer.ids), _AT_ONCE):
        new = min(_AT_ONCE, len(answer.ids) - start)
        end = len(answer.prompt) + start + new
        found = first_stop(criteria, history[max(0, end - new - width) : end], new)
        if found is not None:
            return start + found
    return None
