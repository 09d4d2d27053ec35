"""Records that the parts of a step share: the state of a running batch, the block it verifies, what the host reads.

The invariant between steps, per row, with ``s = length``:

- ``tokens[: s + 1]`` are emitted: committed for good. ``tokens[s]`` is the anchor, the first row of the next block.
- The target's cache covers positions ``0 .. s - 1``, the drafter's ``0 .. s - num_context - 1``, and ``context`` holds
  the target's features of the ``num_context`` positions after that.
- Slots beyond are stale and never read. Trimming a cache only means lowering this counter.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import ops
from .outputs import TokenLogprobs
from .sampling import Sampling

if TYPE_CHECKING:
    from typing_extensions import Self

    from .drafter import Drafter
    from .targets import Target

RUNNING, STOPPED, FULL, INVALID = ops.ROW_STATES
"""Values of ``done``: running; a stop token, string or criterion; the limit is reached; the target's logits are NaN."""

TREE_SIZES = (8, 16, 32, 64, 128)
"""Rows of a tree among which ``tree="auto"`` chooses, beside steps without drafts."""

_NO_TOKEN = -2  # pads the stop list: no token and no placeholder has this id
_STOP_SLOTS = 8
_SCALE = 2**20  # of the real numbers in a report
_ALL_ROWS = slice(None)
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
        self, target: Target, draft: Drafter | None, batch: int, max_length: int, block_size: int, tree_rows: int = 0
    ) -> None:
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
        self.draft_cache = None if draft is None else draft.new_cache(batch, capacity)
        self.report = Report(batch, block_size, len(TREE_SIZES) if tree_rows else 0, device)
        # [n] int64, the rows that the next step continues, where it may leave out the others; None for all.
        self.live: Tensor | None = None
        self.history: History | None = None  # the target's features at all positions, where somebody records them
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


# ---------------------------------------------------------------------------------------------------------- caches


