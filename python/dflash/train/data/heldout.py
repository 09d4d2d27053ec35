"""Which prompts are held out, and what a run knows of its rows before it starts."""

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
    """Lengths, prompts and a digest of rows, each checked against the target.

    A row's prompt is what comes before the first token that the target wrote. Where the target wrote everything, except
    maybe a BOS token, it is the first half.

    Args:
        rows: ``datasets.Dataset`` with ``input_ids`` and ``loss_mask``.
        config: the target's text config.
        mask_token_id: the drafter's, which the target must not have written.
        what: what messages call a row.

    Attributes:
        lengths: tokens of each row.
        usable: rows that have an anchor.
        prompt_lengths: tokens of the prompt of each usable row.
        keys: a digest of the prompt of each usable row; answers to one prompt share it.
        digest: of all tokens and loss masks.

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
        """Measure the next row."""
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
            f"{name} has the mask token {mask_token_id} among the tokens that the target wrote: the mask must be a "
            "token that it never writes (--mask-token-id)"
        )


@dataclass(frozen=True)
class HeldOut:
    """Which rows are trained on, and which prompts are not.

    Attributes:
        index: rows to train on.
        prompts: ids of the held-out prompts to answer.
        dropped: how many usable rows are not trained on because their prompt is held out.
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
    """Hold prompts out, each with all rows that answer it.

    Args:
        rows: the rows to train on.
        data: ``rows``, measured.
        count: held-out prompts at most; 0 for none.
        seed: of the draw.
        heldout: rows whose prompts are held out; rows to train on that share a prompt with any of them are dropped.
            None draws prompts from ``rows``, a tenth of them at most.
        measured: ``heldout``, measured.

    Raises:
        ValueError: prompts are wanted and there is none, or no row is left to train on.
    """
    # 1. Choose the prompts to answer
    source, known = (rows, data) if measured is None else (heldout, measured)
    candidates = known.first_row_of_each_prompt()
    chosen = candidates[:count] if measured is not None else _draw(candidates, count, seed)
    if count and not chosen:
        raise ValueError(
            f"none of {len(candidates)} different prompts can be held out to be answered (--eval-rows {count}): give "
            "more of them, held-out rows (--heldout), or --eval-rows 0"
        )
    # 2. Train on the rows of all other prompts
    held = {known.keys[row] for row in (chosen if measured is None else measured.usable)}
    index = [row for row in data.usable if data.keys[row] not in held]
    if not index:
        raise ValueError("every row answers a held-out prompt: there is nothing left to train on")
    prompts = [source[row]["input_ids"][: known.prompt_lengths[row]] for row in chosen]
    return HeldOut(index, prompts, len(data.usable) - len(index))


def _draw(candidates: Sequence[int], count: int, seed: int) -> list[int]:
    """Draw up to ``count`` of the candidates, a tenth of them at most, in their order."""
    most = max(1, len(candidates) // 10) if len(candidates) > 1 else 0
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(candidates[i] for i in order[: min(count, most)])
