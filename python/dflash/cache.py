"""What a model remembers of a sequence, preallocated: keys and values with a slot per position, recurrent states.

Lengths live outside, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import ops


class KVCache:
    """Keys and values of every layer, ``[batch_size, num_kv_heads, capacity, head_dim]`` each, at fixed addresses.

    The cache does not know how much of it is in use. The caller keeps a length per row and trims by lowering it;
    slots at or past the length are stale and never read.

    Attributes:
        keys, values: layer index -> buffer. A layer that shares another's keys and values has none.
        rotary: ``(cos, sin)``, each ``[capacity, rotary / 2]`` float32, for layers on `dflash.ops`; else None.

    Args:
        batch_size: sequences.
        capacity: positions of each sequence, lookahead slots included.
        rotary: see above.
    """

    def __init__(self, batch_size: int, capacity: int, rotary: tuple[Tensor, Tensor] | None = None) -> None:
        self.batch_size, self.capacity, self.rotary = batch_size, capacity, rotary
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def buffers(self) -> list[Tensor]:
        """Every buffer: the keys of all layers, then the values."""
        return [*self.keys.values(), *self.values.values()]

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers of a layer, allocated at its first call.

        Args:
            index: the layer.
            key: ``[batch, num_kv_heads, rows, head_dim]``; its heads, width, dtype and device are the buffer's.
            value: likewise.
        """
        if index not in self.keys:
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

    def rows(self, rows: slice) -> KVCache:
        """Return a cache over some of the sequences, for one pass: it shares their memory."""
        return _KVRows(self, rows)

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

    def resumable(self, shared: Sequence[int], first: int = 0) -> list[int]:  # noqa: ARG002
        """Return from which position at or before ``shared`` the rows from ``first`` on can continue: here any."""
        return list(shared)

    def resume_(self, positions: Sequence[int], first: int = 0) -> None:
        """Continue from these positions, which `resumable` has returned. Keys and values need nothing for it."""

    def keep_snapshot_(self, rows: Sequence[int]) -> None:
        """Remember the position of these rows, to resume from it later. Keys and values need nothing for it."""


class _KVRows(KVCache):
    """Some rows of a cache. What is allocated through it is allocated for all rows."""

    def __init__(self, whole: KVCache, rows: slice) -> None:
        KVCache.__init__(self, rows.stop - rows.start, whole.capacity, whole.rotary)
        self._whole, self._rows = whole, rows
        self.keys, self.values = ({i: x[rows] for i, x in buffers.items()} for buffers in (whole.keys, whole.values))

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if index not in self.keys:
            self.keys[index], self.values[index] = (x[self._rows] for x in self._whole.layer(index, key, value))
        return self.keys[index], self.values[index]


class RecurrentLayer:
    """The buffers of one recurrent layer; each is allocated at its first use, at an address that never changes."""

    # [batch, width - 1 + block, channels], the convolution's inputs in front of `held`, then those of the last pass.
    window: Tensor | None = None
    state: Tensor | None = None  # [batch, heads, key_dim, value_dim] float32, at `held`
    # Of the last pass' rows, float32:
    saved_k: Tensor | None = None  # [batch, block, key_heads, key_dim]
    saved_d: Tensor | None = None  # [batch, block, heads, value_dim]
    saved_a: Tensor | None = None  # [batch, block, heads] or [batch, block, heads, key_dim]

    def __init__(self, batch_size: int, block_size: int) -> None:
        self.batch_size, self.block_size = batch_size, block_size

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
        if self.window is None:
            self.window = like.new_zeros(self.batch_size, width - 1 + self.block_size, like.shape[-1])
        return self.window

    def recurrence(self, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ``(state, saved_k, saved_d, saved_a)`` for rows like these; see `dflash.ops.gated_recurrence_`."""
        if self.state is None:
            batch, block, (heads, value_dim) = self.batch_size, self.block_size, v.shape[2:]
            self.state = v.new_zeros(batch, heads, k.shape[3], value_dim)
            self.saved_k = k.new_zeros(batch, block, *k.shape[2:])
            self.saved_d = v.new_zeros(batch, block, heads, value_dim)
            self.saved_a = log_decay.new_zeros(batch, block, *log_decay.shape[2:])
        return self.state, self.saved_k, self.saved_d, self.saved_a


class _RecurrentLayerRows(RecurrentLayer):
    """Some rows of a recurrent layer's buffers."""

    def __init__(self, whole: RecurrentLayer, rows: slice) -> None:
        super().__init__(rows.stop - rows.start, whole.block_size)
        self._whole, self._rows = whole, rows
        self._narrow()

    def _narrow(self) -> None:
        for name in ("window", "state", "saved_k", "saved_d", "saved_a"):
            buffer = getattr(self._whole, name)
            setattr(self, name, None if buffer is None else buffer[self._rows])

    def convolution(self, like: Tensor, width: int) -> Tensor:
        self._whole.convolution(like, width)
        self._narrow()
        return super().convolution(like, width)

    def recurrence(self, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        self._whole.recurrence(k, v, log_decay)
        self._narrow()
        return super().recurrence(k, v, log_decay)


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
            self.recurrent[index] = RecurrentLayer(self.batch_size, self.block_size)
        return self.recurrent[index]

    def rows(self, rows: slice) -> RecurrentCache:
        return _RecurrentRows(self, rows)

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

    def resumable(self, shared: Sequence[int], first: int = 0) -> list[int]:
        """Return ``shared`` where the states are at or before it, else the snapshot's position, else 0."""
        held, snapshots = torch.stack([self.held, self._snapshot_at])[:, first : first + len(shared)].tolist()
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
            for standing, copy in zip(layer.held_values, self._snapshot.get(index, ()), strict=False):
                standing[rows][restored] = copy[rows][restored]
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
                for standing, copy in zip(layer.held_values, self._snapshot[index], strict=True):
                    copy[row] = standing[row]


class _RecurrentRows(_KVRows, RecurrentCache):
    """Some rows of a recurrent cache."""

    def __init__(self, whole: RecurrentCache, rows: slice) -> None:
        super().__init__(whole, rows)
        self.block_size, self.goes_on = whole.block_size, whole.goes_on
        self.held, self.pending, self._keeps_none, self._keeps_rows = (
            x[rows] for x in (whole.held, whole.pending, whole._keeps_none, whole._keeps_rows)
        )
        self.keep = self._keeps_none
        self.recurrent = {i: _RecurrentLayerRows(layer, rows) for i, layer in whole.recurrent.items()}
        self._layer_of_all = whole.recurrent_layer

    def recurrent_layer(self, index: int) -> RecurrentLayer:
        if index not in self.recurrent:
            self.recurrent[index] = _RecurrentLayerRows(self._layer_of_all(index), self._rows)
        return self.recurrent[index]
