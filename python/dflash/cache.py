"""Caches of a running batch: keys and values, and the states of recurrent layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import ops

if TYPE_CHECKING:
    from typing_extensions import Self

_ALL_ROWS = slice(None)


def further_index(layer: int, number: int) -> int:
    """Return the index in a `KVCache` of another buffer of a layer: 0 for an indexer's keys, 1 .. 7 for a family's."""
    return ~(8 * layer + number)


class KVCache:
    """Keys and values of every layer, ``[batch_size, num_kv_heads, capacity, head_dim]`` each, at fixed addresses.

    The cache does not know how much of it is in use. The caller keeps a length per row and trims by lowering it;
    slots at or past the length are stale and never read.

    Attributes:
        keys, values: layer index, or `further_index` -> buffer. A layer that shares another's keys and values has none.
        rotary: ``(cos, sin)``, each ``[capacity, rotary / 2]`` float32, for layers on `dflash.ops`; else None.
        local_rotary: likewise, of layers with a window; None if it is that of the others.
        sequences: ``[batch]`` int64, those of the buffers that a pass runs (see `only`); None for all.
        origin: ``[batch]`` int64, the position in slot 0; None if slots are positions.

    Args:
        batch_size: sequences.
        capacity: positions of each sequence, lookahead slots included.
        rotary: see above.
    """

    def __init__(self, batch_size: int, capacity: int, rotary: tuple[Tensor, Tensor] | None = None) -> None:
        self.batch_size, self.capacity, self.rotary = batch_size, capacity, rotary
        self.local_rotary: tuple[Tensor, Tensor] | None = None
        self._whole: Self | None = None  # the cache that this one is `_rows` of
        self._rows = _ALL_ROWS
        self.sequences: Tensor | None = None
        self.origin: Tensor | None = None
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
        part.origin = None if self.origin is None else self.origin[rows]
        return part

    def only(self, sequences: Tensor) -> Self:
        """Return a cache for one pass of some sequences through `dflash.ops.decoder_layers`; it shares their memory."""
        part = copy.copy(self)
        part.sequences = sequences
        part.origin = None if self.origin is None else self.origin[sequences]
        return part

    def slots_(self, positions: Tensor) -> Tensor:
        """Return the slots ``[batch, rows]`` int64 of ``positions``, negative for those that need none.

        They are to be written next, and what the cache holds makes room for them.
        """
        return positions

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


class SlidingCache(KVCache):
    """Keys and values of the last positions, for layers that all have a window.

    A row's slots hold the positions from ``origin`` on. Where the last ones would not fit, all move down by a multiple
    of 256 slots: the CPU kernel's sums are of such chunks, so no bit of attention changes there. Keys are stored after
    RoPE, so they move as they are. At least 256 positions before the window are held too: a row that resumes from there
    has its whole window. One that resumes from further back sees what is left.

    Args:
        batch_size: sequences.
        rotary: as in `KVCache`, for all positions.
        window: of the layers, the widest.
        rows: the most rows of a block.
    """

    _CHUNK = 256

    def __init__(self, batch_size: int, rotary: tuple[Tensor, Tensor], window: int, rows: int) -> None:
        self._window, self._most = window, window + 2 * self._CHUNK  # most: slots before a block
        super().__init__(batch_size, self._most + rows, rotary)
        device = rotary[0].device
        self.origin: Tensor = torch.zeros(batch_size, dtype=torch.int64, device=device)
        # Row 0 of `ops.compact_kv_` never moves, so its rows are the slots from -1 on
        self._rows_to_move = torch.arange(self.capacity - self._CHUNK + 1, device=device)

    def commit_(self, length: Tensor, num_context: Tensor, path: Tensor | None = None) -> None:  # noqa: ARG002
        self._slide_(length)

    def slots_(self, positions: Tensor) -> Tensor:
        # A row that begins another text, or goes back in its own, holds nothing from there on
        first = torch.where(positions < 0, self.origin[:, None], positions).amin(1)
        torch.minimum(self.origin, first, out=self.origin)
        self._slide_(positions.amax(1) + 1)
        return torch.where(positions < 0, -1, positions - self.origin[:, None])

    def _slide_(self, length: Tensor) -> None:
        """Make room for a block at ``length [batch]``."""
        shift = (length - self.origin + (self._CHUNK - 1 - self._most)).clamp(min=0) // self._CHUNK * self._CHUNK
        path, caches = self._rows_to_move + shift[:, None], ([*self.keys.values()], [*self.values.values()])
        ops.compact_kv_(path, shift * self.capacity, torch.full_like(shift, -1), *caches)  # 0 rows, or all
        self.origin.add_(shift)

    def save(self, row: int, start: int, stop: int) -> list[Tensor]:
        slots = torch.arange(max(start, stop - self._window), stop, device=self.origin.device) - self.origin[row]
        # Negative where the row is far ahead of ``stop``: those positions are gone, and drafts a little worse
        return [buffer[row][:, slots.clamp(min=0)] for buffer in self.buffers]

    def load_(self, row: int, start: int, stop: int, saved: Sequence[Tensor]) -> None:
        part = self.rows(slice(row, row + 1))
        slots = part.slots_(torch.arange(start, stop, device=self.origin.device)[None])[0]
        for buffer, tensor in zip(part.buffers, saved, strict=True):
            buffer[0][:, slots[-tensor.shape[1] :]] = tensor


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
