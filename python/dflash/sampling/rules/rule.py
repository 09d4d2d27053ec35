"""What a logit rule is, and what it reads."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...tree import Tree
from .sequence import SeenTokens
from .settings import RuleSettings

__all__ = ["IDS", "NUMBERS", "Drafts", "Rows", "Rule", "Text", "filled", "slots", "upper_bound"]

# Values of rules on the host, whatever dtype and device the user has made the default.
IDS: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
NUMBERS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


class Text(Protocol):
    """What rules read of the engine's state; ``tokens[b, : length[b] + 1]`` are emitted.

    Attributes:
        tokens: ``[batch, capacity]`` int64.
        length: ``[batch]`` int64.
        prompt_length: ``[batch]`` int64.
        limits: ``[batch]`` int64, the length at which each row ends.
    """

    tokens: Tensor
    length: Tensor
    prompt_length: Tensor
    limits: Tensor


class Drafts(Protocol):
    """What rules read of a block.

    Attributes:
        input_ids: ``[batch, rows]`` int64, the last emitted token, then drafts.
        tree: which row continues which; None for a chain.
    """

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def tree(self) -> Tree | None: ...


class Rows(NamedTuple):
    """The rows of one block, as rules see them.

    Attributes:
        positions: ``[batch, rows]`` int64, the position of the token that each row chooses.
        prompt: ``[batch, 1]`` int64, tokens in the prompt.
        limits: ``[batch, 1]`` int64, the length at which each row ends.
        text: the state.
        block: ``[batch, rows]`` int64, the last emitted token, then drafts; None for the drafter's own logits.
        tree: which row of the block continues which; None for a chain, and for the drafter's own logits.
        sequence: the tokens before ``positions`` as each row sees them. None where no rule needs it.
    """

    positions: Tensor
    prompt: Tensor
    limits: Tensor
    text: Text
    block: Tensor | None = None
    tree: Tree | None = None
    sequence: SeenTokens | None = None


class Rule:
    """One rule. Its values lie in tensors that keep their addresses, one attribute per name in `values`.

    Attributes:
        for_drafts: True if the drafter's logits get the rule too, because it certainly changes the target's choice.
        reads_sequence: True if `apply` reads ``rows.sequence``.
    """

    for_drafts = False
    reads_sequence = False

    @staticmethod
    def values(settings: RuleSettings, vocab_size: int) -> dict[str, Tensor]:
        """Return the rule's tensors on the host, by attribute; empty if the rule is off.

        With ``vocab_size`` 0 only their shapes mean anything.
        """
        raise NotImplementedError

    @staticmethod
    def constants(settings: RuleSettings) -> dict[str, Hashable]:
        """Return values of Python that the step branches on, by attribute."""
        return {}

    def __init__(self, settings: RuleSettings, vocab_size: int, device: torch.device) -> None:
        for name, value in self.constants(settings).items():
            setattr(self, name, value)
        for name, tensor in self.values(settings, vocab_size).items():
            setattr(self, name, tensor.to(device))

    @classmethod
    def is_on(cls, settings: RuleSettings) -> bool:
        """Return True if the settings ask for this rule."""
        return bool(cls.values(settings, 0))

    @classmethod
    def layout(cls, settings: RuleSettings) -> tuple:
        """Return what a captured step depends on: the constants and the shapes."""
        shapes = ((name, *tensor.shape) for name, tensor in cls.values(settings, 0).items())
        return cls.__name__, *cls.constants(settings).items(), *shapes

    def set_(self, settings: RuleSettings, vocab_size: int) -> None:
        """Write the values of settings with the same layout in place."""
        for name, tensor in self.values(settings, vocab_size).items():
            getattr(self, name).copy_(tensor)

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        """Return the logits ``[batch, rows, vocab]`` float32 under this rule."""
        raise NotImplementedError

    def apply_to_drafts(self, logits: Tensor, rows: Rows) -> Tensor:
        """Return the drafter's logits under this rule; ``rows.block`` and ``rows.sequence`` are None."""
        return self.apply(logits, rows)


def filled(ids: Iterable[int], value: float, others: float, vocab_size: int) -> Tensor:
    tensor = torch.full((vocab_size,), others, **NUMBERS)
    if vocab_size:
        tensor[list(ids)] = value
    return tensor


def upper_bound(ids: Iterable[int], vocab_size: int) -> Tensor:
    """Return an upper bound of the logits ``[vocab]``: -inf for ``ids``, infinity for the others."""
    return filled(ids, -math.inf, math.inf, vocab_size)


def slots(count: int) -> int:
    """Return the slots of a table with ``count`` entries: a power of two, so that few shapes are ever compiled."""
    return 1 << max(count - 1, 0).bit_length()
