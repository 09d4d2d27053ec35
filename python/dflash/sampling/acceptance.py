"""Classic speculative sampling, ``acceptance="rejection"``, at fixed shapes.

A draft x from q is accepted with probability min(1, p(x) / q(x)). The first rejected draft is replaced by a draw from
max(p - q, 0); a fully accepted block is followed by a draw from p. Each token then has the target's distribution p
given the tokens before it: Leviathan et al., "Fast inference from transformers via speculative decoding" (2023); Chen
et al., "Accelerating large language model decoding with speculative sampling" (2023).

The draft, the coin and the residual take their noise from three streams of one Philox generator. Sharing a stream
between two of them is wrong. So are drafts from several denoising passes: they are not draws from q, because which of
them a pass keeps depends on what it drew. tests/test_rejection.py plants each mistake and sees it fail, with total
variations of 0.031 (draft and residual, draft and coin), 0.025 (coin and residual) and 0.045 (two passes) in 10^6
draws.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..ops import reference
from .sampling import Sampling

if TYPE_CHECKING:
    from ..state import Block, State

DRAFT, COIN, RESIDUAL = 1, 2, 3  # streams of noise; 0 is the noise of `ops.select_tokens`


class RejectionAcceptance:
    """Classic speculative sampling: draws the drafts, and accepts or replaces them.

    Args:
        batch: rows of the batch.
        drafts: proposals per block.
        vocab_size: of the logits.
        device: of the tensors.

    Attributes:
        STREAM: of the noise that proposals are drawn with.
        draft_probabilities: ``[batch, drafts, vocab]`` float32, the distribution of the drafts.
    """

    STREAM = DRAFT

    def __init__(self, batch: int, drafts: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.draft_probabilities = torch.zeros(batch, drafts, vocab_size, dtype=torch.float32, device=device)

    def draft(self, logits: Tensor, positions: Tensor, sampling: Sampling, first: int = 0) -> Tensor:
        """Draw proposals ``[batch, drafts]`` from the drafter's ``logits [batch, drafts, vocab]``.

        They are those of a block from ``first`` on.
        """
        part = self.draft_probabilities[:, first : first + logits.shape[1]]
        return propose(part.copy_(probabilities(logits, sampling)), positions, sampling.seeds)

    def remember_(self, drafts: Tensor, ids: Tensor, scores: Tensor) -> None:
        """Keep the distribution of `ops.walk_candidates`' proposals, drawn with the noise of `STREAM`."""
        vocab = self.draft_probabilities.shape[-1]
        self.draft_probabilities.copy_(walk_probabilities(drafts, ids, scores, vocab))

    def choose(self, logits: Tensor, block: Block, state: State) -> Tensor:
        """Return the choices ``[batch, rows]``."""
        p = probabilities(logits, state.sampling)
        positions = state.chosen_positions(block)
        return verify(block.ids[:, 1:], self.draft_probabilities, p, positions, state.sampling.seeds)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution that `dflash.ops.select_tokens` draws from, filters included; all NaN with a NaN logit.

    ``logits`` are ``[batch, rows, vocab]`` of any floating dtype, and so is the result in float32. Temperatures must be
    positive.
    """
    s = sampling
    logits = logits.to(torch.float32)
    z, keep = reference.filtered_logits(logits, s.temperature, s.top_k, s.top_p, s.min_p)
    best = z.amax(-1, keepdim=True)
    # An infinite logit, or no finite one: put all mass on one token, as `select_tokens` does.
    one = torch.arange(z.shape[-1], device=z.device) == reference.lowest_argmax(z)[..., None]
    spread = torch.softmax(torch.where(keep, z, -torch.inf), -1)
    p = torch.where(torch.isinf(best), one.to(spread.dtype), spread)
    return torch.where(torch.isnan(logits).any(-1, keepdim=True), torch.nan, p)


def _draw(weights: Tensor, positions: Tensor, seeds: Tensor, stream: int) -> Tensor:
    """Draw a token per row of ``weights [batch, rows, vocab]`` (up to a factor), with keyed noise from ``stream``."""
    noise = reference.gumbel_noise(seeds, positions, weights.shape[-1], stream)
    ids = reference.lowest_argmax(torch.log(weights) + noise)
    return torch.where(torch.isnan(weights).any(-1), -1, ids)


def propose(q: Tensor, positions: Tensor, seeds: Tensor) -> Tensor:
    """Draw the drafts ``[batch, rows]`` from ``q [batch, rows, vocab]``; -1 where q is NaN."""
    return _draw(q, positions, seeds, DRAFT)


def walk_probabilities(path: Tensor, ids: Tensor, scores: Tensor, vocab_size: int) -> Tensor:
    """Return the distributions from which `dflash.ops.walk_candidates` drew a path, with noise of stream `DRAFT`.

    The candidates must not depend on the noise of the path, and each slot's distribution must follow the token drafted
    before it. tests/test_rejection_walk.py plants both mistakes, and a search for the best path.

    ``path`` is ``[batch, slots]``, ``ids`` of the candidates and the walk's ``scores`` are ``[batch, slots, count]``;
    the result ``[batch, slots, vocab_size]`` is all 0 for a missing draft.
    """
    best = scores.amax(-1, keepdim=True)
    # An infinite score, or no finite one, leaves no choice.
    spread = torch.where(torch.isinf(best), (ids == path[..., None]).to(scores.dtype), torch.softmax(scores, -1))
    spread = torch.where((scores > -torch.inf) | torch.isinf(best), spread, 0.0)
    spread = torch.where((ids >= 0) & (path >= 0)[..., None], spread, 0.0)
    # A slot has no token twice, so at most one number added to a place is not 0.
    q = scores.new_zeros(*path.shape, vocab_size)
    return q.scatter_add_(-1, ids.clamp(0, vocab_size - 1), spread)


def verify(drafts: Tensor, q: Tensor, p: Tensor, positions: Tensor, seeds: Tensor) -> Tensor:
    """Return the posterior for `dflash.ops.accept_prefix_`: the drafts up to the first rejection, then a new draw.

    Args:
        drafts: ``[batch, rows]`` int64, from `propose`.
        q: ``[batch, rows, vocab]`` float32, the distributions that the drafts were drawn from.
        p: ``[batch, rows + 1, vocab]`` float32, `probabilities` of the target's logits. Row j belongs to the
            position of draft j, the last to the position after the block.
        positions: ``[batch, rows + 1]`` int64, positions of the tokens that are chosen.
        seeds: ``[batch]`` int64.

    Returns:
        ``[batch, rows + 1]`` int64: draft j if its coin accepts it, else a draw from max(p - q, 0); after the block a
        draw from p; -1 where p is NaN. Ignore the choices after the first that differs from its draft.
    """
    known = drafts >= 0  # a drafter that gave NaN proposes nothing
    q = torch.where(known[..., None], q, 0.0)
    index = drafts.clamp(min=0)[..., None]
    drafted, wanted = q.gather(-1, index)[..., 0], p[:, :-1].gather(-1, index)[..., 0]
    coin = reference.uniform_noise(seeds, positions[:, :-1], COIN)
    # In float64 the product is exact, and a coin is below 1: a draft with p >= q always passes.
    passed = known & (coin * drafted.double() < wanted.double())
    residual = (p[:, :-1] - q).clamp(min=0)
    # If p = q bit for bit, the residual is empty, and only rounding can reject.
    residual = torch.where(residual.sum(-1, keepdim=True) == 0, p[:, :-1], residual)
    drawn = _draw(torch.cat([residual, p[:, -1:]], 1), positions, seeds, RESIDUAL)
    return torch.cat([torch.where(passed, drafts, drawn[:, :-1]), drawn[:, -1:]], 1)
