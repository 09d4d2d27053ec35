"""Draft again from recorded states, wired in any way, and count what the target's own answer accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..cache import KVCache
from ..drafter import Drafter
from ..target import Target
from .recording import RAW_LAST, Recording
from .wiring import Wiring

__all__ = ["Replay", "Score"]

_CACHE_BYTES = 2**28  # of the drafter's caches and logits in one pass


class Score(NamedTuple):
    """What one wiring accepts.

    Attributes:
        tokens: ``[anchors]`` float32, tokens per step: the accepted drafts and the target's own.
        finite: share of the drafted rows without NaN and infinity.
    """

    tokens: Tensor
    finite: float

    @property
    def mean(self) -> float:
        """Tokens per step over all anchors."""
        return self.tokens.mean().item()


class Replay:
    """Drafts at the same anchors of the same answers for every wiring, one pass of the drafter each.

    Args:
        recording: of the target's greedy answers.
        target: the twin whose embeddings and head the drafter shares.
        drafter: its weights.
        per_prompt: anchors of each answer at most, spread evenly.
    """

    def __init__(self, recording: Recording, target: Target, drafter: Drafter, per_prompt: int) -> None:
        self.recording, self.target, self.drafter = recording, target, drafter
        self.last_layer = target.config.num_hidden_layers - 1
        where = []
        bounds = zip(recording.prompt_lengths.tolist(), recording.lengths.tolist(), strict=True)
        for row, (first, length) in enumerate(bounds):
            count = min(per_prompt, length - 1 - first)  # every anchor has a token after it
            for place in torch.linspace(first, length - 2, max(count, 0)).long().unique().tolist():
                where.append((row, place))
        if not where:
            raise ValueError("every answer is shorter than two tokens: nothing can be drafted, give other prompts")
        self.rows, self.anchors = torch.tensor(where, device=recording.ids.device).unbind(1)

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
        """Draft at the anchors, or at ``every`` so many of them, and compare with the target's answer."""
        drafter, config = wiring.apply(self.drafter), wiring.config
        rows, anchors = self.rows[::every], self.anchors[::every]
        # 1. The whole context's keys and values, once per sequence
        recorded = self.recording
        length = recorded.ids.shape[1]
        positions = torch.arange(length, device=rows.device).expand(len(recorded.ids), -1)
        positions = torch.where(positions < recorded.lengths[:, None], positions, -1)
        features = drafter.fuse(self.context(wiring).to(drafter.dtype), recorded.lengths)
        whole = drafter.new_cache(len(features), length + config.block_size)
        drafter.inject_(features, positions, whole)
        # 2. Blocks, a few at a time: each has a copy of its sequence's cache
        per_row = sum(buffer[0].numel() * buffer.element_size() for buffer in whole.buffers)
        per_row += config.block_size * self.target.embedding_weight.shape[0] * 8
        size = max(1, _CACHE_BYTES // per_row)
        parts = [
            self._draft(drafter, features, whole, rows[i : i + size], anchors[i : i + size])
            for i in range(0, len(rows), size)
        ]
        drafts, finite = (torch.cat(part) for part in zip(*parts, strict=True))
        # 3. The longest prefix that is the target's answer
        ahead = anchors[:, None] + torch.arange(1, config.block_size, device=rows.device)
        inside = ahead < recorded.lengths[rows][:, None]
        answer = recorded.ids[rows[:, None], ahead.clamp(max=length - 1)]
        accepted = ((drafts == answer) & inside).long().cumprod(1).sum(1)
        return Score(1.0 + accepted.float(), finite.float().mean().item())

    def _draft(
        self, drafter: Drafter, features: Tensor, whole: KVCache, rows: Tensor, anchors: Tensor
    ) -> Sequence[Tensor]:
        """Return ``(drafts, finite)``, each ``[anchors, block - 1]``; a row that is not finite drafts -1."""
        config = drafter.config
        cache = drafter.new_cache(len(rows), whole.capacity)
        for mine, theirs in zip(cache.buffers, whole.buffers, strict=True):
            mine.copy_(theirs[rows])
        block = torch.full((len(rows), config.block_size), config.mask_token_id, device=rows.device)
        block[:, 0] = self.recording.ids[rows, anchors]
        embeds = nn.functional.embedding(block, self.target.embedding_weight).to(drafter.dtype)
        nothing = torch.zeros_like(rows)
        hidden = drafter(features[rows, :0], nothing, drafter.scale_embeddings(embeds), anchors, cache)
        hidden = hidden[:, 1:].flatten(0, 1).to(self.target.dtype)
        logits = drafter.logits(hidden, self.target.draft_head)
        finite = logits.isfinite().all(-1)
        drafts = torch.where(finite, logits.argmax(-1), -1)
        return drafts.unflatten(0, (len(rows), -1)), finite.unflatten(0, (len(rows), -1))
