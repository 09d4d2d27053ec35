"""The host's view of answers as they grow, and what it tells of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..call import Call
from ..ops import WeightStorage
from ..outputs import GenerateOutput, Statistics, StreamEvent, TokenLogprobs
from ..state import FULL, INVALID, RUNNING, STOPPED, Logprobs, RowReport, State
from ..streaming import BatchDecoder, StopCriterion, first_stop

if TYPE_CHECKING:
    from .step import Engine

__all__ = ["Answer", "Measurement", "event_of", "output_of", "raise_errors"]

_FINISH_REASONS = {STOPPED: "stop", FULL: "length"}


class Measurement(NamedTuple):
    """What is known of a call as a whole.

    Attributes:
        block_size: the most tokens of a step.
        seconds: since the call.
        weights: how the target's are stored.
    """

    block_size: int
    seconds: float
    weights: WeightStorage

    @classmethod
    def of(cls, engine: Engine, began: float) -> Measurement:
        """Return that of a call that began when `time.perf_counter` was ``began``."""
        return cls(engine.block_size, time.perf_counter() - began, engine.target.weights)


@dataclass
class Answer:
    """The host's view of one row's answer. On a GPU it is one step late, so that the host never waits for the step.

    Attributes:
        row: of the state.
        prompt_length: tokens of its prompt.
        num_prefilled_tokens: how many of them are run.
        filled: how many of them the caches hold.
        criteria: transformers' stop-string criteria.
        history: prompt and answer so far, for these criteria.
        length: the index of its last emitted token.
        done: RUNNING, STOPPED, FULL or INVALID; None until the prompt has been run.
        new_ids: the ids that the last report added; empty where the run does not read ids.
        accepted: how many of them were drafts.
        acceptance_lengths: the tokens that each step emitted.
        rows: per step, the rows that it verified.
        step_seconds: per step, what passed until it was read.
        time_to_first_token: seconds.
        has_grammar: one says which of its tokens are allowed.
        asked_logprobs: how many probable tokens are asked for; None for no log probabilities.
        asks_prompt_logprobs: those of the prompt's tokens too.
        logprobs: of ``new_ids``.
        prompt_logprobs: of the prompt, in the answer's first event.
        error: what went wrong with this row; empty if nothing did.
    """

    row: int
    prompt_length: int
    num_prefilled_tokens: int
    filled: int
    criteria: tuple[StopCriterion, ...] = ()
    history: list[int] = field(default_factory=list)
    length: int = 0
    done: int | None = None
    new_ids: list[int] = field(default_factory=list)
    accepted: int = 0
    acceptance_lengths: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    time_to_first_token: float = 0.0
    has_grammar: bool = False
    asked_logprobs: int | None = None
    asks_prompt_logprobs: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str = ""

    def begin(self, length: int, done: int, first: int | None, state: State) -> None:
        """Take note that the prompt has been run; ``first`` is the first token, None if the run reads no ids."""
        self.length = length
        self._note(done, 0)
        if first is not None:
            self.new_ids = [first]
            self._end_at_stop_string(state)

    def record(self, report: RowReport, reads_ids: bool, state: State) -> int:
        """Add what a step reported; return how many tokens it emitted.

        Raises:
            RuntimeError: the row, which was running, neither moved nor ended, so that the loop would not either.
        """
        emitted = report.length - self.length
        if emitted:
            self.acceptance_lengths.append(emitted)
        elif report.done == RUNNING:
            raise RuntimeError(f"a step did nothing for row {self.row}, which is running: was it launched at all?")
        self.length = report.length
        self._note(report.done, 1)
        if reads_ids:
            self.new_ids = report.choices[:emitted]
            matches = [token == draft for token, draft in zip(self.new_ids, report.drafts, strict=False)]
            self.accepted = (*matches, False).index(False)
            self._end_at_stop_string(state)
        return emitted

    def read_logprobs(self, start: int, kept: Logprobs) -> list[TokenLogprobs]:
        """Return the log probabilities of the tokens from ``start`` to the last."""
        return kept.read(self.row, start, self.length + 1, self.asked_logprobs or 0)

    def read_prompt_logprobs(self, kept: Logprobs) -> list[TokenLogprobs | None] | None:
        """Return the log probabilities of the prompt's tokens, None for the first; None if they are not asked for."""
        if not self.asks_prompt_logprobs:
            return None
        return [None, *kept.read(self.row, 1, self.prompt_length, self.asked_logprobs or 0)]

    def _note(self, done: int, ahead: int) -> None:
        self.done = done
        if done == INVALID:
            grammar = ", or the grammar and the other rules together leave no token," if self.has_grammar else ""
            self.error = f"the target's logits are NaN{grammar} in row {self.row} for position {self.length + ahead}"

    def _end_at_stop_string(self, state: State) -> None:
        """End the row if its new ids complete a stop string, after the token that did."""
        if not (self.criteria and self.new_ids):
            return
        self.history += self.new_ids
        count = first_stop(self.criteria, self.history, len(self.new_ids))
        if count is None:
            return
        # 1. The host's view
        dropped = len(self.new_ids) - count
        self.new_ids, self.accepted = self.new_ids[:count], min(self.accepted, count)
        if dropped:
            self.length -= dropped
            self.acceptance_lengths[-1] -= dropped
        self.done = STOPPED
        # 2. The device's. The features of dropped tokens go; those that the draft cache has not taken over yet stay.
        row = self.row
        drafted = state.length[row] - state.num_context[row]
        state.length[row] = self.length
        state.num_context[row] = (self.length - drafted).clamp(min=0)
        state.done[row] = STOPPED


