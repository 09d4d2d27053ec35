"""Records that the parts of a step share: the state of a running batch, the block it verifies, what the host reads.

The invariant between steps, per row, with ``s = length``:

- ``tokens[: s + 1]`` are emitted: committed for good. ``tokens[s]`` is the anchor, the first row of the next block.
- The target's cache covers positions ``0 .. s - 1``, the drafter's ``0 .. s - num_context - 1`` or the last of these,
  and ``context`` holds the target's features of the ``num_context`` positions after that.
- Slots beyond are stale and never read. Trimming a cache only means lowering this counter.
"""

from __future__ import annotations

import contextlib
import copy
import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import ops
from .outputs import TokenLogprobs
from .sampling import Sampling

if TYPE_CHECKING:
    from .drafter import Drafter, MtpHead
    from .history import FeatureHistory
    from .targets import Target

RUNNING, STOPPED, FULL, INVALID = ops.ROW_STATES
"""Values of ``done``: running; a stop token, string or criterion; the limit is reached; the target's logits are NaN."""

TREE_SIZES = (8, 16, 32, 64, 128)
"""Rows of a tree among which ``tree="auto"`` chooses, beside steps without drafts."""

_NO_TOKEN = -2  # pads the stop list: no token and no placeholder has this id
_STOP_SLOTS = 8
_SCALE = 2**20  # of the real numbers in a report
_PROMPT_ROWS = 64  # rows of a prompt whose logits are held in float32 at once


