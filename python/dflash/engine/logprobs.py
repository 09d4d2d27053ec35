"""Log probabilities of tokens. They stay on the device, at their tokens' positions, until the host asks for them."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from .. import ops
from ..outputs import TokenLogprobs

__all__ = ["Logprobs"]

_AT_ONCE = 64  # rows of a prompt whose logits are held in float32


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
        logits, zeros = logits.float(), self._temperature[rows]
        total = logits.logsumexp(-1, keepdim=True)
        chosen = logits.gather(-1, tokens.clamp(min=0)[..., None])
        ids, top = ops.top_candidates(logits, positions, self._seeds[rows], zeros, zeros[:, None], self._most)
        values = torch.cat([chosen - total, top[:, 0] - total, ids[:, 0].float()], -1)
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
        for part in torch.arange(logits.shape[1], device="cpu").split(_AT_ONCE):
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
