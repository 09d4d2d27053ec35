"""The state of a running batch: tensors whose addresses never change, and what a step reports of them to the host.

The invariant between steps, per row, with ``s = length``:

- ``tokens[: s + 1]`` are emitted, and ``tokens[s]`` is the anchor, the first row of the next block.
- The target's cache covers positions ``0 .. s - 1``, the drafter's ``0 .. s - num_context - 1``, and ``context`` holds
  the target's features of the ``num_context`` positions after that.
- Slots beyond are stale and never read. Trimming a cache is therefore nothing but lowering this counter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..cache import KVCache
from ..drafter import Drafter
from ..proposers import TREE_SIZES, Block
from ..sampling import Sampling
from ..targets import Target

__all__ = ["FULL", "INVALID", "RUNNING", "STOPPED", "Report", "RowReport", "State"]

RUNNING, STOPPED, FULL, INVALID = ops.ROW_STATES
"""Values of ``done``: running; a stop token, string or criterion; the limit is reached; the target's logits are NaN."""

_NO_TOKEN = -2  # pads the stop list: no token and no placeholder has this id
_STOP_SLOTS = 8
_SCALE = 2**20  # of the real numbers in a report


class RowReport(NamedTuple):
    """What a step says of one row.

    Attributes:
        length: index of the last emitted token.
        done: RUNNING, STOPPED, FULL or INVALID.
        choices: the target's choices after the rows of a chain, or along the accepted path of a tree, then -1.
        drafts: the proposals at the same places; -1 for none.
        expected: of a tree, the tokens that the drafter expects a step to emit at each size in `TREE_SIZES`.
    """

    length: int
    done: int
    choices: list[int]
    drafts: list[int]
    expected: list[float]


class Report:
    """One int64 tensor that a step writes and the host reads, both in this class.

    Its columns: ``length``, ``done``, ``rows`` choices, ``rows`` ids of the block, then what a tree expects.

    Args:
        batch: rows of the batch.
        rows: rows of a chain.
        sizes: sizes that a tree is told about; 0 where only chains are proposed.
        device: of the tensor.
    """

    def __init__(self, batch: int, rows: int, sizes: int, device: torch.device) -> None:
        self.tensor = torch.zeros(batch, 2 + 2 * rows + sizes, dtype=torch.int64, device=device)
        self._rows, self._nothing = rows, self.tensor.new_zeros(batch, sizes)
        self._missing = self.tensor.new_full((batch, rows), -1)

    def write_(
        self, length: Tensor, done: Tensor, choices: Tensor, block: Tensor, expected: Tensor | None = None
    ) -> None:
        """Pack ``length``, ``done`` (``[batch]``), ``choices`` and ``block`` (``[batch, at most rows]``).

        Args:
            length: as in `State`, as is ``done``.
            done: see there.
            choices: as in `RowReport`.
            block: the anchor, then the proposals for the first ``rows - 1`` choices.
            expected: ``[batch, sizes]`` float32; None for a chain.
        """
        tail = self._nothing if expected is None else (expected * _SCALE).long()
        missing = self._missing[:, choices.shape[1] :]  # of a chain that is narrower than the state's
        torch.cat([length[:, None], done[:, None], choices, missing, block, missing, tail], 1, out=self.tensor)

    def read(self, values: list[list[int]]) -> list[RowReport]:
        """Unpack the tensor's values, a list per row."""
        reports, rows = [], self._rows
        for length, done, *rest in values:
            expected = [value / _SCALE for value in rest[2 * rows :]]
            reports.append(RowReport(length, done, rest[:rows], rest[rows + 1 : 2 * rows], expected))
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
        stop_token_ids: ``[batch, slots]`` int64, padded with an id that no token has.
        block: ``[batch, rows]`` int64, the anchor and the proposals of the last chain, or those of the last tree that
            equal the choices along its accepted path; -1 for none.
        offsets: ``[rows]`` int64: 1, 2, ...
        context: ``[batch, rows, taps * hidden]``, the target's features of the last chain, or of the path that was
            accepted of the last tree; 0 columns without a drafter.
        tree_features: ``[batch * tree_rows * taps * hidden]``, the target's features of the last tree.
        tree_path: ``[batch, rows]`` int64, the path that was accepted of the last tree.
        tree_choices: ``[batch, rows]`` int64, the target's choices along that path.
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
    tree_features: Tensor
    tree_path: Tensor
    tree_choices: Tensor
    sampling: Sampling
    target_cache: KVCache
    draft_cache: KVCache | None
    report: Report

    @classmethod
    def create(
        cls, target: Target, draft: Drafter | None, batch: int, max_length: int, block_size: int, tree_rows: int = 0
    ) -> State:
        """Return the state of ``batch`` rows of ``max_length`` tokens; every row is done.

        Args:
            target: the target.
            draft: the drafter, or None.
            batch: rows of the batch.
            max_length: tokens that a row may hold.
            block_size: rows of a chain.
            tree_rows: the most rows of a tree; 0 for chains only.
        """
        device, capacity = target.device, max_length + max(block_size, tree_rows)  # a block may look past the end

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
            stop_token_ids=zeros(batch, _STOP_SLOTS) + _NO_TOKEN,
            block=zeros(batch, block_size),
            offsets=torch.arange(1, block_size + 1, device=device),
            context=torch.zeros(batch, block_size, width, dtype=target.dtype, device=device),
            tree_features=torch.zeros(batch * tree_rows * width, dtype=target.dtype, device=device),
            tree_path=zeros(batch, block_size),
            tree_choices=zeros(batch, block_size),
            sampling=Sampling.create(batch, device),
            target_cache=target.new_cache(batch, capacity, block_size),
            draft_cache=None if draft is None else draft.new_cache(batch, capacity),
            report=Report(batch, block_size, len(TREE_SIZES) if tree_rows else 0, device),
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

    def features(self, block: Block) -> Tensor:
        """Return ``[batch, rows, taps * hidden]``, where the target's features of a block's rows are written."""
        if block.tree is None:
            rows = block.ids.shape[1]
            return self.context if rows == self.context.shape[1] else self.context[:, :rows]
        shape = *block.ids.shape, self.context.shape[2]
        return self.tree_features[: math.prod(shape)].view(shape)  # contiguous whatever the rows

    def vacate_(self, rows: slice) -> None:
        """Forget what ``rows`` hold, so that a step does least for them."""
        self.length[rows], self.num_context[rows], self.done[rows] = 0, 0, FULL

    def set_stop_token_ids(self, row: int, ids: list[int]) -> None:
        """Write the ids that end a row; a list that is longer than ever before moves the tensor."""
        batch, slots = self.stop_token_ids.shape
        if len(ids) > slots:
            wider = -(-len(ids) // _STOP_SLOTS) * _STOP_SLOTS
            filler = self.stop_token_ids.new_full((batch, wider - slots), _NO_TOKEN)
            self.stop_token_ids = torch.cat([self.stop_token_ids, filler], 1)
        padded = [*ids, *[_NO_TOKEN] * (self.stop_token_ids.shape[1] - len(ids))]
        self.stop_token_ids[row] = torch.tensor(padded, dtype=torch.int64, device="cpu")
