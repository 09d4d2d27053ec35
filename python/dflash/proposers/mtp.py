"""Chains of drafts from the head that a target brings for itself: a pass per draft."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import KVCache
from ..drafter import MtpHead, scale_logits
from ..state import State, scatter_rows
from .chain import Ban, ChainProposer


class MtpProposer(ChainProposer):
    """Drafts the tokens after each row's anchor with an `MtpHead`, each from the one before.

    The pair of a prompt's last position needs the first new token. So a prompt leaves that position's state in
    ``context``, and ``num_context`` at 1, for the first step. A prefix that was cached keeps the pair of its last
    position, with the token that followed then: a draft may be worse for it.

    Args:
        draft: the head.
        target: whose head makes logits of its outputs.
        block_size: the most rows of a block, the anchor included.
        ngram: see `ChainProposer`.
    """

    draft: MtpHead

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the target's head's logits ``[batch, rows, vocab]`` of what the draft head gave."""
        logits = self.target.draft_head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return scale_logits(logits, self._multiplier, self._softcap)

    def follow_(self, context: Tensor, state: State, rows: slice) -> None:
        length, num_context = state.length[rows], state.num_context[rows]
        self._take_up(context, num_context, length, state.tokens[rows], state.draft_cache.rows(rows))

    def follow_prompt_(self, features: Tensor, past: Tensor, live: Tensor, state: State, rows: slice) -> None:
        tokens, states = state.tokens[rows], state.context[rows]
        after = _places(past + 1, features.shape[1], tokens)
        self.draft(tokens.gather(1, after), features, past, state.draft_cache.rows(rows))
        # Keep the state of a prompt's last position
        ends = (live > 0) & (past + live == state.prompt_length[rows])
        last = _row(features, live - 1)
        states[:, :1] = torch.where(ends[:, None, None], last, states[:, :1])
        state.num_context[rows] = torch.where(ends, 1, state.num_context[rows])

    def _take_up(self, context: Tensor, num_context: Tensor, length: Tensor, tokens: Tensor, cache: KVCache) -> Tensor:
        """Run the pairs of new tokens. Returns what each sequence's last pair gives, ``[batch, 1, hidden]``.

        Args:
            context: ``[batch, rows, hidden]``, the target's states from position ``length - num_context`` on.
            num_context: ``[batch]`` int64; rows at or past it may hold anything.
            length: ``[batch]`` int64.
            tokens: ``[batch, capacity]`` int64.
            cache: the head's.
        """
        start, count = length - num_context, context.shape[1]
        is_on = torch.arange(count, device=context.device) < num_context[:, None]
        states = torch.where(is_on[..., None], context, 0)
        return _row(
            self.draft(tokens.gather(1, _places(start + 1, count, tokens)), states, start, cache), num_context - 1
        )

    def _draft(self, state: State) -> tuple[Tensor, Tensor, bool]:
        # 1. The pairs of tokens that were emitted since.
        context, live, cache = state.waiting_features(), None, state.draft_cache
        inputs = state.num_context, state.length, state.tokens
        if state.live is not None:
            live = (state.num_context > 0).index_fill(0, state.live, True).nonzero()[:, 0]
            if self.draft.target.can_leave_out(len(live) * context.shape[1]):
                (context, *inputs), cache = (x[live] for x in (context, *inputs)), cache.only(live)
            else:
                live = None
        hidden = self._take_up(context, *inputs, cache)
        # 2. A pass per draft. Where a grammar bans one, all are drawn again without it.
        bans: list[Ban] = []

        def draw(found: list[Ban]) -> Tensor:
            bans.extend(found)
            return self._chain(hidden, state, cache, live, bans)

        return state.anchor, *self._draw_allowed(draw, self.target.embedding_weight.shape[0])

    def _chain(self, hidden: Tensor, state: State, cache: KVCache, live: Tensor | None, bans: list[Ban]) -> Tensor:
        """Return drafts ``[batch, drafts]`` after the anchor, whose pair gave ``hidden [n, 1, hidden]``."""
        positions, sampling, drafts = state.positions(self.rows - 1), state.sampling, []
        for place in range(self.rows - 1):
            logits = self.logits(hidden)
            if live is not None:
                logits = scatter_rows(logits, live, len(positions), -torch.inf)
            if self.rules is not None:
                logits = self.rules.apply_to_drafts(logits, state, place)
            for row, at, banned in bans:
                if at == place:
                    logits[row, 0].masked_fill_(banned, -torch.inf)
            now = positions[:, place : place + 1]
            if self._rejection is not None:
                drafts.append(self._rejection.draft(logits, now, sampling, place))
            else:
                drafts.append(sampling.select(logits, now, sampling.sharpness))
            if place + 2 < self.rows:
                tokens, length = drafts[-1].clamp(min=0), state.length + place
                if live is not None:
                    tokens, length = tokens[live], length[live]
                hidden = self.draft(tokens, hidden, length, cache)
        return torch.cat(drafts, 1)


def _places(start: Tensor, count: int, tokens: Tensor) -> Tensor:
    """Return ``[batch, count]``, the places from ``start [batch]`` on, inside of ``tokens [batch, capacity]``."""
    places = start[:, None] + torch.arange(count, device=start.device)
    return places.clamp(max=tokens.shape[1] - 1)


def _row(values: Tensor, index: Tensor) -> Tensor:
    """Return ``[batch, 1, hidden]``, row ``index [batch]`` of ``values [batch, rows, hidden]``; row 0 for -1."""
    return values.gather(1, index.clamp(min=0)[:, None, None].expand(-1, 1, values.shape[2]))
