"""The step for what runs on the host: grammars, and Python processors and criteria, which walk a block's rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..state import RUNNING, Block, State
from .step import Engine

__all__ = ["Walk", "host_step", "walk"]


class Walk(NamedTuple):
    """What a walk over a block's rows chose.

    Attributes:
        choices: ``[batch, rows]`` int64, those that were made: up to each row's first token that is not a draft.
        limits: ``[batch]`` int64, lower where a criterion ended the row.
        stopped: the rows that a criterion ended.
    """

    choices: Tensor
    limits: Tensor
    stopped: list[int]


@torch.no_grad()
def host_step(engine: Engine) -> None:
    """`dflash.engine.step` with grammars, or choosing on the host one token of one row at a time; waits for the device.

    A grammar's masks are made while the device runs the target.
    """
    state, masks = engine.state, engine.grammar_masks
    block = engine.proposer.propose(state)
    if masks is not None:
        masks.ask(block)
    raw = engine.target.verify(block, state)
    logits = engine.rules.apply(raw, block, state)
    if masks is not None:
        logits = masks.apply(logits)
    if engine.host_rules is None:
        chosen = (engine.acceptance.choose(logits, block, state),)
    else:
        chosen = walk(engine, block, logits, state, state.done.tolist())
    engine.note_logprobs_(raw, chosen[0])
    engine.commit_(block, *chosen)


def walk(engine: Engine, block: Block, logits: Tensor, state: State, done: list[int]) -> Walk:
    """Choose a block's tokens in order, calling processors and criteria as one-token decoding would.

    Args:
        engine: whose host rules are called, and whose keyed noise chooses.
        block: the last emitted token and drafts.
        logits: ``[batch, rows, vocab]``.
        state: whose ``length [batch]`` is the index of the last emitted token.
        done: per row, nonzero to leave it out.
    """
    rules, (batch, rows) = engine.host_rules, block.ids.shape
    positions, tokens = state.positions(rows), state.tokens.clone()
    drafts, stop = _drafts(block), list(map(set, state.stop_token_ids.tolist()))
    first, ends = positions[:, 0].tolist(), state.limits.tolist()
    choices, limits, stopped = [[0] * rows for _ in range(batch)], list(ends), []
    walking = [row for row in range(rules.rows) if done[row] == RUNNING]
    at = [0] * batch  # the block's row that each row of the batch has come to
    for j in range(rows):
        # 1. Processors, row by row, then one choice for all.
        scores = _scores(logits, block, at, j)
        for row in walking:
            scores[row] = rules.process(tokens[row : row + 1, : first[row] + j], scores[row].clone())
        chosen = engine.keyed.choose_at(scores, positions[:, j : j + 1], state)
        tokens.scatter_(1, positions[:, j : j + 1], chosen.clamp(min=0))
        # 2. Rows with a draft that equals the choice, and that nothing ends, walk on to it.
        ids, matching = chosen[:, 0].tolist(), []
        for row in walking:
            token, emitted = ids[row], first[row] + j + 1
            choices[row][at[row]] = token
            if token >= 0 and rules.stops(tokens[row : row + 1, :emitted]):
                limits[row] = emitted
                stopped.append(row)
            elif token not in stop[row] and emitted < ends[row] and (at[row], token) in drafts[row]:
                at[row] = drafts[row][at[row], token]
                matching.append(row)
        walking = matching
        if not walking:
            break
    # 3. Processors and criteria may know more than the ids (a clock): rank 0's count. Its choices are shared later.
    ranks, tensor = engine.target.ranks, block.ids.new_tensor
    lowered = ranks.share_(tensor(limits))
    return Walk(tensor(choices), lowered, ranks.share_rows(stopped, lowered))


def _scores(logits: Tensor, block: Block, at: list[int], j: int) -> Tensor:
    """Return a copy ``[batch, 1, vocab]`` in float32 of the logits at the block's rows ``at``; of a chain at row j."""
    if block.tree is None:  # a slice, where lists of indices are tensors that are sent to the device
        return logits[:, j : j + 1].to(torch.float32, copy=True)
    return logits[range(len(at)), at][:, None].float()


def _drafts(block: Block) -> list[dict[tuple[int, int], int]]:
    """Return, per row of the batch, which row of the block continues a row with a token: ``(row, token) -> row``.

    As in `dflash.ops.accept_path_`, the first of several siblings with one id counts.
    """
    ids, rows = block.ids.tolist(), block.ids.shape[1]
    parents = [range(-1, rows - 1)] * len(ids) if block.tree is None else block.tree.parents.tolist()
    return [
        {(parent[row], token[row]): row for row in reversed(range(rows)) if parent[row] >= 0}
        for parent, token in zip(parents, ids, strict=True)
    ]
