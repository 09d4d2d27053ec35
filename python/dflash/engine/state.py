"""The state of a running batch: tensors whose addresses never change, and what a step reports of them to the host.

The invariant between steps, per row, with ``s = length``:

- ``tokens[: s + 1]`` are emitted, and ``tokens[s]`` is the anchor, the first row of the next block.
- The target's cache covers positions ``0 .. s - 1``, the drafter's ``0 .. s - num_context - 1``, and ``context`` holds
  the target's features of the ``num_context`` positions after that.
- Slots beyond are stale and never read. Trimming a cache is therefore nothing but lowering this counter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..cache import KVCache
from ..drafter import Drafter
from ..proposers import Block
from ..sampling import Sampling
from ..target import Target

__all__ = ["FULL", "INVALID", "RUNNING", "STOPPED", "Report", "RowReport", "State"]

RUNNING, STOPPED, FULL, INVALID = ops.ROW_STATES
"""Values of ``done``: running; a stop token, string or criterion; the limit is reached; the target's logits are NaN."""

_NO_TOKEN = -2  # pads the stop list: no token and no placeholder has this id
_STOP_SLOTS = 8


class RowReport(NamedTuple):
    """What a step says of one row.

    Attributes:
        length: index of the last emitted token.
        done: RUNNING, STOPPED, FULL or INVALID.
        choices: the target's choices after each row of the block.
        drafts: the proposals of the block; -1 for none.
    """

    length: int
    done: int
    choices: list[int]
    drafts: list[int]


class Report:
    """One int64 tensor ``[batch, 2 + 2 * rows]`` that a step writes and the host reads, both in this class.

    Args:
        batch: rows of the batch.
        rows: rows of a block.
        device: of the tensor.
    """

    def __init__(self, batch: int, rows: int, device: torch.device) -> None:
        self.tensor = torch.zeros(batch, 2 + 2 * rows, dtype=torch.int64, device=device)

    def write_(self, length: Tensor, done: Tensor, choices: Tensor, block: Tensor) -> None:
        """Pack ``length``, ``done`` (``[batch]``), ``choices`` and ``block`` (``[batch, rows]``)."""
        torch.cat([length[:, None], done[:, None], choices, block], 1, out=self.tensor)

    @staticmethod
    def read(values: list[list[int]]) -> list[RowReport]:
        """Unpack the tensor's values, a list per row."""
        reports = []
        for length, done, *ids in values:
            rows = len(ids) // 2
            reports.append(RowReport(length, done, ids[:rows], ids[rows + 1 :]))
        return reports


@dataclass
class State:
    """Everything that a step reads and writes; see the invariant above.

    Attributes:
        tokens: ``[batch, capacity]`` int64.
        length: ``[batch]`` int64.
        num_context: ``[batch]`` int64, how many tokens the last step emitted.
        done: ``[batch]`` int64: RUNNING, STOPPED, FULL or INVALID.
        limits: ``[batch]`` int64, the tokens that a row may hold in all.
        prompt_length: ``[batch]`` int64.
        stop_token_ids: ``[slots]`` int64, padded with an id that no token has.
        block: ``[batch, rows]`` int64, the anchor and the proposals of the last step.
        offsets: ``[rows]`` int64: 1, 2, ...
        context: ``[batch, rows, taps * hidden]``, the target's features of the last block; 0 columns without a drafter.
        sampling: how each row samples.
        target_cache: of the target.
        draft_cache: of the drafter; None without one.
        report: what the host reads of a step.
    """

    tokens: Tensor
    length: Tensor
    num_context: Tensor
    done: Tensor
    limits: Tensor
    prompt_length: Tensor
    stop_token_ids: Tensor
    block: Tensor
    offsets: Tensor
    context: Tensor
    sampling: Sampling
    target_cache: KVCache
    draft_cache: KVCache | None
    report: Report

    @classmethod
    def create(cls, target: Target, draft: Drafter | None, batch: int, max_length: int, block_size: int) -> State:
        """Return the state of ``batch`` rows of ``max_length`` tokens; every row is done."""
        device, capacity = target.device, max_length + block_size  # the last block may look past the end

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        width = 0 if draft is None else len(draft.config.target_layer_ids) * draft.config.hidden_size
        return cls(
            tokens=zeros(batch, capacity),
            length=zeros(batch),
            num_context=zeros(batch),
            done=zeros(batch) + FULL,
            limits=zeros(batch),
            prompt_length=zeros(batch),
            stop_token_ids=zeros(_STOP_SLOTS) + _NO_TOKEN,
            block=zeros(batch, block_size),
            offsets=torch.arange(1, block_size + 1, device=device),
            context=torch.zeros(batch, block_size, width, dtype=target.dtype, device=device),
            sampling=Sampling.create(batch, device),
            target_cache=target.new_cache(batch, capacity, block_size),
            draft_cache=None if draft is None else draft.new_cache(batch, capacity),
            report=Report(batch, block_size, device),
        )

    @property
    def anchor(self) -> Tensor:
        """``[batch, 1]`` int64, each row's last emitted token."""
        return self.tokens.gather(1, self.length[:, None])

    def positions(self, rows: int) -> Tensor:
        """Return ``[batch, rows]`` int64, the positions after the anchor's."""
        return self.length[:, None] + self.offsets[:rows]

    def chosen_positions(self, block: Block) -> Tensor:
        """Return ``[batch, rows]`` int64, the positions of the tokens that a block's rows choose."""
        if block.tree is None:
            return self.positions(block.ids.shape[1])
        return (self.length + 1)[:, None] + block.tree.depth

    def set_stop_token_ids(self, ids: list[int]) -> None:
        """Write the ids that end a row; a list that is longer than ever before moves the tensor."""
        if len(ids) > len(self.stop_token_ids):
            slots = -(-len(ids) // _STOP_SLOTS) * _STOP_SLOTS
            self.stop_token_ids = self.stop_token_ids.new_full((slots,), _NO_TOKEN)
        self.stop_token_ids.fill_(_NO_TOKEN)
        if ids:
            self.stop_token_ids[: len(ids)] = torch.tensor(ids, dtype=torch.int64, device=self.stop_token_ids.device)
