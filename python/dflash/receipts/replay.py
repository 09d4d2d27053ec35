"""Run a target over recorded answers, and find the tokens that it would not have chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..call import Call
from ..engine import RUNNING, Engine, Prefill, State
from ..proposers import Block
from .mismatch import Mismatch, Place, find_mismatch
from .receipt import Answer

__all__ = ["mismatches_of"]

_NOTHING = -1  # pads answers; no token has this id


def mismatches_of(
    engine: Engine, call: Call, answers: Sequence[Answer], chunk: int
) -> Generator[None, None, list[list[Mismatch]]]:
    """Find each answer's tokens that are not the target's choice, up to the first that is no near-tie.

    Every choice is made after the recorded tokens before it.

    Args:
        engine: without a drafter; with at least a row per answer, and room for prompt and answer.
        call: that the answers belong to.
        answers: the recorded ones.
        chunk: prompt tokens per pass.

    Yields:
        After each pass of the target.

    Returns:
        The mismatches, per answer.

    Raises:
        ValueError: the target's logits are NaN.
    """
    # 1. The prompts, whose last row chooses the first token.
    engine.agree(call, chunk, False)
    engine.refresh()
    engine.configure(call)
    limits = [len(prompt) + call.max_new_tokens for prompt in call.prompts]
    nothing = [0] * len(answers)
    prompts = Prefill(engine, call.prompts, limits, nothing, chunk=chunk, snapshot=False)
    while not prompts.is_complete:
        prompts.run_chunk()
        yield
    state, rows, idle = engine.state, engine.block_size, engine.batch_size - len(answers)
    if engine.grammar_masks is not None:
        state.done.fill_(RUNNING)  # masks are made for rows that run
    prompt = dataclasses.replace(state, length=(state.length - 1).clamp(min=0))
    search = _Search(engine, answers, call.stop_token_ids)
    search.compare(Block(prompt.anchor), functional.pad(prompts.ends, (0, 0, 0, 0, 0, idle)), prompt, 0)
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
    """What was found so far, per answer; an answer is done with its first mismatch that is no near-tie.

    Nothing is chosen after a stop token: a grammar allows none there. That an answer goes on is its wrong end.
    """

    def __init__(self, engine: Engine, answers: Sequence[Answer], stop: Sequence[int]) -> None:
        self._engine = engine
        ends = [next((end for end, token in enumerate(a.ids, 1) if token in stop), None) for a in answers]
        self._chosen = [answer.ids[:end] for answer, end in zip(answers, ends, strict=True)]
        self.found: list[list[Mismatch]] = [[] for _ in answers]

    @property
    def is_over(self) -> bool:
        """True once every answer is done."""
        return all(self._is_done(row) for row in range(len(self.found)))

    def _is_done(self, row: int) -> bool:
        return bool(self.found[row]) and not self.found[row][-1].is_near_tie

    def compare(self, block: Block, logits: Tensor, state: State, first: int) -> None:
        """Compare the target's choices after each row of a block with the tokens ``first ..`` of the answers."""
        engine = self._engine
        raw, logits = logits, engine.rules.apply(logits, block, state)
        if engine.grammar_masks is not None:
            logits = engine.grammar_masks.apply(logits)
        choices = engine.target.ranks.share_(engine.keyed.choose(logits, block, state))
        positions, chosen = state.chosen_positions(block), choices.tolist()
        for row, ids in enumerate(self._chosen):
            for index, token in enumerate(ids[first : first + len(chosen[row])]):
                if chosen[row][index] == token or self._is_done(row):
                    continue
                if chosen[row][index] < 0:
                    raise ValueError(f"the target's logits are NaN in answer {row + 1} for token {first + index + 1}")
                place = Place(
                    raw[row, index], logits[row, index], positions[row, index], state.sampling.row(row),
                    engine.target.dtype,
                )  # fmt: skip
                self.found[row].append(find_mismatch(place, first + index, token, chosen[row][index]))
