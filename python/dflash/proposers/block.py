"""What a proposer hands to the target, and what a proposer is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..cache import KVCache
from ..sampling import LogitRules, RejectionAcceptance, Sampling
from ..targets import Target
from ..tree import Tree

__all__ = ["Block", "ChainSettings", "DraftMasks", "PaddingProposer", "Proposer", "State", "Tree", "TreeSettings"]


class State(Protocol):
    """What proposers read of the engine's state.

    Attributes:
        tokens: ``[batch, capacity]`` int64.
        length: ``[batch]`` int64; ``tokens[b, : length[b] + 1]`` are emitted.
        prompt_length, limits: ``[batch]`` int64.
        num_context: ``[batch]`` int64, the tokens that the last step emitted.
        done: ``[batch]`` int64, 0 where the row is running.
        context: ``[batch, rows, taps * hidden]``, the target's features of the last chain, or of a tree's path.
        block: ``[batch, rows]`` int64, where a proposer writes a chain.
        anchor: ``[batch, 1]`` int64, each row's last emitted token.
        sampling: how each row samples.
        draft_cache: the drafter's cache.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor
    limits: Tensor
    num_context: Tensor
    done: Tensor
    context: Tensor
    block: Tensor
    sampling: Sampling
    draft_cache: KVCache

    @property
    def anchor(self) -> Tensor: ...

    def positions(self, rows: int) -> Tensor:
        """Return ``[batch, rows]`` int64, the positions after the anchor's."""
        ...


class Block(NamedTuple):
    """The rows that one step verifies: the anchor, then proposals for the positions after it.

    Attributes:
        ids: ``[batch, rows]`` int64; -1 where nothing is proposed.
        tree: which row continues which; None for a chain: each row continues the one before it.
        is_checked: the drafts are those that were last checked by `DraftMasks`, which then has the masks of their rows.
    """

    ids: Tensor
    tree: Tree | None = None
    is_checked: bool = False

    @property
    def input_ids(self) -> Tensor:
        """``[batch, rows]`` int64: ids that can be embedded, 0 where nothing is proposed."""
        return self.ids.clamp(min=0)


class DraftMasks(Protocol):
    """What finds drafts that are certain to be rejected."""

    def banned_drafts(self, drafts: Tensor, vocab_size: int) -> list[tuple[int, int, Tensor]]:
        """Return per row the first of ``drafts [batch, drafts]`` that is banned: row, index, ``[vocab]`` bool."""
        ...


class ChainSettings(NamedTuple):
    """How a call drafts chains.

    Attributes:
        rules: the logit rules of the call.
        rejection: draw from the drafter's distribution, which this remembers; None for keyed noise.
        passes: of the drafter over each block.
        masks: what the call's grammars allow; None for none.
    """

    rules: LogitRules
    rejection: RejectionAcceptance | None
    passes: int
    masks: DraftMasks | None = None


class TreeSettings(NamedTuple):
    """How a call drafts trees.

    Attributes:
        rules: the logit rules of the call.
        samples: the temperature is positive.
        rows: of the tree that is built.
        forecasts: tell what is expected of each size, by which a step's rows are chosen.
    """

    rules: LogitRules
    samples: bool
    rows: int
    forecasts: bool = False


class Proposer(Protocol):
    """Proposes blocks and learns from what became of them; tensors only, without host synchronization.

    Each kind has a `configure` of its own, which chooses how to draft in the next call.

    Attributes:
        rows: of the next block.
        kind: what the branches of `propose` depend on; a step is captured once per kind.
    """

    rows: int

    @property
    def kind(self) -> Hashable: ...

    def retarget(self, target: Target) -> None:
        """Use another twin of the same model."""
        ...

    def propose(self, state: State) -> Block:
        """Return the next block of every row."""
        ...

    def observe_(self, choices: Tensor, state: State) -> None:
        """Learn from the target's ``choices [batch, rows]``; ``state`` is that after the commit."""
        ...


class PaddingProposer:
    """Proposes nothing: one-token decoding, padded to a block's shapes if it has more than one row.

    Args:
        batch: rows of the batch.
        block_size: rows of a block.
        device: of the tensors.
    """

    kind = ()
    passes = 1

    def __init__(self, batch: int, block_size: int, device: torch.device | str = "cpu") -> None:
        self.rows = block_size
        self._nothing = torch.full((batch, block_size - 1), -1, dtype=torch.int64, device=device)

    def retarget(self, target: Target) -> None:
        """Do nothing: no target is used."""

    def configure(self, settings: ChainSettings) -> None:
        """Do nothing: there is nothing to choose."""

    def propose(self, state: State) -> Block:
        """Return each row's anchor, and -1 for the rest."""
        return Block(torch.cat([state.anchor, self._nothing], 1, out=state.block))

    def observe_(self, choices: Tensor, state: State) -> None:
        """Do nothing: there is nothing to learn."""
