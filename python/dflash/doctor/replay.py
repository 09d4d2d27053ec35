"""Draft again from recorded states, wired in any way, and count what the target's own answer accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..cache import KVCache
from ..drafter import Drafter
from ..proposers import ChainProposer
from ..sampling import Sampling
from ..state import State
from ..targets import Target
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
        recordings: of the target's greedy answers.
        target: the twin whose embeddings and head the drafter shares.
        drafter: its weights.
        per_prompt: places of each answer at most, spread evenly.

    Attributes:
        anchors: ``[places]`` int64, the position of each place's last token before the drafts.
        rows: ``[places]`` int64, its answer; in ascending order.
    """

    def __init__(self, recordings: Sequence[Recording], target: Target, drafter: Drafter, per_prompt: int) -> None:
        self.recordings, self.target, self.drafter = recordings, target, drafter
        self.last_layer = target.config.num_hidden_layers - 1
        where: list[tuple[int, int]] = []
        for row, recording in enumerate(recordings):
            first, length = recording.prompt_length, len(recording.ids)
            count = min(per_prompt, length - 1 - first)  # every anchor has a token after it
            spread = torch.linspace(first, length - 2, max(count, 0), dtype=torch.float32, device="cpu")
            where.extend((row, place) for place in spread.long().unique().tolist())
        places = torch.tensor(where, dtype=torch.int64, device=drafter.device).view(-1, 2)
        self.rows, self.anchors = places.unbind(1)

    def can_read(self, wiring: Wiring) -> bool:
        """True if the states that the wiring taps were recorded."""
        return all(layer in self.recordings[0].states for layer in self.layers(wiring))

    def layers(self, wiring: Wiring) -> list[int]:
        """Return the recorded layers that the wiring taps."""
        is_raw = wiring.raw_last_tap
        return [RAW_LAST if is_raw and tap == self.last_layer else tap for tap in wiring.config.target_layer_ids]

    @torch.no_grad()
    def score(self, wiring: Wiring, every: int = 1) -> Score:
        """Draft at the places, or at one of ``every`` so many, and compare with the target's answer."""
        drafter, layers = wiring.apply(self.drafter), self.layers(wiring)
        target = self.target if drafter.dtype == self.target.dtype else _Cast(self.target, drafter.dtype)
        rows, anchors = self.rows[::every], self.anchors[::every]
        accepted, drafts = [], []
        for row, recording in enumerate(self.recordings):
            places = anchors[rows == row]
            if not len(places):
                continue
            context = torch.cat([recording.states[layer] for layer in layers], -1)[None].to(drafter.dtype)
            blocks = _Blocks(drafter, cast("Target", target), recording.ids, context)
            drafts.append(blocks.draft(places))
            accepted.append(_accepted(drafts[-1], recording.ids, places))
        return Score(1.0 + torch.cat(accepted).float(), (torch.cat(drafts) >= 0).float().mean().item())


def _accepted(drafts: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
    """Return the length of the longest prefix of ``drafts [places, count]`` that the sequence continues with."""
    ahead = anchors[:, None] + torch.arange(1, drafts.shape[1] + 1, device=anchors.device)
    inside = ahead < len(ids)
    return ((drafts == ids[ahead.clamp(max=len(ids) - 1)]) & inside).long().cumprod(1).sum(1)


class _Blocks:
    """Blocks drafted anywhere in one sequence, whose context has its keys and values computed once.

    Args:
        drafter: wired in any way.
        target: whose embeddings and head it shares.
        ids: ``[length]`` of the sequence.
        context: ``[1, length, taps * hidden]``, its tapped states.
    """

    def __init__(self, drafter: Drafter, target: Target, ids: Tensor, context: Tensor) -> None:
        self.drafter, self.target, self.ids, self.context = drafter, target, ids, context
        length = torch.tensor([len(ids)], dtype=torch.int64, device=ids.device)
        self.whole = drafter.new_cache(1, len(ids) + drafter.config.block_size)
        positions = torch.arange(len(ids), device=ids.device)[None]
        drafter.inject_(drafter.fuse(context, length), positions, self.whole)

    def draft(self, anchors: Tensor) -> Tensor:
        """Return the greedy drafts after each anchor, ``[places, block - 1]``; -1 where a logit is NaN."""
        block_size = self.drafter.config.block_size
        per_place = sum(buffer.numel() * buffer.element_size() for buffer in self.whole.buffers)
        per_place += block_size * self.target.embedding_weight.shape[0] * 8
        parts = anchors.split(max(1, _CACHE_BYTES // per_place))
        return torch.cat([self._draft(part, block_size) for part in parts])

    def _draft(self, anchors: Tensor, block_size: int) -> Tensor:
        count = len(anchors)
        cache = self.drafter.new_cache(count, self.whole.capacity)
        for copies, buffer in zip(cache.buffers, self.whole.buffers, strict=True):
            copies.copy_(buffer.expand_as(copies))
        places = _Places(
            tokens=self.ids.expand(count, -1),
            anchor=self.ids[anchors][:, None],
            length=anchors,
            context=self.context[0, anchors - 1][:, None],
            num_context=torch.ones_like(anchors),
            sampling=Sampling.create(count, anchors.device),
            draft_cache=cache,
            block=anchors.new_empty(count, block_size),
        )
        proposer = ChainProposer(self.drafter, self.target, block_size)
        return proposer.propose(cast("State", places)).ids[:, 1:]


@dataclass
class _Places:
    """What a proposer reads of `dflash.state.State`, for anchors anywhere in recorded answers."""

    tokens: Tensor
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
