"""Measure and check training rows, and hold out prompts for evaluation."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["HeldOut", "MeasuredRows", "hold_out"]

_READ_ROWS = 1024


class MeasuredRows:
    """Lengths, prompts and a digest of rows. Each row is checked against the target.

    A row's prompt is everything before the first token that the target wrote. If the target wrote the entire row, apart
    from a BOS token, the prompt is the first half.

    Args:
        rows: ``datasets.Dataset`` with ``input_ids`` and ``loss_mask``.
        config: the target's text config.
        mask_token_id: the drafter's mask token, which must not be among the tokens that the target wrote.
        what: name for a row in error messages.

    Attributes:
        lengths: length of each row in tokens.
        usable: numbers of the rows that have an anchor.
        prompt_lengths: length of the prompt of each usable row.
        keys: digest of the prompt of each usable row, the same for all answers to one prompt.
        digest: digest of all tokens and loss masks.

    Raises:
        ValueError: a row does not fit. The message names it.
    """

    def __init__(self, rows: Any, config: Any, mask_token_id: int, what: str = "row") -> None:
        self.lengths: list[int] = []
        self.usable: list[int] = []
        self.prompt_lengths: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}
        self._bos = getattr(config, "bos_token_id", None)
        digest = hashlib.sha256()
        for start in range(0, len(rows), _READ_ROWS):
            part = rows[start : start + _READ_ROWS]
            for ids, mask in zip(part["input_ids"], part["loss_mask"], strict=True):
                _check_row(f"{what} {len(self.lengths)}", ids, mask, config, mask_token_id)
                self._add(ids, mask)
                digest.update(len(ids).to_bytes(8, "little") + array("i", ids).tobytes() + bytes(m != 0 for m in mask))
        self.digest = digest.hexdigest()[:16]

    def _add(self, ids: Sequence[int], mask: Sequence[int]) -> None:
        """Record the measurements of the next row."""
        if any(a and b for a, b in itertools.pairwise(mask)):
            number, length = len(self.lengths), mask.index(1)
            if length == 0 or ids[:length] == [self._bos]:
                length = len(ids) // 2
            self.usable.append(number)
            self.prompt_lengths[number] = length
            self.keys[number] = hashlib.sha256(array("i", ids[:length]).tobytes()).digest()[:16]
        self.lengths.append(len(ids))

    def first_row_of_each_prompt(self) -> list[int]:
        """Return the first usable row of each prompt."""
        first: dict[bytes, int] = {}
        for row in self.usable:
            first.setdefault(self.keys[row], row)
        return list(first.values())


def _check_row(name: str, ids: Sequence[int], mask: Sequence[int], config: Any, mask_token_id: int) -> None:
    """Raise ``ValueError`` for a row that the target cannot have written or the drafter cannot learn from."""
    positions = getattr(config, "max_position_embeddings", None)
    if len(ids) != len(mask):
        raise ValueError(f"{name} has {len(ids)} input_ids and a loss_mask of {len(mask)}")
    if positions is not None and len(ids) > positions:
        raise ValueError(f"{name} has {len(ids)} tokens, the target has {positions} positions: cut it shorter")
    if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
        raise ValueError(f"{name} has token ids outside 0 .. {config.vocab_size - 1}, the vocabulary")
    if mask_token_id in ids and any(t == mask_token_id and m for t, m in zip(ids, mask, strict=True)):
        raise ValueError(
            f"{name} has the mask token {mask_token_id} among the tokens that the target wrote: choose a mask token "
            "that it never writes (--mask-token-id)"
        )


@dataclass(frozen=True)
class HeldOut:
    """A split into training rows and held-out prompts.

    Attributes:
        index: numbers of the rows to train on.
        prompts: token ids of the held-out prompts.
        dropped: number of usable rows left out of training because their prompt is held out.
    """

    index: list[int]
    prompts: list[list[int]]
    dropped: int


def hold_out(
    rows: Any,
    data: MeasuredRows,
    count: int,
    seed: int,
    heldout: Any = None,
    measured: MeasuredRows | None = None,
) -> HeldOut:
    """Hold out prompts, each with all rows that answer it.

    Args:
        rows: training rows.
        data: measurements of ``rows``.
        count: maximum number of held-out prompts; 0 for none.
        seed: seed of the random choice.
        heldout: separate rows to take the prompts from. Training rows that share a prompt with any of them are dropped.
            None draws prompts from ``rows``, at most a tenth of them.
        measured: measurements of ``heldout``.

    Returns:
        The split.

    Raises:
        ValueError: ``count`` is positive and no prompt can be held out, or no row is left to train on.
    """
    # 1. Choose the prompts to answer
    source, known = (rows, data) if measured is None else (heldout, measured)
    candidates = known.first_row_of_each_prompt()
    chosen = candidates[:count] if measured is not None else _draw(candidates, count, seed)
    if count and not chosen:
        raise ValueError(
            f"none of {len(candidates)} different prompts can be held out (--eval-rows {count}): give more prompts, "
            "held-out rows (--heldout), or --eval-rows 0"
        )
    # 2. Train on the rows of all other prompts
    held = {known.keys[row] for row in (chosen if measured is None else measured.usable)}
    index = [row for row in data.usable if data.keys[row] not in held]
    if not index:
        raise ValueError("every row answers a held-out prompt: there is nothing left to train on")
    prompts = [source[row]["input_ids"][: known.prompt_lengths[row]] for row in chosen]
    return HeldOut(index, prompts, len(data.usable) - len(index))


def _draw(candidates: Sequence[int], count: int, seed: int) -> list[int]:
    """Draw up to ``count`` candidates, at most a tenth of them, in their order."""
    most = max(1, len(candidates) // 10) if len(candidates) > 1 else 0
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
    return sorted(candidates[i] for i in order[: min(count, most)])
