"""What a logit rule is, and what it reads."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from .sequence import SeenTokens

if TYPE_CHECKING:
    from ...state import Tree

__all__ = ["IDS", "NUMBERS", "Drafts", "Rows", "Rule", "Settings", "Text", "filled", "slots", "upper_bound"]

Settings = Mapping[str, Any]
"""The rules of one row that are on, from `dflash.settings.resolve_rules`."""

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
    """One rule. Its values lie in tensors that keep their addresses, ``[batch, ...]`` per name in `values`.

    A row without the rule holds neutral values, so that its logits keep every bit.

    Attributes:
        for_drafts: True if the drafter's logits get the rule too, because it certainly changes the target's choice.
        reads_sequence: True if `apply` reads ``rows.sequence``.
        neutral: by name of a value, what it is for a row without the rule and at the end of a table that is shorter
            than another row's.
    """

    for_drafts = False
    reads_sequence = False
    neutral: ClassVar[Mapping[str, float]] = {}

    @staticmethod
    def values(settings: Settings, vocab_size: int) -> dict[str, Tensor]:
        """Return one row's tensors on the host, by attribute; empty if the rule is off.

        With ``vocab_size`` 0 only their shapes mean anything.
        """
        raise NotImplementedError

    @staticmethod
    def constants(settings: Settings) -> dict[str, Hashable]:
        """Return values of Python that the step branches on, by attribute."""
        return {}

    def __init__(self, rows: Sequence[Settings | None], vocab_size: int, device: torch.device) -> None:
        """``rows`` holds the settings of each row with this rule, all with the same constants; None for the others."""
        settings = next(row for row in rows if row is not None)
        for name, value in self.constants(settings).items():
            setattr(self, name, value)
        for name, tensor in self.stacked(rows, vocab_size).items():
            setattr(self, name, tensor.to(device))

    @classmethod
    def is_on(cls, settings: Settings) -> bool:
        """Return True if the settings ask for this rule."""
        return bool(cls.values(settings, 0))

    @classmethod
    def stacked(cls, rows: Sequence[Settings | None], vocab_size: int) -> dict[str, Tensor]:
        """Return the values of all rows on the host, ``[batch, ...]`` each."""
        found = {id(row): cls.values(row, vocab_size) for row in rows if row is not None}
        stacks = {}
        for name, fill in cls.neutral.items():
            tensors = [values[name] for values in found.values()]
            shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
            stack = tensors[0].new_full((len(rows), *shape), fill)
            for index, row in enumerate(rows):
                if row is not None:
                    tensor = found[id(row)][name]
                    stack[(index, *map(slice, tensor.shape))] = tensor
            stacks[name] = stack
        return stacks

    @classmethod
    def layout(cls, rows: Sequence[Settings | None]) -> tuple:
        """Return what a captured step depends on: the constants and the shapes."""
        constants = next(cls.constants(row) for row in rows if row is not None)
        shapes = ((name, *tensor.shape) for name, tensor in cls.stacked(rows, 0).items())
        return cls.__name__, *constants.items(), *shapes

    def set_(self, rows: Sequence[Settings | None], vocab_size: int) -> None:
        """Write the values of settings with the same layout in place."""
        for name, tensor in self.stacked(rows, vocab_size).items():
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