def raise_errors(answers: Sequence[Answer]) -> None:
    """Raise ValueError if something went wrong with an answer."""
    for answer in answers:
        if answer.error:
            raise ValueError(answer.error)


def event_of(answers: Sequence[Answer], text: BatchDecoder | None, measured: Measurement) -> StreamEvent:
    """Return what a step has added to answers.

    Args:
        answers: of one call.
        text: decodes them; None without a tokenizer.
        measured: of the call.
    """
    reasons = [_FINISH_REASONS.get(answer.done) for answer in answers]
    ids, accepted = [answer.new_ids for answer in answers], [answer.accepted for answer in answers]
    pieces = None if text is None else text.push(ids, reasons)
    logprobs = [answer.logprobs for answer in answers] if answers[0].asked_logprobs is not None else None
    prompts = [answer.prompt_logprobs for answer in answers if answer.prompt_logprobs is not None] or None
    return StreamEvent(ids, accepted, pieces, reasons, _statistics(answers, measured), logprobs, prompts)


def output_of(
    answers: Sequence[Answer], call: Call, tokens: Tensor, kept: Logprobs | None, measured: Measurement
) -> GenerateOutput:
    """Return what a call returns.

    Args:
        answers: of the call, all ended.
        call: as it was resolved.
        tokens: ``[batch, capacity]``, of the state.
        kept: the log probabilities that its steps wrote; None if it asks for nothing.
        measured: of the call.
    """
    reasons = [_FINISH_REASONS[answer.done] for answer in answers]
    sequences, statistics = _sequences(answers, call, tokens), _statistics(answers, measured)
    return GenerateOutput(sequences, reasons, statistics, *_all_logprobs(answers, kept))


def _all_logprobs(
    answers: Sequence[Answer], kept: Logprobs | None
) -> tuple[list[list[TokenLogprobs]] | None, list[list[TokenLogprobs | None]] | None]:
    """Return the log probabilities of all tokens of a call's answers and of their prompts, None for what is not asked.

    Args:
        answers: of one call.
        kept: what its steps wrote; None if it asks for nothing.
    """
    if kept is None:
        return None, None
    prompts = [found for answer in answers if (found := answer.read_prompt_logprobs(kept)) is not None]
    return [answer.read_logprobs(answer.prompt_length, kept) for answer in answers], prompts or None


def _sequences(answers: Sequence[Answer], call: Call, tokens: Tensor) -> Tensor:
    """Return the prompts of a call as given, then the answers in ``tokens [batch, capacity]``, right-padded."""
    counts = [answer.length + 1 - answer.prompt_length for answer in answers]
    (batch, width), ids = call.ids.shape, call.ids
    joined = ids.new_full((batch, width + max(counts)), call.pad_token_id, dtype=tokens.dtype)
    joined[:, :width] = ids
    for row, (answer, count) in enumerate(zip(answers, counts, strict=True)):
        start = answer.prompt_length
        joined[row, width : width + count] = tokens[answer.row, start : start + count]
    return joined


def _statistics(answers: Sequence[Answer], measured: Measurement) -> Statistics:
    """Return what was measured of answers up to now."""
    longest = max(answers, key=lambda answer: len(answer.rows))  # it was running in every step of the others
    return Statistics(
        [list(answer.acceptance_lengths) for answer in answers],
        measured.block_size,
        [answer.length + 1 - answer.prompt_length for answer in answers],
        max(answer.time_to_first_token for answer in answers),
        measured.seconds,
        [answer.num_prefilled_tokens for answer in answers],
        list(longest.rows),
        list(longest.step_seconds),
        measured.weights,
    )
