"""Run a target over recorded answers, and find what it would not have written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..call import Call
from ..engine import Engine, Prefill
from ..sampling import Sampling
from ..state import RUNNING, Block, State
from ..streaming import StopCriterion, first_stop
from .receipt import RecordedAnswer, RecordedSettings

# Two ways to sum the same numbers differ by about this share of the logits: two units in the last place of the 16-bit
# types, and in float32, where only sums are rounded, what a few layers make of them.
_ROUNDING = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2**-16}
_LARGEST_MARGIN, _HALVINGS = 1024.0, 40
_AT_ONCE = 512  # tokens that a stop-string criterion is asked about
_NOTHING = -1  # pads answers; no token has this id


@dataclass(frozen=True)
class Mismatch:
    """A recorded token that is not the target's choice.

    Attributes:
        index: of the token in the answer, from 0.
        token: the recorded id.
        chosen: the id that seed and weights choose there.
        margin: how much one logit would have to change for the recorded token to be chosen: its own upward, or that of
            the chosen one downward. Infinite if a rule forbids the token.
        rounding: margins up to this may come from rounding.
    """

    index: int
    token: int
    chosen: int
    margin: float
    rounding: float

    @property
    def is_near_tie(self) -> bool:
        """True if another order of sums may choose the recorded token."""
        return self.margin <= self.rounding


def find_mismatch(
    raw: Tensor,
    logits: Tensor,
    position: Tensor,
    sampling: Sampling,
    rounding: float,
    index: int,
    pair: tuple[int, int],
) -> Mismatch:
    """Measure by how much a recorded token lost against the chosen one.

    Args:
        raw: ``[vocab]``, the target's own logits.
        logits: ``[vocab]``, rules applied.
        position: ``[]`` int64, of the token.
        sampling: of this row only.
        rounding: share of the logits that rounding may change.
        index: of the token in the answer.
        pair: the recorded id and the chosen one.
    """
    token, chosen = pair
    if token >= len(logits):  # ids that the embedding table has and the head has not
        return Mismatch(index, token, chosen, math.inf, 0.0)
    logits, one = logits.float(), torch.ones(1, dtype=torch.float32, device=logits.device)

    def wins(changed_token: int, change: float) -> bool:
        changed = logits.clone()
        changed[changed_token] += change
        return int(sampling.select(changed[None, None], position.reshape(1, 1), one)) == token

    margin = min(_least(lambda change: wins(token, change)), _least(lambda change: wins(chosen, -change)))
    # A bias is added to what was rounded, however large it is.
    largest = float(torch.minimum(raw.float().abs(), logits.abs())[[token, chosen]].nan_to_num(posinf=0.0).max())
    return Mismatch(index, token, chosen, margin, rounding * max(1.0, largest))


def _least(is_enough: Callable[[float], bool]) -> float:
    """Return the least change that is enough, by bisection; infinity if none is."""
    low, high = 0.0, _LARGEST_MARGIN
    if not is_enough(high):
        return math.inf
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def wrong_end(answer: RecordedAnswer, settings: RecordedSettings, criteria: Sequence[StopCriterion]) -> str:
    """Return why an answer cannot end where it does; empty if it can. ``criteria`` look for stop strings."""
    count = len(answer.ids)
    if count > settings.max_new_tokens:
        return f"it has {count} tokens, and max_new_tokens is {settings.max_new_tokens}"
    stop, ends = {*settings.stop_token_ids}, [_stop_string_end(answer, criteria)] if criteria else []
    ends += [index for index, token in enumerate(answer.ids, 1) if token in stop][:1]
    end = min((end for end in ends if end is not None), default=None)
    if end is not None and end < count:
        return f"it has {count} tokens, and token {end} ends it"
    if end is None and count < settings.max_new_tokens:
        return f"it ends after {count} tokens, and nothing ends it before max_new_tokens, {settings.max_new_tokens}"
    reason = "length" if end is None else "stop"
    if reason != answer.finish_reason:
        return f'its finish_reason is "{answer.finish_reason}", and it ends by "{reason}"'
    return ""


def _stop_string_end(answer: RecordedAnswer, criteria: Sequence[StopCriterion]) -> int | None:
    """Return after how many tokens a stop string is complete; None if never."""
    width = max(criterion.maximum_token_len for criterion in criteria)
    history = [*answer.prompt, *answer.ids]
    for start in range(0, len(answer.ids), _AT_ONCE):
        new = min(_AT_ONCE, len(answer.ids) - start)
        end = len(answer.prompt) + start + new
        found = first_stop(criteria, history[max(0, end - new - width) : end], new)
        if found is not None:
            return start + found
    return None


def mismatches_of(
    engine: Engine, call: Call, answers: Sequence[RecordedAnswer], chunk: int
) -> Generator[None, None, list[list[Mismatch]]]:
    """Find each answer's tokens that are not the target's choice, up to the first that is not a near-tie.

    Every choice is made after the recorded tokens before it. Yields after each pass of the target.

    Args:
        engine: without a drafter; with at least a row per answer, and room for prompt and answer.
        call: that the answers belong to.
        answers: the recorded ones.
        chunk: prompt tokens per pass.
    """
    # 1. The prompts, whose last row chooses the first token.
    engine.agrees_to_reuse(call, chunk, False)
    engine.refresh()
    engine.configure(call)
    nothing = [0] * len(answers)
    prompts = Prefill(engine, call.prompts, call.max_new_tokens, nothing, chunk=chunk, snapshot=False)
    while prompts.chunks:
        prompts.run_chunk()
        yield
    state, rows = engine.state, engine.block_size
    if engine.grammar_masks is not None:
        state.done.fill_(RUNNING)  # masks are made for rows that run
    prompt = dataclasses.replace(state, length=(state.length - 1).clamp(min=0))
    search = _Search(engine, answers, call.stop_token_ids)
    search.compare(Block(prompt.anchor), prompts.ends, prompt, 0)
    # 2. The answers, a block of recorded tokens at a time: row j chooses the token after its own.
    longest = max(len(answer.ids) for answer in answers)
    ids = torch.full((engine.batch_size, longest + rows), _NOTHING, dtype=torch.int64, device="cpu")
    for row, answer in enumerate(answers):
        ids[row, : len(answer.ids)] = torch.tensor(answer.ids, dtype=torch.int64, device="cpu")
    ids = ids.to(engine.target.device)
    for row, answer in enumerate(answers):
        start, count = len(answer.prompt), len(answer.ids)
        state.tokens[row, start : start + count] = ids[row, :count]
    for start in range(0, longest - 1, rows):
        if search.is_over:
            break
        block = Block(ids[:, start : start + rows])
        if engine.grammar_masks is not None:
            engine.grammar_masks.ask(block)
        search.compare(block, engine.target.verify(block, state), state, start + 1)
        state.length.add_(rows)
        state.num_context.fill_(rows)
        state.target_cache.commit_(state.length, state.num_context)
        yield
    return search.found


class _Search:
    """The mismatches found so far, per answer; an answer is done with its first that is not a near-tie.

    Nothing is compared after a stop token, since a grammar allows nothing there; `wrong_end` reports such an answer.
    """

    def __init__(self, engine: Engine, answers: Sequence[RecordedAnswer], stop: Sequence[int]) -> None:
        self._engine, self._rounding = engine, _ROUNDING.get(engine.target.dtype, 0.0)
        ends = [next((end for end, token in enumerate(a.ids, 1) if token in stop), None) for a in answers]
        self._recorded = [answer.ids[:end] for answer, end in zip(answers, ends, strict=True)]
        self.found: list[list[Mismatch]] = [[] for _ in answers]

    @property
    def is_over(self) -> bool:
        """True once every answer is done."""
        return all(map(self._is_done, range(len(self.found))))

    def _is_done(self, row: int) -> bool:
        return bool(self.found[row]) and not self.found[row][-1].is_near_tie

    def compare(self, block: Block, raw: Tensor, state: State, first: int) -> None:
        """Compare the target's choices after each row of a block with the tokens ``first ..`` of the answers."""
        engine = self._engine
        logits = engine.rules.apply(raw, block, state)
        if engine.grammar_masks is not None:
            logits = engine.grammar_masks.apply(logits)
        choices = engine.target.ranks.share_(engine.keyed.choose(logits, block, state)).tolist()
        positions = state.chosen_positions(block)
        for row, ids in enumerate(self._recorded):
            for index, (token, chosen) in enumerate(zip(ids[first:], choices[row], strict=False)):
                if chosen == token or self._is_done(row):
                    continue
                if chosen < 0:
                    raise ValueError(f"the target's logits are NaN in answer {row + 1} for token {first + index + 1}")
                sampling = state.sampling.rows(slice(row, row + 1))
                mismatch = find_mismatch(
                    raw[row, index], logits[row, index], positions[row, index], sampling,
                    self._rounding, first + index, (token, chosen),
                )  # fmt: skip
                self.found[row].append(mismatch)