class Tree(NamedTuple):
    """Which rows of a block each row continues. Row 0 is the anchor, and parents come before their children.

    Row ``i`` takes slot ``length + i`` of the cache and stands at position ``length + depth[i]``. A row that is missing
    has parent -1, depth 0 and only its own bit.

    Attributes:
        parents: ``[batch, rows]`` int64, -1 for the anchor.
        depth: ``[batch, rows]`` int64, each row's distance from the anchor.
        ancestors: ``[batch, rows, ceil(rows / 64)]`` int64: bit ``j % 64`` of word ``j // 64`` is set for the row
            itself and for all rows on its path from the anchor, which is one of them.
    """

    parents: Tensor
    depth: Tensor
    ancestors: Tensor

    @property
    def visible(self) -> Tensor:
        """``[batch, rows, rows]`` bool: the rows on each row's path, the row itself and the anchor included."""
        rows = torch.arange(self.depth.shape[1], device=self.depth.device)
        return (self.ancestors[..., rows // 64] >> rows % 64) & 1 == 1


class Block(NamedTuple):
    """The rows that one step verifies: the anchor, then proposals for the positions after it.

    Attributes:
        ids: ``[batch, rows]`` int64; -1 where nothing is proposed.
        tree: which row continues which; None for a chain: each row continues the one before it.
        is_checked: the drafts keep to the rows' grammars, whose masks are made already.
        waits: there is one row, and its features wait with those before it until the drafter takes all of them up.
    """

    ids: Tensor
    tree: Tree | None = None
    is_checked: bool = False
    waits: bool = False

    @property
    def input_ids(self) -> Tensor:
        """``[batch, rows]`` int64: ids that can be embedded, 0 where nothing is proposed."""
        return self.ids.clamp(min=0)


class RowReport(NamedTuple):
    """Report of a step on one row of the batch.

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

    Its columns: ``length``, ``done``, ``rows`` choices, ``rows`` ids of the block, then ``sizes`` numbers that a tree
    expects (0 where only chains are proposed).
    """

    def __init__(self, batch: int, rows: int, sizes: int, device: torch.device) -> None:
        self.tensor = torch.zeros(batch, 2 + 2 * rows + sizes, dtype=torch.int64, device=device)
        self._rows, self._nothing = rows, self.tensor.new_zeros(batch, sizes)
        self._missing = self.tensor.new_full((batch, rows), -1)

    def write_(
        self, length: Tensor, done: Tensor, choices: Tensor, block: Tensor, expected: Tensor | None = None
    ) -> None:
        """Pack a step's results.

        Args:
            length: ``[batch]`` int64, as in `State`.
            done: ``[batch]`` int64, as in `State`.
            choices: ``[batch, at most rows]`` int64, as in `RowReport`.
            block: like ``choices``: the anchor, then the proposals for all choices but the last.
            expected: ``[batch, sizes]`` float32; None for a chain.
        """
        tail = self._nothing if expected is None else (expected * _SCALE).long()
        missing = self._missing[:, choices.shape[1] :]  # of a chain that is narrower than the state's
        torch.cat([length[:, None], done[:, None], choices, missing, block, missing, tail], 1, out=self.tensor)

    def read(self, values: list[list[int]]) -> list[RowReport]:
        """Unpack the tensor's values, a list per row."""
        rows, reports = self._rows, []
        for length, done, *rest in values:
            expected = [number / _SCALE for number in rest[2 * rows :]] if len(rest) > 2 * rows else []
            reports.append(RowReport(length, done, rest[:rows], rest[rows + 1 : 2 * rows], expected))
        return reports


class State:
    """Everything that a step reads and writes; see the invariant above. At first every row is done.

    Args:
        target: what verifies.
        draft: what drafts; None for nothing.
        batch: rows of the batch.
        max_length: tokens that a row may hold.
        block_size: rows of a chain.
        tree_rows: the most rows of a tree; 0 for chains only.
    """

    def __init__(
        self, target: Target, draft: Drafter | MtpHead | None, batch: int, max_length: int, block_size: int,
        tree_rows: int = 0,
    ) -> None:  # fmt: skip
        device, capacity = target.device, max_length + max(block_size, tree_rows)  # a block may look past the end

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        width = 0 if draft is None else len(draft.config.target_layer_ids) * draft.config.hidden_size
        self.tokens = zeros(batch, capacity)  # [batch, capacity] int64
        self.length = zeros(batch)  # [batch] int64
        # [batch] int64, the tokens that the drafter has not taken up: of the last step, and of those that have waited
        self.num_context = zeros(batch)
        self.done = zeros(batch) + FULL  # [batch] int64: RUNNING, STOPPED, FULL or INVALID
        self.limits = zeros(batch)  # [batch] int64, the tokens that a row may hold in all
        self.prompt_length = zeros(batch)  # [batch] int64
        self.stop_token_ids = zeros(batch, _STOP_SLOTS) + _NO_TOKEN  # [batch, slots], padded with no token's id
        # [batch, rows] int64, the anchor and the proposals of the last chain, or those of the last tree that equal the
        # choices along its accepted path; -1 for none.
        self.block = zeros(batch, block_size)
        self.offsets = torch.arange(1, block_size + 1, device=device)  # [rows] int64: 1, 2, ...
        # [batch, rows, taps * hidden], the target's features of the last chain, of several steps without drafts, or of
        # the path that was accepted of the last tree; 0 columns without a drafter.
        self.context = torch.zeros(batch, block_size, width, dtype=target.dtype, device=device)
        self.next_features = self.context[:, :1].clone()  # [batch, 1, taps * hidden], of a block that `waits`
        self._rows = torch.arange(batch, device=device)  # [batch] int64: 0, 1, ...
        # [batch * tree_rows * taps * hidden], the target's features of the last tree
        self.tree_features = torch.zeros(batch * tree_rows * width, dtype=target.dtype, device=device)
        self.tree_path = zeros(batch, block_size)  # [batch, rows] int64, the path that was accepted of the last tree
        self.tree_choices = zeros(batch, block_size)  # [batch, rows] int64, the target's choices along that path
        self.sampling = Sampling.create(batch, device)
        self.target_cache = target.new_cache(batch, capacity, block_size)
        self.draft_cache = None if draft is None else draft.new_cache(batch, capacity, slides=True)
        self.report = Report(batch, block_size, len(TREE_SIZES) if tree_rows else 0, device)
        # [n] int64, the rows that the next step continues, where it may leave out the others; None for all.
        self.live: Tensor | None = None
        self.history: FeatureHistory | None = None  # of all positions, if answers are recorded
        self.is_readable = False  # True while the host may look at these tensors: no device has to be waited for

    @property
    def anchor(self) -> Tensor:
        """``[batch, 1]`` int64, each row's last emitted token."""
        return self.tokens.gather(1, self.length[:, None])

    @property
    def at_prompt_end(self) -> State:
        """This state as a block of each prompt's last token sees it, whose row chooses the first new token."""
        before = copy.copy(self)
        before.length = (self.length - 1).clamp(min=0)
        return before

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
        if block.waits:
            return self.next_features
        if block.tree is None:
            rows = block.ids.shape[1]
            return self.context if rows == self.context.shape[1] else self.context[:, :rows]
        shape = *block.ids.shape, self.context.shape[2]
        return self.tree_features[: math.prod(shape)].view(shape)  # contiguous whatever the rows

    def waiting_features(self) -> Tensor:
        """Return ``[batch, rows, taps * hidden]``: the rows of ``context`` that are on, and others.

        Where the host may look there are as few as possible.
        """
        if (most := self._most_waiting()) is None:
            return self.context
        return self.context[:, : max(1, most)].contiguous()

    def can_wait(self) -> bool:
        """Return True if the features of one more token per row may wait in ``context``."""
        return (most := self._most_waiting()) is not None and most < self.context.shape[1]

    def wait_(self, waiting: Tensor) -> None:
        """Put the features of a block that `waits` after those of ``waiting [batch]`` tokens."""
        self.context[self._rows, waiting] = self.next_features[:, 0]
        self.num_context += waiting

    def _most_waiting(self) -> int | None:
        """Return the largest of ``num_context``; None where the host must not look."""
        return int(self.num_context.max()) if self.is_readable else None

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


class Logprobs:
    """The log probability of each token, and of the most probable ones at its position.

    They are those of the target's own logits, in float32, before rules, temperature and filters. A step writes them for
    every row of its block. Those after the tokens that it emits mean nothing, and the next step writes them again. The
    host may read a step's values while the next one runs, since that one writes only after them.

    Args:
        batch: rows of the batch.
        capacity: positions of each; at the last one there is never a token.
        most: probable tokens per position.
        device: of the target.
    """

    def __init__(self, batch: int, capacity: int, most: int, device: torch.device) -> None:
        self._most, self._last = most, capacity - 1
        # The token's value, then those of the most probable ones, then the ids of these, which float32 holds exactly.
        self._values = torch.zeros(batch, capacity, 1 + 2 * most, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(batch, dtype=torch.int64, device=device)
        self._temperature = torch.zeros(batch, dtype=torch.float32, device=device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def write_(self, rows: slice, logits: Tensor, tokens: Tensor, positions: Tensor) -> None:
        """Write the values of tokens in ``rows``, of which there are n.

        Args:
            rows: of the batch.
            logits: ``[n, count, vocab]``, the target's own.
            tokens: ``[n, count]`` int64, negative where the logits are NaN.
            positions: ``[n, count]`` int64, the tokens' own.
        """
        total, zeros = ops.log_sum_exp(logits)[..., None], self._temperature[rows]
        logits = logits.float()
        chosen = logits.gather(-1, tokens.clamp(min=0)[..., None])
        ids, top = ops.top_candidates(logits, positions, self._seeds[rows], zeros, zeros, self._most)
        values = torch.cat([chosen - total, top - total, ids.float()], -1)
        places = positions.clamp(max=self._last)[..., None].expand_as(values)
        self._values[rows].scatter_(1, places, values)

    def write_prompt_(self, rows: slice, logits: Tensor, tokens: Tensor, past: Tensor) -> None:
        """Write the values of the tokens after those of a prompt's chunk.

        Args:
            rows: of the batch.
            logits: ``[n, count, vocab]`` of the chunk.
            tokens: ``[n, capacity]`` int64, the prompts.
            past: ``[n]`` int64, positions before the chunk.
        """
        after = past[:, None] + torch.arange(1, logits.shape[1] + 1, device=past.device)
        chosen = tokens.gather(1, after.clamp(max=self._last))
        for part in torch.arange(logits.shape[1], device="cpu").split(_PROMPT_ROWS):
            now = slice(int(part[0]), int(part[-1]) + 1)
            self.write_(rows, logits[:, now], chosen[:, now], after[:, now])

    def read(self, row: int, start: int, stop: int, count: int) -> list[TokenLogprobs]:
        """Return the values of the tokens ``start .. stop - 1`` with ``count`` probable ones each.

        On a GPU the steps that wrote them must have ended; what is running is not waited for.
        """
        with contextlib.nullcontext() if self._side is None else torch.cuda.stream(self._side):
            values = self._values[row, start:stop].tolist()
        found = []
        for chosen, *top in values:
            ids = [int(token) for token in top[self._most :][:count] if token >= 0]
            found.append(TokenLogprobs(chosen, ids, top[: len(ids)]))
        return found


def scatter_rows(values: Tensor, live: Tensor, batch: int, other: float) -> Tensor:
    """Return ``[batch, ...]`` with ``values [n, ...]`` in the rows ``live [n]``, and ``other`` in those left out."""
    return values.new_full((batch, *values.shape[1:]), other).index_copy_(0, live, values)
