"""Sampling parameters of a call, the logit rules of its rows, and the choice by keyed noise.

Tokens are chosen by keyed noise, ``argmax(filter(logits / temperature) + gumbel(seed, position, token id))``. A choice
depends only on seed, position and prefix, so the text is the same whatever the drafter proposes. This is
drafter-invariant speculative decoding (Daliri et al., "Coupling without communication and drafter-invariant speculative
decoding"). The noise is counter-based, Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..settings import LogitsProcessor, StoppingCriterion
from .rules import RULES, ChainTokens, Rows, Rule, Settings, TreeTokens

if TYPE_CHECKING:
    from ..state import Block, State

_SMALLEST_TEMPERATURE = 1e-30  # below it logits / temperature would overflow fp32
_LARGEST_FLOAT32 = torch.finfo(torch.float32).max


def _mix(x: int) -> int:
    """Return splitmix64's finalizer of a 64-bit integer."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def fold(seed: int, row: int) -> int:
    """Return the seed of a row in a batch: ``seed`` itself for row 0, else a hash (splitmix64) of both.

    Row r of a batch writes the same text as a single prompt with seed ``fold(seed, r)``.

    Args:
        seed: an int64 value.
        row: at least 0.
    """
    if row == 0:
        return seed
    folded = _mix((_mix(seed % 2**64) + row) % 2**64)
    return folded - 2**64 if folded >= 2**63 else folded


