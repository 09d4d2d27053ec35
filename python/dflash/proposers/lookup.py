"""Look drafts up in the text so far: prompt lookup decoding (LLMA, arXiv 2304.04487)."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from ..state import Block, State


def look_up(tokens: Tensor, length: Tensor, ngram: int, count: int) -> Tensor:
    """Find an earlier place where each text's last tokens stood, and return the tokens that followed there.

    The latest place counts. If fewer than ``count`` tokens followed, they are repeated.

    Args:
        tokens: ``[batch, capacity]`` int64, the texts.
        length: ``[batch]`` int64, the index of each text's last token.
        ngram: number of last tokens to look for, at least 1.
        count: tokens to return.

    Returns:
        ``[batch, count]`` int64; -1 in a row whose last tokens are new.
    """
    if ngram > tokens.shape[1]:
        return tokens.new_full((len(tokens), count), -1)
    # 1. The last n-gram that equals the text's own and ends before it
    last, places, capacity = length[:, None], torch.arange(tokens.shape[1], device=tokens.device), tokens.shape[1]
    own = tokens.gather(1, (last - places[:ngram]).clamp(min=0))
    equal = places[ngram - 1 :] < last
    for back in range(ngram):
        equal = equal & (tokens[:, ngram - 1 - back : capacity - back] == own[:, back : back + 1])
    end = torch.where(equal, places[ngram - 1 :], -1).amax(1, keepdim=True)
    # 2. What followed it
    found = tokens.gather(1, end + 1 + places[:count] % (last - end).clamp(min=1))
    return torch.where(end < 0, -1, found)


class LookupProposer:
    """Drafts without a drafter: the tokens that followed the last ones at an earlier place.

    Args:
        ngram: see `look_up`; 0 proposes nothing, which is one-token decoding, padded to a block's shapes if it has more
            than one row.
        block_size: the most rows of a block, the anchor included.

    Attributes:
        rows: of the next block.
    """

    passes = 1

    def __init__(self, ngram: int, block_size: int) -> None:
        self.rows = self.block_size = block_size
        self._ngram = ngram

    def configure(self, *_: object) -> None:
        """Begin with whole blocks."""
        self.rows = self.block_size

    def follow_(self, *_: object) -> None:
        """Do nothing: there is no drafter's cache."""

    follow_prompt_ = follow_

    @property
    def kind(self) -> Hashable:
        """Key of the branches of `propose`."""
        return self._ngram, self.rows

    def propose(self, state: State) -> Block:
        """Return each row's anchor and its drafts; -1 for none."""
        count = self.rows - 1
        if self._ngram:
            drafts = look_up(state.tokens, state.length, self._ngram, count)
        else:
            drafts = state.block.new_full((len(state.block), count), -1)
        is_whole = self.rows == state.block.shape[1]
        return Block(torch.cat([state.anchor, drafts], 1, out=state.block if is_whole else None))