class KVCache:
    """Keys and values of every layer, ``[batch_size, num_kv_heads, capacity, head_dim]`` each, at fixed addresses.

    The cache does not know how much of it is in use. The caller keeps a length per row and trims by lowering it;
    slots at or past the length are stale and never read.

    Attributes:
        keys, values: layer index -> buffer. A layer that shares another's keys and values has none.
        rotary: ``(cos, sin)``, each ``[capacity, rotary / 2]`` float32, for layers on `dflash.ops`; else None.
        sequences: ``[batch]`` int64, those of the buffers that a pass runs (see `only`); None for all.

    Args:
        batch_size: sequences.
        capacity: positions of each sequence, lookahead slots included.
        rotary: see above.
    """

    def __init__(self, batch_size: int, capacity: int, rotary: tuple[Tensor, Tensor] | None = None) -> None:
        self.batch_size, self.capacity, self.rotary = batch_size, capacity, rotary
        self._whole: Self | None = None  # the cache that this one is `_rows` of
        self._rows = _ALL_ROWS
        self.sequences: Tensor | None = None
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def buffers(self) -> list[Tensor]:
        """Every buffer: the keys of all layers, then the values."""
        return [*self.keys.values(), *self.values.values()]

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers of a layer, allocated for all rows at its first call.

        Args:
            index: the layer.
            key: ``[batch, num_kv_heads, rows, head_dim]``; its heads, width, dtype and device are the buffer's.
            value: likewise.
        """
        if index not in self.keys and self._whole is not None:
            self.keys[index], self.values[index] = (x[self._rows] for x in self._whole.layer(index, key, value))
        elif index not in self.keys:
            for buffers, like in ((self.keys, key), (self.values, value)):
                buffers[index] = like.new_empty(self.batch_size, like.shape[1], self.capacity, like.shape[3])
        return self.keys[index], self.values[index]

    def allocate(
        self, num_layers: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> KVCache:
        """Allocate the missing buffers of layers ``0 .. num_layers - 1`` and return the cache."""
        like = torch.empty(1, num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        for index in range(num_layers):
            self.layer(index, like, like)
        return self

    def rows(self, rows: slice) -> Self:
        """Return a cache over some of the sequences, for one pass: it shares their memory."""
        if rows.stop - rows.start == self.batch_size:
            return self
        part = copy.copy(self)
        part.batch_size, part._whole, part._rows = rows.stop - rows.start, self, rows
        part.keys, part.values = ({i: x[rows] for i, x in buffers.items()} for buffers in (self.keys, self.values))
        return part

    def only(self, sequences: Tensor) -> Self:
        """Return a cache for one pass of some sequences through `dflash.ops.decoder_layers`; it shares their memory."""
        part = copy.copy(self)
        part.sequences = sequences
        return part

    def commit_(self, length: Tensor, num_context: Tensor, path: Tensor | None = None) -> None:
        """Follow a step that committed rows of its block, after the counters have advanced.

        A chain's rows are in the slots of their positions already; those of a tree are moved there. A recurrent cache
        takes them up at the start of the next pass. Launches work of fixed shape, and never waits for the device.

        Args:
            length: ``[batch]`` int64, positions committed so far.
            num_context: ``[batch]`` int64, how many of them this step committed; 0 for a row that has finished.
            path: ``[batch, path_rows]`` int64, which rows of a tree those are (`dflash.ops.accept_path_`); None for a
                chain.
        """
        if path is not None:
            caches = [*self.keys.values()], [*self.values.values()]
            ops.compact_kv_(path, num_context, length - num_context, *caches)

    def begin_pass_(self, lengths: Tensor, keep: Tensor | None) -> None:
        """Prepare for a pass over rows at positions ``lengths [batch]``; see `RecurrentCache`."""

    def end_pass_(self, lengths: Tensor) -> None:
        """Note what the pass has done."""

    def save(self, row: int, start: int, stop: int) -> list[Tensor]:
        """Return copies of what a row holds of positions ``start .. stop - 1``.

        Its last pass ended at ``stop``, or later if the cache has keys and values only.
        """
        return [buffer[row, :, start:stop].clone() for buffer in (*self.keys.values(), *self.values.values())]

    def load_(self, row: int, start: int, stop: int, saved: Sequence[Tensor]) -> None:
        """Write what `save` has returned to a row that holds all before ``start``."""
        for buffer, tensor in zip((*self.keys.values(), *self.values.values()), saved, strict=True):
            buffer[row, :, start:stop] = tensor

    def resumable(self, shared: Sequence[int]) -> list[int]:
        """Return from which position at or before ``shared`` the first rows can continue: here any."""
        return list(shared)

    def resume_(self, positions: Sequence[int], first: int = 0) -> None:
        """Continue from these positions, which `resumable` has returned. Keys and values need nothing for it."""

    def keep_snapshot_(self, rows: Sequence[int]) -> None:
        """Remember the position of these rows, to resume from it later. Keys and values need nothing for it."""


class History(KVCache):
    """What the target has computed of all positions: features, as the keys of a layer, and its best tokens.

    Attributes:
        features: ``[batch, 1, capacity, taps * hidden]``, of the positions before ``length``.
        top_ids, top_logits: ``[batch, capacity, 16]`` int64 and float32, of the tokens of answers.
    """

    TOP = 16

    def __init__(self, context: Tensor, capacity: int) -> None:
        """``context [batch, rows, taps * hidden]`` is the state's."""
        batch, _, width = context.shape
        super().__init__(batch, capacity)
        self.features = self.keys[0] = context.new_zeros(batch, 1, capacity, width)
        self.top_logits = context.new_zeros(batch, capacity, self.TOP, dtype=torch.float32)
        self.top_ids = self.top_logits.long()
        self._seeds, self._zeros = self.top_ids.new_zeros(batch), self.top_logits.new_zeros(batch)

    def write_(self, rows: slice, start: Tensor, features: Tensor) -> None:
        """Write ``features [n, count, taps * hidden]`` of some ``rows`` at positions from ``start [n]`` int64 on.

        Those of a row past what it commits are stale, as in every cache.
        """
        row, positions = self._places(rows, start, features.shape[1])
        self.features[row, 0, positions] = features

    def write_top_(self, rows: slice, start: Tensor, logits: Tensor) -> None:
        """Write the best of the target's ``logits [n, count, vocab]`` for positions from ``start [n]`` int64 on."""
        row, positions = self._places(rows, start, logits.shape[1])
        plain = self._seeds[rows], self._zeros[rows], self._zeros[rows]
        self.top_ids[row, positions], self.top_logits[row, positions] = ops.top_candidates(
            logits, positions, *plain, self.TOP
        )

    def of(self, row: int, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a row's features before position ``stop - 1``, and the best ids and logits from ``start`` on."""
        return self.features[row, 0, : stop - 1], self.top_ids[row, start:stop], self.top_logits[row, start:stop]

    def _places(self, rows: slice, start: Tensor, count: int) -> tuple[Tensor, Tensor]:
        positions = start[:, None] + torch.arange(count, device=start.device)
        row = torch.arange(self.batch_size, device=start.device)[rows, None]
        return row, positions.clamp(max=self.capacity - 1)


class RecurrentLayer:
    """The buffers of one recurrent layer; each is allocated at its first use, at an address that never changes.

    With ``whole``, those of some ``rows`` of that layer, which allocates for all.
    """

    # [batch, width - 1 + block, channels], the convolution's inputs in front of `held`, then those of the last pass.
    window: Tensor | None = None
    state: Tensor | None = None  # [batch, heads, key_dim, value_dim] float32, at `held`
    # Of the last pass' rows, float32:
    saved_k: Tensor | None = None  # [batch, block, key_heads, key_dim]
    saved_d: Tensor | None = None  # [batch, block, heads, value_dim]
    saved_a: Tensor | None = None  # [batch, block, heads] or [batch, block, heads, key_dim]

    def __init__(
        self, batch_size: int, block_size: int, whole: RecurrentLayer | None = None, rows: slice = _ALL_ROWS
    ) -> None:
        self.batch_size, self.block_size, self._whole, self._rows = batch_size, block_size, whole, rows
        self._narrow()

    def _narrow(self) -> None:
        """Take the rows of what the whole layer has by now."""
        for name in ("window", "state", "saved_k", "saved_d", "saved_a"):
            buffer = getattr(self._whole, name, None)
            if buffer is not None:
                setattr(self, name, buffer[self._rows])

    @property
    def buffers(self) -> list[Tensor]:
        """Every buffer that there is."""
        every = (self.window, self.state, self.saved_k, self.saved_d, self.saved_a)
        return [buffer for buffer in every if buffer is not None]

    @property
    def held_values(self) -> list[Tensor]:
        """Views of what is at ``held``: the context of the convolution and the state."""
        context = [] if self.window is None else [self.window[:, : self.window.shape[1] - self.block_size]]
        return context + ([] if self.state is None else [self.state])

    def convolution(self, like: Tensor, width: int) -> Tensor:
        """Return the window of a convolution over ``width`` inputs ``like [batch, rows, channels]``."""
        if self._whole is not None:
            self._whole.convolution(like, width)
            self._narrow()
        elif self.window is None:
            self.window = like.new_zeros(self.batch_size, width - 1 + self.block_size, like.shape[-1])
        return self.window

    def recurrence(self, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ``(state, saved_k, saved_d, saved_a)`` for rows like these; see `dflash.ops.gated_recurrence_`."""
        if self._whole is not None:
            self._whole.recurrence(k, v, log_decay)
            self._narrow()
        elif self.state is None:
            batch, block, (heads, value_dim) = self.batch_size, self.block_size, v.shape[2:]
            self.state = v.new_zeros(batch, heads, k.shape[3], value_dim)
            self.saved_k = k.new_zeros(batch, block, *k.shape[2:])
            self.saved_d = v.new_zeros(batch, block, heads, value_dim)
            self.saved_a = log_decay.new_zeros(batch, block, *log_decay.shape[2:])
        return self.state, self.saved_k, self.saved_d, self.saved_a


class RecurrentCache(KVCache):
    """A cache for models with recurrent layers, whose states no counter can trim.

    Between two passes every recurrent state stands at position ``held``, and what the last pass saved of its rows
    covers ``held .. held + block_size - 1``; ``held <= length <= held + block_size`` for a row that will go on. A pass
    at positions ``length`` first applies the ``pending = length - held`` rows that were accepted since, then runs its
    own, and takes up ``keep`` of them at once: none of a block's, all of a prompt's. Then ``held = length + keep``.

    Attributes:
        held: ``[batch]`` int64.
        pending: ``[batch]`` int64, of the pass that runs.
        keep: ``[batch]`` int64, of the pass that runs. Read it between `begin_pass_` and `end_pass_`, and never write
            to it: it is one of two tensors, and that of a block's passes holds zeros for good.
        recurrent: layer index -> its buffers.

    Args:
        batch_size: sequences.
        capacity: positions of each sequence, lookahead slots included.
        block_size: the most rows of a pass that are not kept at once.
        goes_on: False if a block's rows move the states otherwise than the same rows of a prompt would. A later prompt
            then resumes from snapshots only.
        device: of the counters.
    """

    def __init__(
        self, batch_size: int, capacity: int, block_size: int, *, goes_on: bool = True, device: torch.device | str
    ) -> None:
        super().__init__(batch_size, capacity)
        self.block_size, self.goes_on = block_size, goes_on
        self.held, self.pending, self._keeps_none, self._keeps_rows, self._snapshot_at = (
            torch.zeros(batch_size, dtype=torch.int64, device=device) for _ in range(5)
        )
        self.keep = self._keeps_none
        self.recurrent: dict[int, RecurrentLayer] = {}
        self._snapshot: dict[int, list[Tensor]] = {}  # layer index -> copies of what stood at `_snapshot_at`

    @property
    def buffers(self) -> list[Tensor]:
        """Every buffer: keys, values, recurrent layers."""
        return [*super().buffers, *(buffer for layer in self.recurrent.values() for buffer in layer.buffers)]

    def recurrent_layer(self, index: int) -> RecurrentLayer:
        """Return the buffers of a recurrent layer."""
        if index not in self.recurrent:
            whole = None if self._whole is None else self._whole.recurrent_layer(index)
            self.recurrent[index] = RecurrentLayer(self.batch_size, self.block_size, whole, self._rows)
        return self.recurrent[index]

    def rows(self, rows: slice) -> Self:
        part = super().rows(rows)
        if part is not self:
            for name in ("held", "pending", "_keeps_none", "_keeps_rows"):
                setattr(part, name, getattr(self, name)[rows])
            part.keep, part.recurrent = part._keeps_none, {}
            for index in self.recurrent:
                part.recurrent_layer(index)
        return part

    def begin_pass_(self, lengths: Tensor, keep: Tensor | None) -> None:
        """Set ``pending`` and ``keep`` for a pass at positions ``lengths [batch]``, of which ``keep`` rows are kept."""
        torch.sub(lengths, self.held, out=self.pending).clamp_(0, self.block_size)
        self.keep = self._keeps_none if keep is None else self._keeps_rows.copy_(keep)

    def end_pass_(self, lengths: Tensor) -> None:
        """Note where the states stand now. A finished row that was cut back has states that are ahead of it."""
        reached = lengths if self.keep is self._keeps_none else lengths + self.keep
        torch.maximum(self.held, reached, out=self.held)

    def commit_(self, length: Tensor, num_context: Tensor, path: Tensor | None = None) -> None:
        """Note again where the states stand, in a compiled step.

        Elsewhere `end_pass_` has: ``held`` is where the pass began, which is ``length - num_context`` by now. In a
        compiled step, Inductor moves that write after the op that advances ``lengths`` in place (torch 2.13), and so
        notes what they are afterwards.
        """
        if path is not None:
            raise ValueError("recurrent states follow chains only, got the path of a tree: pass path=None")
        if torch.compiler.is_compiling():
            torch.where(num_context > 0, length - num_context, self.held, out=self.held)

    def save(self, row: int, start: int, stop: int) -> list[Tensor]:
        return [*super().save(row, start, stop), *(state[row].clone() for state in self._states)]

    def load_(self, row: int, start: int, stop: int, saved: Sequence[Tensor]) -> None:
        states = self._states
        super().load_(row, start, stop, saved[: len(saved) - len(states)])
        for values, tensor in zip(states, saved[len(saved) - len(states) :], strict=True):
            values[row] = tensor
        self.held[row].fill_(stop)

    @property
    def _states(self) -> list[Tensor]:
        """What stands at ``held`` in all layers, see `RecurrentLayer.held_values`."""
        return [values for layer in self.recurrent.values() for values in layer.held_values]

    def resumable(self, shared: Sequence[int]) -> list[int]:
        """Return ``shared`` where the states are at or before it, else the snapshot's position, else 0."""
        held, snapshots = torch.stack([self.held, self._snapshot_at])[:, : len(shared)].tolist()
        return [
            at if self.goes_on and stands <= at else snapshot if snapshot <= at else 0
            for at, stands, snapshot in zip(shared, held, snapshots, strict=True)
        ]

    def resume_(self, positions: Sequence[int], first: int = 0) -> None:
        """Return the states of rows that resume before ``held`` to the snapshot, or clear them."""
        device, rows = self.held.device, slice(first, first + len(positions))
        at = torch.tensor(positions, dtype=torch.int64, device=device)
        # 1. A row that resumes before its snapshot may later pass it with other tokens.
        self._snapshot_at[rows].masked_fill_(at < self._snapshot_at[rows], 0)
        # 2. Which rows move, and where to.
        held = self.held[rows].tolist() if any(positions) else [0] * len(positions)
        moved = [row for row, to in enumerate(positions) if not (self.goes_on and to >= held[row] > 0)]
        restored, cleared = (
            torch.tensor([row for row in moved if bool(positions[row]) is kept], dtype=torch.int64, device=device)
            for kept in (True, False)
        )
        for chosen in (restored, cleared):
            self.held[rows][chosen] = at[chosen]
        # 3. Their states.
        for index, layer in self.recurrent.items():
            for standing, kept in zip(layer.held_values, self._snapshot.get(index, ()), strict=False):
                standing[rows][restored] = kept[rows][restored]
            for standing in layer.held_values:
                standing[rows].index_fill_(0, cleared, 0)

    def keep_snapshot_(self, rows: Sequence[int]) -> None:
        """Copy the states of these rows; each row has one snapshot. Does not wait for the device."""
        if not rows:
            return
        for index, layer in self.recurrent.items():
            copies = self._snapshot.setdefault(index, [])
            # A pass that was interrupted may have left a layer with a convolution only.
            copies += [torch.zeros_like(standing) for standing in layer.held_values[len(copies) :]]
        for row in rows:
            self._snapshot_at[row].copy_(self.held[row])
            for index, layer in self.recurrent.items():
                for standing, kept in zip(layer.held_values, self._snapshot[index], strict=True):
                    kept[row] = standing[row]