class SamplingArguments(NamedTuple):
    """Checked sampling settings of one call, see `dflash.settings.GenerateArguments`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | Sequence[int] | None = None
    draft_sharpness: float = 1.0

    @property
    def is_greedy(self) -> bool:
        """True if the temperature counts as 0."""
        return self.temperature < _SMALLEST_TEMPERATURE

    def seeds(self, rows: int) -> list[int]:
        """Return the seed of each row; None draws one from torch's generator, unless all is greedy.

        Raises:
            ValueError: the number of seeds is not ``rows``.
        """
        seed = self.seed
        if seed is None:
            seed = 0 if self.is_greedy else int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        if not isinstance(seed, Sequence):
            return list(map(functools.partial(fold, seed), range(rows)))
        if len(seed) != rows:
            raise ValueError(f"seed must be an integer or one per row, {rows} in all, got {len(seed)} of them")
        return list(seed)


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, one value per row, in tensors whose addresses never change.

    Attributes:
        seeds: ``[batch]`` int64.
        temperature: ``[batch]`` float32; 0 is greedy.
        top_k: ``[batch]`` int64; 0 is off.
        top_p: ``[batch]`` float32; 1 is off.
        min_p: ``[batch]`` float32; 0 is off.
        sharpness: ``[batch]`` float32, for the drafter.
        ones: ``[batch]`` float32, the target's sharpness.
    """

    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    sharpness: Tensor
    ones: Tensor

    @classmethod
    def create(cls, batch: int, device: torch.device | str = "cpu") -> Sampling:
        """Return greedy parameters for ``batch`` rows on ``device``."""

        ints = torch.zeros(batch, dtype=torch.int64, device=device)
        zeros = torch.zeros(batch, dtype=torch.float32, device=device)
        return cls(ints, zeros, ints.clone(), zeros + 1, zeros.clone(), zeros + 1, zeros + 1)

    def rows(self, rows: slice) -> Sampling:
        """Return the parameters of some rows; they share these tensors' memory."""
        return Sampling(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    def set_(self, rows: slice, arguments: SamplingArguments) -> None:
        """Write ``rows`` in place.

        Raises:
            ValueError: there are more or fewer seeds than rows.
        """
        sharpness, is_greedy = arguments.draft_sharpness, arguments.is_greedy
        seeds = arguments.seeds(len(self.seeds[rows]))
        self.seeds[rows] = torch.tensor(seeds, dtype=torch.int64, device="cpu")
        self.temperature[rows] = 0.0 if is_greedy else arguments.temperature
        self.top_k[rows] = min(arguments.top_k, 2**63 - 1)
        self.top_p[rows] = arguments.top_p
        self.min_p[rows] = arguments.min_p
        self.sharpness[rows] = math.inf if sharpness > _LARGEST_FLOAT32 else sharpness

    def select(self, logits: Tensor, positions: Tensor, sharpness: Tensor | None = None) -> Tensor:
        """Choose a token per row with keyed noise. See `dflash.ops.select_tokens`.

        Args:
            logits: ``[batch, rows, vocab]``, any floating dtype.
            positions: ``[batch, rows]`` int64, positions of the tokens that are chosen; ``[batch]``, that of the token
                before the first.
            sharpness: ``[batch]`` float32 for drafts; None for the target's choices.

        Returns:
            ``[batch, rows]`` int64; -1 where a logit is NaN.
        """
        return ops.select_tokens(
            logits, positions, self.seeds, self.temperature, self.top_k, self.top_p, self.min_p,
            self.ones if sharpness is None else sharpness,
        )  # fmt: skip


class KeyedAcceptance:
    """Choices by keyed noise: a function of seed, position and prefix, never of the proposals (Daliri et al.)."""

    def choose(self, logits: Tensor, block: Block, state: State) -> Tensor:
        """Return the target's choices ``[batch, rows]`` after the rows of a block; `Engine.commit_` compares them."""
        return state.sampling.select(logits, state.length if block.tree is None else state.chosen_positions(block))


# ------------------------------------------------------------------------------------------------- all rules of a step


class LogitRules:
    """The rules of a step. Settings with the same `layout` share one object, and one captured step.

    Args:
        settings: the rules of each row; `set_` writes the values of other settings of the same layout.
        vocab_size: of the target's embeddings; its logits may be narrower.
        device: of the tensors.
    """

    def __init__(self, settings: Sequence[Settings], vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.rules = [rule(rows, vocab_size, torch.device(device)) for rule, rows in _rows_with_rules(settings)]
        self._reads_sequence = any(rule.reads_sequence for rule in self.rules)

    @staticmethod
    def layout(settings: Sequence[Settings]) -> tuple:
        """Return the key of a captured step; equal layouts may share a LogitRules. Empty without a rule."""
        return tuple(rule.layout(rows) for rule, rows in _rows_with_rules(settings))

    def set_(self, settings: Sequence[Settings]) -> None:
        """Write the values of settings with the same layout in place."""
        for rule, (_, rows) in zip(self.rules, _rows_with_rules(settings), strict=True):
            rule.set_(rows, self.vocab_size)

    def apply(self, logits: Tensor, block: Block, state: State) -> Tensor:
        """Apply every rule to the logits of a block's rows.

        Pure, of fixed shapes and without host synchronization. Ignore the result after a row's first wrong draft.

        Args:
            logits: ``[batch, rows, vocab]``, float32 or bfloat16; row j is for position ``length + 1 + j``, in a tree
                for ``length + 1 + depth[j]``.
            block: the last emitted token and drafts.
            state: the state before the step.

        Returns:
            ``[batch, rows, vocab]`` float32; ``logits`` itself without any rule.
        """
        if not self.rules:
            return logits
        ids, tree = block.input_ids, block.tree
        ahead = torch.arange(1, logits.shape[1] + 1, device=logits.device) if tree is None else tree.depth + 1
        rows = _rows(state, ahead)._replace(block=ids, tree=tree)
        if self._reads_sequence and tree is None:
            rows = rows._replace(sequence=ChainTokens(state.tokens, ids, rows.positions))
        elif self._reads_sequence:
            rows = rows._replace(sequence=TreeTokens(state.tokens, ids, state.length, tree))
        logits = logits.float()
        for rule in self.rules:
            logits = rule.apply(logits, rows)
        return logits

    def apply_to_drafts(self, logits: Tensor, state: State, first: int = 0) -> Tensor:
        """Apply to the drafter's ``logits [batch, rows, vocab]`` the rules that certainly change the target's choice.

        The rows are those of a block's drafts from ``first`` on.

        These are bans, forced tokens, and biases of at least 10 in size. Penalties and small biases are left out: the
        target's logits are further apart than a drafter's, so they change few of its choices. Drafts change the speed,
        never the text.
        """
        if not self.rules:
            return logits
        rows = _rows(state, torch.arange(first + 1, first + logits.shape[1] + 1, device=logits.device))
        for rule in self.rules:
            if rule.for_drafts:
                logits = rule.apply_to_drafts(logits, rows)
        return logits


def _rows(state: State, ahead: Tensor) -> Rows:
    return Rows(state.length[:, None] + ahead, state.prompt_length[:, None], state.limits[:, None], state)


def _rows_with_rules(settings: Sequence[Settings]) -> Iterator[tuple[type[Rule], list[Settings | None]]]:
    """Yield each rule in use, once per value of its constants, with each row's settings (None for other rows)."""
    unique = {id(row): row for row in settings if row}
    if not unique:
        return
    for rule in RULES:
        kinds = {key: tuple(rule.constants(row).items()) for key, row in unique.items() if rule.values(row, 0)}
        for kind in sorted(set(kinds.values())):
            yield rule, [row if kinds.get(id(row)) == kind else None for row in settings]


@dataclass(frozen=True)
class HostRules:
    """Python processors and criteria for the first ``rows`` rows of a batch; see `dflash.call.GenerateArguments`."""

    processors: tuple[LogitsProcessor, ...]
    criteria: tuple[StoppingCriterion, ...]
    rows: int

    def process(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Call every processor in order.

        Args:
            ids: ``[1, length]`` int64, the row so far.
            scores: ``[1, vocab]`` float32; may be overwritten.

        Returns:
            ``[1, vocab]`` float32.

        Raises:
            TypeError: a processor did not return a tensor.
            ValueError: it returned another shape, or turned numbers into NaN.
        """
        shape, valid = scores.shape, not scores.isnan().any()
        for processor in self.processors:
            scores = processor(ids, scores)
            wanted = f"logits_processor {_name(processor)} must return scores {list(shape)}"
            if not isinstance(scores, Tensor):
                raise TypeError(f"{wanted}, got {type(scores).__name__}")
            if scores.shape != shape:
                raise ValueError(f"{wanted}, got {list(scores.shape)}")
            if valid and scores.isnan().any():
                raise ValueError(f"logits_processor {_name(processor)} returned NaN for position {ids.shape[1]}")
        return scores

    def stops(self, ids: Tensor) -> bool:
        """Ask every criterion, and return True if one of them ends the row ``ids [1, length]``."""
        results = []
        for criterion in self.criteria:
            result = criterion(ids, None)
            if not isinstance(result, (bool, Tensor)) or (isinstance(result, Tensor) and result.numel() != 1):
                got = list(result.shape) if isinstance(result, Tensor) else repr(result)
                raise TypeError(f"stopping_criteria {_name(criterion)} must return a bool or tensor of one, got {got}")
            results.append(bool(result))
        return any(results)


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)
