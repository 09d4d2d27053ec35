"""Record a target's states over its answers, and draft again from them, wired in any way."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..drafter import Drafter
from ..proposers import ChainProposer
from ..sampling import Sampling
from ..targets import Target, check_target, find_layers, structural_copy, tapped_modules
from .prompts import Answered
from .wiring import Wiring

RAW_LAST = -1  # the last layer, before the final norm
_CACHE_BYTES = 2**28  # of the drafter's caches and logits in one pass


class Recording(NamedTuple):
    """A sequence, and the outputs of the target's layers over it."""

    ids: Tensor  # [length]
    prompt_length: int
    states: dict[int, Tensor]  # layer -> [length, hidden]; `RAW_LAST` is the last before the final norm


@torch.no_grad()
def record(target: nn.Module, sequences: Sequence[Answered], layers: Collection[int]) -> list[Recording]:
    """Run the target once over each sequence. The model itself is not changed.

    Args:
        target: a causal language model of transformers that the engine supports.
        sequences: prompts with the target's answers.
        layers: whose outputs are kept; the last layer's twice, after the final norm and before it.
    """
    # 1. Hook a copy that shares the weights
    model: Any = structural_copy(check_target(target, spread=False))
    every = find_layers(model)
    modules: dict[int, Any] = dict(zip(layers, tapped_modules(model, tuple(layers)), strict=True))
    if len(every) - 1 in modules:
        modules[RAW_LAST] = every[-1]
    kept: dict[int, Tensor] = {}
    for layer, module in modules.items():
        module.register_forward_hook(functools.partial(_keep, kept, layer))
    # 2. Run it, sequence by sequence: padding would cost memory, and on a CPU more time than it saves
    device, recordings = model.get_input_embeddings().weight.device, []
    for one in sequences:
        ids = torch.tensor(one.ids, dtype=torch.int64, device=device)
        model.get_decoder()(input_ids=ids[None], use_cache=False)
        recordings.append(Recording(ids, one.prompt_length, dict(kept)))
    return recordings


def _keep(kept: dict[int, Tensor], layer: int, _module: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
    states = output[0] if isinstance(output, tuple) else output  # [1, length, hidden]
    kept[layer] = states[0]


class Score(NamedTuple):
    """What one wiring accepts."""

    tokens: Tensor  # [places], tokens per step: the accepted drafts and the target's own
    valid: float  # share of the rows that draft a token; a NaN drafts none

    @property
    def mean(self) -> float:
        """Tokens per step over all places."""
        return self.tokens.mean().item()


class Replay:
    """Drafts at the same places of the same answers for every wiring, as a step does: one pass of the proposer each.

    Args:
        recordings: of the target's greedy answers.
        target: the copy whose embeddings and head the drafter shares.
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
        target: Any = self.target if drafter.dtype == self.target.dtype else _cast(self.target, drafter.dtype)
        rows, anchors = self.rows[::every], self.anchors[::every]
        accepted, drafts = [], []
        for row, recording in enumerate(self.recordings):
            places = anchors[rows == row]
            if not len(places):
                continue
            context = torch.cat([recording.states[layer] for layer in layers], -1)[None].to(drafter.dtype)
            drafts.append(_draft(drafter, target, recording.ids, context, places))
            accepted.append(_accepted(drafts[-1], recording.ids, places))
        return Score(1.0 + torch.cat(accepted).float(), (torch.cat(drafts) >= 0).float().mean().item())


def _accepted(drafts: Tensor, ids: Tensor, anchors: Tensor) -> Tensor:
    """Return the length of the longest prefix of ``drafts [places, count]`` that the sequence continues with."""
    ahead = _positions(anchors, drafts.shape[1])
    inside = ahead < len(ids)
    return ((drafts == ids[ahead.clamp(max=len(ids) - 1)]) & inside).long().cumprod(1).sum(1)


def _draft(drafter: Drafter, target: Target, ids: Tensor, context: Tensor, anchors: Tensor) -> Tensor:
    """Draft ``[places, block - 1]`` after each anchor of a sequence, as a step does; -1 where a logit is NaN.

    ``ids`` are ``[length]``, ``context`` has its tapped states ``[1, length, taps * hidden]``.
    """
    # 1. Compute the keys and values of the whole context once
    block_size, length = drafter.config.block_size, torch.tensor([len(ids)], dtype=torch.int64, device=ids.device)
    whole = drafter.new_cache(1, len(ids) + block_size)
    drafter.inject_(drafter.fuse(context, length), torch.arange(len(ids), device=ids.device)[None], whole)
    # 2. Draft at as many places at a time as memory allows
    per_place = sum(buffer.numel() * buffer.element_size() for buffer in whole.buffers)
    per_place += block_size * target.embedding_weight.shape[0] * 8
    drafts = []
    for part in anchors.split(max(1, _CACHE_BYTES // per_place)):
        count = len(part)
        cache = drafter.new_cache(count, whole.capacity)
        for copies, buffer in zip(cache.buffers, whole.buffers, strict=True):
            copies.copy_(buffer.expand_as(copies))
        state: Any = SimpleNamespace(  # what a proposer reads of the engine's state
            tokens=ids.expand(count, -1),
            anchor=ids[part][:, None],
            length=part,
            context=context[0, part - 1][:, None],
            num_context=torch.ones_like(part),
            sampling=Sampling.create(count, part.device),
            draft_cache=cache,
            block=part.new_empty(count, block_size),
            positions=functools.partial(_positions, part),
        )
        drafts.append(ChainProposer(drafter, target, block_size).propose(state).ids[:, 1:])
    return torch.cat(drafts)


def _positions(anchors: Tensor, rows: int) -> Tensor:
    """Return ``[places, rows]`` int64, the positions after each anchor's."""
    return anchors[:, None] + torch.arange(1, rows + 1, device=anchors.device)


def _cast(target: Target, dtype: torch.dtype) -> Any:
    """Return what a proposer reads of a target, for a drafter of another dtype."""
    return SimpleNamespace(
        config=target.config,
        head=target.head,
        embedding_weight=target.embedding_weight.to(dtype),
        draft_head=lambda hidden: target.draft_head(hidden.to(target.dtype)).to(dtype),
    )
