"""Sparse attention whose keys an indexer selects: DeepSeek-V3.2 and GLM-5, as transformers computes them.

An indexer scores the positions that a row sees by keys of its own and passes on the best (DeepSeek-V3.2-Exp report,
section 2.1). Here its keys are in the cache as those of a layer of their own, so counters trim them with the rest, and
the model's own modules score, with `dflash.targets.masked_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .copies import CacheView


def select(
    self: nn.Module, hidden: Tensor, q_resid: Tensor, angles: tuple[Tensor, Tensor], mask: Tensor, *rest: Any,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Return the slots that an indexer selects, ``[batch, rows, at most index_topk]``.

    ``torch.topk`` takes the first of equal scores on CUDA, however many follow. On a CPU that depends on their number,
    those of slots that a row does not see included. So there each row of a block is asked by itself, over what it sees,
    as in one-token decoding, and the rows of a prompt over all of it. Compiled steps do not.
    """
    forward, running = type(self).__mro__[1].forward, self.running_pass
    if hidden.device.type != "cpu" or torch.compiler.is_compiling():
        return forward(self, hidden, q_resid, angles, mask, *rest, **options)
    name, view = next((name, value) for name, value in options.items() if isinstance(value, CacheView))
    batch, rows, capacity = mask.shape
    chosen = torch.zeros(batch, rows, min(self.index_topk, capacity), dtype=torch.int64)
    for sequence in range(batch):
        end = None if running.ends is None else int(running.ends[sequence])
        for part in [slice(0, rows)] if running.is_prompt else [slice(row, row + 1) for row in range(rows)]:
            seen, one = mask[sequence, part], slice(sequence, sequence + 1)
            slots = seen.any(0).nonzero()[:, 0] if end is None else torch.arange(min(end, capacity))
            options[name] = _IndexerRows(view, sequence, part, slots)
            at = hidden[one, part], q_resid[one, part], tuple(x[one, part] for x in angles)
            found = slots[forward(self, *at, seen[None, :, slots], *rest, **options)[0].long()]
            chosen[sequence, part] = found[:, :1]  # stands in for those that there are too few of
            chosen[sequence, part, : found.shape[1]] = found
    return chosen


class _IndexerRows:
    """The cache of an indexer for some rows of one sequence."""

    def __init__(self, view: CacheView, sequence: int, rows: slice, slots: Tensor) -> None:
        self._view, self._sequence, self._rows, self._slots = view, sequence, rows, slots

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Keep the keys ``[1, rows, dim]`` of these rows, and return those of the slots."""
        buffer, written = self._view.index_keys(keys, layer)[self._sequence, 0], self._view.slots[self._sequence]
        buffer[written[self._rows]] = keys[0]
        return buffer[None, self._slots]
