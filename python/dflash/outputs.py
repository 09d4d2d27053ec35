"""Results of calls: sequences, stream events and statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from .settings import WeightStorage

if TYPE_CHECKING:
    from .call import Call


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one position, by the target's own logits in float32.

    Rules, temperature and filters do not change them, as in vLLM's ``raw_logprobs``.

    Attributes:
        logprob: of the token that stands there.
        top_ids: the most probable tokens, best first, of equal ones the lower id first; at most ``logprobs`` of them.
        top_logprobs: theirs.
    """

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True)
class Statistics:
    """Measurements of one call of ``generate``.

    Attributes:
        acceptance_lengths: per row, the tokens that each step emitted, bonus token counted (1 .. block_size). The first
            new token of a row comes from the prompt's forward pass and belongs to no step.
        block_size: the most tokens of a step.
        num_new_tokens: per row, tokens emitted.
        time_to_first_token: seconds from the call to the first token of every row.
        seconds: seconds from the call to the last token; in a running call, to now.
        num_prefilled_tokens: per row, prompt tokens that were run; the others were still in the caches of the call
            before (see `dflash.Generator`).
        rows: per step, the rows per prompt that the target verified: ``block_size``, the tree's, or the choice of
            ``block_size="auto"``.
        step_seconds: seconds per step. On a GPU, where steps are read late, only their mean is right.
        weights: how the target's weights were stored, as in `dflash.Generator`.
    """

    acceptance_lengths: list[list[int]]
    block_size: int
    num_new_tokens: list[int]
    time_to_first_token: float
    seconds: float
    num_prefilled_tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    weights: WeightStorage = None

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step, bonus token counted; NaN if no step ran."""
        steps = self._steps
        return sum(steps) / len(steps) if steps else float("nan")

    @property
    def histogram(self) -> list[int]:
        """``histogram[m]`` steps emitted ``m`` tokens, ``m = 0 .. block_size``."""
        steps = self._steps
        return [steps.count(length) for length in range(self.block_size + 1)]

    @property
    def acceptance_per_position(self) -> list[float]:
        """Share of the steps that accepted drafted token ``j + 1``, ``j = 0 .. block_size - 2``."""
        steps = self._steps
        return [sum(length > j + 1 for length in steps) / max(len(steps), 1) for j in range(self.block_size - 1)]

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows divided by ``seconds``, the prompt's forward pass included."""
        return sum(self.num_new_tokens) / self.seconds

    @property
    def _steps(self) -> list[int]:
        return [length for row in self.acceptance_lengths for length in row]


@dataclass(frozen=True)
class GenerateOutput:
    """Result of ``generate`` with ``return_dict_in_generate=True``.

    Attributes:
        sequences: ``[batch, prompt + longest answer]`` int64, the prompt as given, right-padded with the pad id.
        finish_reasons: per row ``"stop"`` (a stop token, a stop string or a criterion ended it) or ``"length"``.
        statistics: see `Statistics`.
        logprobs: per row, one `TokenLogprobs` per new token; None unless ``logprobs`` was given.
        prompt_logprobs: per row, one per token of its prompt, without padding, and None for the first, which nothing
            predicts; None unless ``prompt_logprobs`` was given.
    """

    sequences: Tensor
    finish_reasons: list[str]
    statistics: Statistics
    logprobs: list[list[TokenLogprobs]] | None = None
    prompt_logprobs: list[list[TokenLogprobs | None]] | None = None


class FinishedAnswer(NamedTuple):
    """Finished answer with the target's features and logits, for ``Generator(on_answer=...)``.

    The tensors are views that the next prompt in this row overwrites: copy them to keep them.

    Attributes:
        call: prompt and settings, a `dflash.call.Call`.
        seed: of the row's noise.
        finish_reason: ``"stop"`` or ``"length"``.
        ids: ``[n]`` int64, the prompt, then the answer.
        prompt_length: tokens of the prompt.
        acceptance_lengths: the tokens that each step emitted.
        features: ``[n - 1, taps * hidden]`` in the target's dtype: its hidden states at the tapped layers, for
            all tokens except the last, which no pass has read.
        top_ids: ``[n - prompt_length, 16]`` int64, the target's best tokens at each place of the answer.
        top_logits: like ``top_ids``, float32: their logits, before rules, temperature and filters.
    """

    call: Call
    seed: int
    finish_reason: str
    ids: Tensor
    prompt_length: int
    acceptance_lengths: list[int]
    features: Tensor
    top_ids: Tensor
    top_logits: Tensor


@dataclass(frozen=True)
class StreamEvent:
    """New tokens of one step of a call; the first event is the prompt's, with each row's first token.

    Attributes:
        ids: per row, the new token ids; empty for a row that has finished.
        accepted: per row, how many of them, counted from the first, were drafted and accepted. The one after them, if
            there is one, is the bonus token, which the target chose itself.
        text: per row, the text that became final; None without a tokenizer. It never ends inside a character or inside
            a text that may become a stop string. The row's last event completes it: all pieces joined are
            ``tokenizer.decode(answer)``.
        finish_reasons: per row, ``"stop"`` or ``"length"`` from the event of its last token on; None while it runs.
        statistics: the call so far.
        logprobs: per row, one `TokenLogprobs` per new token; None unless ``logprobs`` was given.
        prompt_logprobs: in the first event, as in `GenerateOutput`; None in the others.
    """

    ids: list[list[int]]
    accepted: list[int]
    text: list[str] | None
    finish_reasons: list[str | None]
    statistics: Statistics
    logprobs: list[list[TokenLogprobs]] | None = None
    prompt_logprobs: list[list[TokenLogprobs | None]] | None = None


def mean_acceptance(statistics: Statistics) -> float | None:
    """Return the mean tokens per step, bonus token counted; None when no step ran."""
    return statistics.acceptance_length if any(statistics.acceptance_lengths) else None
