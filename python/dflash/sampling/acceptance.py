"""The ways to accept a drafted block: the target's choice for the position after each of its rows.

A proposal is accepted if it equals the choice. ``ops.accept_prefix_`` and, in a tree, ``ops.accept_path_`` keep the
longest accepted path and one choice more, whatever the way.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from . import rejection
from .parameters import Sampling

__all__ = ["Acceptance", "KeyedAcceptance", "RejectionAcceptance"]


class Rows(Protocol):
    """What is read of a block: ``ids [batch, rows]`` int64, the anchor, then proposals; ``tree``, None for a chain."""

    @property
    def ids(self) -> Tensor: ...

    @property
    def tree(self) -> Any: ...


class Place(Protocol):
    """What is read of the engine's state: how each row samples, and where it is.

    Attributes:
        sampling: see there.
        length: ``[batch]`` int64, the positions of the blocks' anchors.
    """

    sampling: Sampling
    length: Tensor

    def chosen_positions(self, block: Any) -> Tensor:
        """Return ``[batch, rows]`` int64, the positions of the tokens that a block's rows choose."""
        ...


class Acceptance(Protocol):
    """One way to accept a block."""

    def choose(self, logits: Tensor, block: Rows, state: Place) -> Tensor:
        """Return the target's choices ``[batch, rows]`` int64 from ``logits [batch, rows, vocab]``; -1 for NaN."""
        ...


class KeyedAcceptance:
    """Choose by keyed noise: a function of seed, position and prefix, never of the proposals (Daliri et al.).

    Args:
        batch: rows of the batch.
        device: of the tensors.
    """

    def __init__(self, batch: int, device: torch.device | str = "cpu") -> None:
        self._sharpness = torch.ones(batch, dtype=torch.float32, device=device)  # the target's

    def choose(self, logits: Tensor, block: Rows, state: Place) -> Tensor:
        """Return the choices ``[batch, rows]``; see `Acceptance`."""
        positions = state.length if block.tree is None else state.chosen_positions(block)
        return self.choose_at(logits, positions, state)

    def choose_at(self, logits: Tensor, positions: Tensor, state: Place) -> Tensor:
        """Return the choices ``[batch, rows]`` for ``positions``, as `dflash.sampling.Sampling.select` takes them."""
        return state.sampling.select(logits, positions, self._sharpness)


class RejectionAcceptance:
    """Classic speculative sampling (`dflash.sampling.rejection`): draws the drafts, and accepts or replaces them.

    Args:
        batch: rows of the batch.
        drafts: proposals per block.
        vocab_size: of the logits.
        device: of the tensors.

    Attributes:
        STREAM: of the noise that proposals are drawn with.
        draft_probabilities: ``[batch, drafts, vocab]`` float32, what the drafts were drawn from.
    """

    STREAM = rejection.DRAFT

    def __init__(self, batch: int, drafts: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.draft_probabilities = torch.zeros(batch, drafts, vocab_size, dtype=torch.float32, device=device)

    def draft(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
        """Draw proposals ``[batch, 1, drafts]`` from the drafter's ``logits [batch, drafts, vocab]``."""
        self.draft_probabilities.copy_(rejection.probabilities(logits, sampling))
        return rejection.propose(self.draft_probabilities, positions, sampling.seeds)[:, None]

    def remember_(self, drafts: Tensor, ids: Tensor, scores: Tensor) -> None:
        """Keep what proposals were drawn from that `dflash.ops.walk_candidates` drew with the noise of `STREAM`.

        Args:
            drafts: ``[batch, drafts]`` int64, the proposals.
            ids: ``[batch, drafts, count]`` int64, the candidates.
            scores: ``[batch, drafts, count]`` float32, the walk's.
        """
        vocab = self.draft_probabilities.shape[-1]
        self.draft_probabilities.copy_(rejection.walk_probabilities(drafts, ids, scores, vocab))

    def choose(self, logits: Tensor, block: Rows, state: Place) -> Tensor:
        """Return the choices ``[batch, rows]``; see `Acceptance`."""
        p = rejection.probabilities(logits, state.sampling)
        positions = state.chosen_positions(block)
        return rejection.verify(block.ids[:, 1:], self.draft_probabilities, p, positions, state.sampling.seeds)
