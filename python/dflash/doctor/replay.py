"""Draft again from recorded states, wired in any way, and count what the target's own answer accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..cache import KVCache
from ..drafter import Drafter
from ..proposers import ChainProposer, State
from ..sampling import Sampling
from ..target import Target
from .recording import RAW_LAST, Recording
from .wiring import Wiring

__all__ = ["Replay", "Score"]

_CACHE_BYTES = 2**28  # of the drafter's caches and logits in one pass


class Score(NamedTuple):
    """What one wiring accepts.

    Attributes:
        tokens: ``[places]`` float32, tokens per step: the accepted drafts and the target's own.
        valid: share of the rows that draft a token; a NaN drafts none.
    """

    tokens: Tensor
    valid: float

    @property
    def mean(self) -> float:
        """Tokens per step over all places."""
        return self.tokens.mean().item()


class Replay:
    """Drafts at the same places of the same answers for every wiring, as a step does: one pass of the proposer each.

    Args:
        recording: of the target's greedy answers.
        target: the twin whose embeddings and head the drafter shares.
        drafter: its weights.
        per_prompt: places of each answer at most, spread evenly.

    Attributes:
        anchors: ``[places]`` int64, the position of each place's last token before the drafts.
        rows: ``[places]`` int64, its answer.
    """

    def __init__(self, recording: Recording, target: Target, drafter: Drafter, per_prompt: int) -> None:
        self.recording, self.target, self.drafter = recording, target, drafter
        self.last_layer = target.config.num_hidden_layers - 1
        where = []
        bounds = zip(recording.prompt_lengths.tolist(), recording.lengths.tolist(), strict=True)
        for row, (first, length) in enumerate(bounds):
            count = min(per_prompt, length - 1 - first)  # every anchor has a token after it
            spread = torch.linspace(first, length - 2, max(count, 0), dtype=torch.float32, device="cpu")
            where.extend((row, place) for place in spread.long().unique().tolist())
        places = torch.tensor(where, dtype=torch.int64, device=recording.ids.device).view(-1, 2)
        self.rows, self.anchors = places.unbind(1)

    def can_read(self, wiring: Wiring) -> bool:
        """True if the states that the wiring taps were recorded."""
        return all(layer in self.recording.states for layer in self._layers(wiring))

    def context(self, wiring: Wiring) -> Tensor:
        """Return the tapped states, ``[sequences, length, taps * hidden]``."""
        return torch.cat([self.recording.states[layer] for layer in self._layers(wiring)], -1)

    def _layers(self, wiring: Wiring) -> list[int]:
        is_raw = wiring.raw_last_tap
        return [RAW_LAST if is_raw and tap == self.last_layer else tap for tap in wiring.config.target_layer_ids]

    @torch.no_grad()
    def score(self, wiring: Wiring, every: int = 1) -> Score:
        """Draft at the places, or at one of ``every`` so many, and compare with the target's answer."""
        drafter, recorded = wiring.apply(self.drafter), self.recording
        rows, anchors = self.rows[::every], self.anchors[::every]
        # 1. The whole context's keys and values, once per sequence
        length, block_size = recorded.ids.shape[1], drafter.config.block_size
        positions = torch.arange(length, device=rows.device).expand(len(recorded.ids), -1)
        positions = torch.where(positions < recorded.lengths[:, None], positions, -1)
        context = self.context(wiring).to(drafter.dtype)
        whole = drafter.new_cache(len(context), length + block_size)
        drafter.inject_(drafter.fuse(context, recorded.lengths), positions, whole)
        # 2. Blocks, a few at a time: each has a copy of its sequence's cache
        per_row = sum(buffer[0].numel() * buffer.element_size() for buffer in whole.buffers)
        per_row += block_size * self.target.embedding_weight.shape[0] * 8
        size = max(1, _CACHE_BYTES // per_row)
        parts = [
            self._draft(drafter, context, whole, rows[i : i + size], anchors[i : i + size])
            for i in range(0, len(rows), size)
        ]
        drafts = torch.cat(parts)
        # 3. The longest prefix that is the target's answer
        ahead = anchors[:, None] + torch.arange(1, block_size, device=rows.device)
        inside = ahead < recorded.lengths[rows][:, None]
        answer = recorded.ids[rows[:, None], ahead.clamp(max=length - 1)]
        accepted = ((drafts == answer) & inside).long().cumprod(1).sum(1)
        return Score(1.0 + accepted.float(), (drafts >= 0).float().mean().item())

    def _draft(self, drafter: Drafter, context: Tensor, whole: KVCache, rows: Tensor, anchors: Tensor) -> Tensor:
        """Return what the proposer drafts greedily, ``[places, block - 1]``; -1 where a logit is NaN."""
        cache = drafter.new_cache(len(rows), whole.capacity)
        for mine, theirs in zip(cache.buffers, whole.buffers, strict=True):
            mine.copy_(theirs[rows])
        target = self.target if drafter.dtype == self.target.dtype else _Cast(self.target, drafter.dtype)
        block_size = drafter.config.block_size
        places = _Places(
            anchor=self.recording.ids[rows, anchors][:, None],
            length=anchors,
            context=context[rows, anchors - 1][:, None],
            num_context=torch.ones_like(rows),
            sampling=Sampling.create(len(rows), rows.device),
            draft_cache=cache,
            block=rows.new_empty(len(rows), block_size),
        )
        proposer = ChainProposer(drafter, cast("Target", target), len(rows), block_size)
        return proposer.propose(cast("State", places)).ids[:, 1:]


@dataclass
class _Places:
    """What a proposer reads of `dflash.proposers.State`, for anchors anywhere in recorded answers."""

    anchor: Tensor
    length: Tensor
    context: Tensor
    num_context: Tensor
    sampling: Sampling
    draft_cache: KVCache
    block: Tensor

    def positions(self, rows: int) -> Tensor:
        """Return ``[places, rows]`` int64, the positions after the anchor's."""
        return self.length[:, None] + torch.arange(1, rows + 1, device=self.length.device)


class _Cast:
    """What a proposer reads of a target, for a drafter of another dtype."""

    def __init__(self, target: Target, dtype: torch.dtype) -> None:
        self.config, self.head = target.config, target.head
        self.embedding_weight = target.embedding_weight.to(dtype)
        self._head, self._theirs, self._dtype = target.draft_head, target.dtype, dtype

    @property
    def draft_head(self) -> Callable[[Tensor], Tensor]:
        """The target's head, in its own dtype."""
        return self._run_head

    def _run_head(self, hidden: Tensor) -> Tensor:
        logits: Any = self._head(hidden.to(self._theirs))
        return logits.to(self._dtype)
