"""Where a row stands in its grammar, and which tokens that allows after each row of a block."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Matcher", "first_banned"]


class Matcher:
    """One row's place in its grammar.

    Args:
        grammar: what is matched; only kept.
        state: llguidance's, not in error.
        vocab_size: tokens that it knows.
        stop: the ids that end a row.

    Attributes:
        words: of a mask, 32 tokens in each.
    """

    def __init__(self, grammar: Hashable, state: LLMatcher, vocab_size: int, stop: frozenset[int]) -> None:
        self.grammar, self._state, self._vocab_size, self._stop = grammar, state, vocab_size, stop
        self.words = -(-vocab_size // 32)

    def copy(self) -> Matcher:
        """Return another at the same place; what both have learned of the grammar is shared."""
        return Matcher(self.grammar, self._state.deep_copy(), self._vocab_size, self._stop)

    def consume(self, ids: Sequence[int]) -> None:
        """Move on by emitted tokens.

        Raises:
            ValueError: the grammar does not allow them, or is too complex for llguidance's limits.
        """
        if not self._state.consume_tokens(list(ids)):
            raise ValueError(_reason(self._state))

    def fill_(self, masks: Tensor, ids: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Write which tokens may follow each row of a block.

        Of a chain, one call computes all masks, without Python's lock.

        Args:
            masks: ``[rows, words]`` int32 on the host, contiguous; bit ``i % 32`` of word ``i // 32`` is for token i.
                Rows that no match leads to, and those of stop tokens, are left as they are.
            ids: of the block's rows; the first is the anchor, which has been consumed; -1 for no proposal.
            parents: of a tree, the row that each row continues, -1 for none; None for a chain.

        Raises:
            ValueError: no token may follow the anchor.
        """
        if parents is None:
            drafts = self._texts(ids[1:])
            state = self._state.deep_copy()  # a draft may lead to an error, which llguidance never leaves
            state.unsafe_compute_mask_ptr_with_draft_token(masks.data_ptr(), 4 * self.words, drafts)
            if not state.is_error():
                return
            ids, parents = [ids[0], *drafts], range(-1, len(drafts))
        children: list[list[int]] = [[] for _ in ids]
        for row, parent in enumerate(parents):
            if parent >= 0 and self._is_text(ids[row]):
                children[parent].append(row)
        self._visit(self._state.deep_copy(), 0, masks, ids, children)

    def _visit(self, state: LLMatcher, row: int, masks: Tensor, ids: Sequence[int], children: list[list[int]]) -> None:
        """Write the masks of a row and of all that continue it."""
        state.unsafe_compute_mask_ptr(masks[row].data_ptr(), 4 * self.words)
        if state.is_error():  # llguidance would allow a stop token
            if row == 0:
                raise ValueError(_reason(state))
            masks[row] = 0
            return
        for child in children[row]:
            if _has(masks[row], ids[child]):
                ahead = state.deep_copy()
                ahead.consume_token(ids[child])
                self._visit(ahead, child, masks, ids, children)

    def _texts(self, drafts: Sequence[int]) -> list[int]:
        """Return the drafts before the first that is missing, a stop token or unknown."""
        return list(itertools.takewhile(self._is_text, drafts))

    def _is_text(self, token: int) -> bool:
        return 0 <= token < self._vocab_size and token not in self._stop


def first_banned(masks: Tensor, drafts: Sequence[int]) -> int | None:
    """Return the index of the first draft that is not allowed where another is; None if there is none.

    Args:
        masks: ``[at least drafts, words]``, as `Matcher.fill_` wrote them for the drafts.
        drafts: token ids; the first -1 ends them.
    """
    for place, token in enumerate(itertools.takewhile(lambda token: token >= 0, drafts)):
        if not _has(masks[place], token):
            return place if masks[place].any() else None
    return None


def _has(mask: Tensor, token: int) -> bool:
    return token < 32 * len(mask) and bool(mask[token // 32].item() >> token % 32 & 1)


def _reason(state: LLMatcher) -> str:
    """Return the first line of an error; the others show llguidance's insides."""
    return state.get_error().splitlines()[0]
