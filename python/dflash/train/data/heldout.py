"""What a run knows of its rows before it starts, and which prompts it holds out."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Measured", "Split", "split"]


class Measured:
    """Lengths, prompts and a digest of rows, each checked against the target.

    A row's prompt is what comes before the first token that the target wrote; that of a row which is all the target's,
    but for a BOS token, is its first half.

    Args:
        rows: ``datasets.Dataset`` with ``input_ids`` and ``loss_mask``.
        config: the target's text config.
        mask_token_id: the drafter's, which the target must not have written.
        what: what messages call a row.

    Attributes:
        lengths: tokens of each row.
        usable: rows that have an anchor.
        prompts: of those, how many tokens their prompts have.
        keys: of those, a digest of the prompt; answers to one prompt share it.
        digest: of all tokens and loss masks.

    Raises:
        ValueError: a row does not fit; it is named.
    """

    def __init__(self, rows: Any, config: Any, mask_token_id: int, what: str = "row") -> None:
        limit, bos = getattr(config, "max_position_embeddings", None), getattr(config, "bos_token_id", None)
        self.lengths: list[int] = []
        self.usable: list[int] = []
        self.prompts: dict[int, int] = {}
        self.keys: dict[int, bytes] = {}
        digest = hashlib.sha256()
        for start in range(0, len(rows), 1024):
            part = rows[start : start + 1024]
            for ids, mask in zip(part["input_ids"], part["loss_mask"], strict=True):
                number = len(self.lengths)
                row = f"{what} {number}"
                if len(ids) != len(mask):
                    raise ValueError(f"{row} has {len(ids)} input_ids and a loss_mask of {len(mask)}")
                if limit is not None and len(ids) > limit:
                    raise ValueError(f"{row} has {len(ids)} tokens, the target has {limit} positions: cut it shorter")
                if ids and not 0 <= min(ids) <= max(ids) < config.vocab_size:
                    raise ValueError(f"{row} has token ids outside 0 .. {config.vocab_size - 1}, the vocabulary")
                if mask_token_id in ids and any(t == mask_token_id and m for t, m in zip(ids, mask, strict=True)):
                    raise ValueError(
                        f"{row} has the mask token {mask_token_id} among the tokens that the target wrote: the mask "
                        "must be a token that it never writes (--mask-token-id)"
                    )
                if any(a and b for a, b in itertools.pairwise(mask)):
                    count = mask.index(1)
                    if count == 0 or ids[:count] == [bos]:
                        count = len(ids) // 2
                    self.usable.append(number)
                    self.prompts[number] = count
                    self.keys[number] = hashlib.sha256(array("i", ids[:count]).tobytes()).digest()[:16]
                self.lengths.append(len(ids))
                digest.update(len(ids).to_bytes(8, "little") + array("i", ids).tobytes() + bytes(m != 0 for m in mask))
        self.digest = digest.hexdigest()[:16]

    def one_a_prompt(self) -> list[int]:
        """The first usable row of each prompt."""
        first: dict[bytes, int] = {}
        for row in self.usable:
            first.setdefault(self.keys[row], row)
        return list(first.values())


@dataclass(frozen=True)
class Split:
    """Which rows are trained on, and the prompts that are not.

    Attributes:
        index: rows to train on.
        prompts: ids of the held-out prompts to answer.
        dropped: rows that are not trained on, because their prompt is held out.
    """

    index: list[int]
    prompts: list[list[int]]
    dropped: int


def split(
    rows: Any,
    data: Measured,
    count: int,
    seed: int,
    heldout: Any = None,
    asked: Measured | None = None,
) -> Split:
    """Hold ``count`` prompts out, each with all rows that answer it.

    Args:
        rows, data: the rows to train on, and what is known of them.
        count: held-out prompts at most; 0 for none.
        seed: of the draw.
        heldout, asked: rows of the held-out prompts, and what is known of them; None draws prompts from ``rows``, a
            tenth of them at most. Rows that share a prompt with any of ``heldout`` are not trained on.

    Raises:
        ValueError: prompts are wanted and there is none, or no row is left to train on.
    """
    known, source = (data, rows) if asked is None else (asked, heldout)
    candidates = known.one_a_prompt()
    chosen = candidates[:count]
    if asked is None:
        most = max(1, len(candidates) // 10) if len(candidates) > 1 else 0
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(seed)).tolist()
        chosen = sorted(candidates[i] for i in order[: min(count, most)])
    if count and not chosen:
        raise ValueError(
            f"none of {len(candidates)} different prompts can be held out to be answered (--eval-rows {count}): give "
            "more of them, held-out rows (--heldout), or --eval-rows 0"
        )
    held = {known.keys[row] for row in (chosen if asked is None else asked.usable)}
    index = [row for row in data.usable if data.keys[row] not in held]
    if not index:
        raise ValueError("every row answers a held-out prompt: there is nothing left to train on")
    prompts = [source[row]["input_ids"][: known.prompts[row]] for row in chosen]
    return Split(index, prompts, len(data.usable) - len(index))
