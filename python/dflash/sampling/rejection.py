"""``acceptance="rejection"``: classic speculative sampling, with the residual distribution, at fixed shapes.

A draft x from q is kept with probability min(1, p(x) / q(x)); the first that is not gives way to a draw from
max(p - q, 0), and behind a block that is kept whole comes a draw from p. Each token then has the target's
distribution p given the tokens before it: Leviathan et al., "Fast inference from transformers via speculative
decoding" (2023); Chen et al., "Accelerating large language model decoding with speculative sampling" (2023).

The draft, the coin and the residual take their noise from three streams of the same Philox generator. One stream for
two of them is wrong, and so are drafts of several denoising passes, which are not draws from q: which of them are kept
depends on what was drawn. tests/test_rejection.py plants each of these and sees it fail: total variations of 0.031
(draft and residual, draft and coin), 0.025 (coin and residual) and 0.045 (two passes) in 10^6 draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops import reference
from .parameters import Sampling

__all__ = ["probabilities", "propose", "verify"]

DRAFT, COIN, RESIDUAL = 1, 2, 3  # the streams; 0 is the noise of `ops.select_tokens`


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that `dflash.ops.select_tokens` draws from, filters included.

    Args:
        logits: ``[batch, rows, vocab]``, any floating dtype.
        sampling: per-row parameters; the temperatures must be positive, sharpness and seeds are not read.

    Returns:
        ``[batch, rows, vocab]`` float32; NaN in the whole row where a logit is NaN.
    """
    s = sampling
    logits = logits.to(torch.float32)
    z, keep = reference.filtered_logits(logits, s.temperature, s.top_k, s.top_p, s.min_p)
    best = z.amax(-1, keepdim=True)
    # No finite logit, or an infinite one: all on one token, as `select_tokens` chooses.
    one = torch.arange(z.shape[-1], device=z.device) == reference.lowest_argmax(z)[..., None]
    spread = torch.softmax(torch.where(keep, z, -torch.inf), -1)
    p = torch.where(torch.isinf(best), one.to(spread.dtype), spread)
    return torch.where(torch.isnan(logits).any(-1, keepdim=True), torch.nan, p)


def _draw(weights: Tensor, positions: Tensor, seeds: Tensor, stream: int) -> Tensor:
    """One token per row of ``weights [batch, rows, vocab]`` (up to a factor), by keyed noise of ``stream``."""
    noise = reference.gumbel_noise(seeds, positions, weights.shape[-1], stream)
    ids = reference.lowest_argmax(torch.log(weights) + noise)
    return torch.where(torch.isnan(weights).any(-1), -1, ids)


def propose(q: Tensor, positions: Tensor, seeds: Tensor) -> Tensor:
    """Draw the drafts from ``q``.

    Args:
        q: ``[batch, rows, vocab]`` float32, from `probabilities` of the drafter's logits.
        positions: ``[batch, rows]`` int64, of the tokens that are drawn.
        seeds: ``[batch]`` int64.

    Returns:
        ``[batch, rows]`` int64; -1 where q is NaN.
    """
    return _draw(q, positions, seeds, DRAFT)


def verify(drafts: Tensor, q: Tensor, p: Tensor, positions: Tensor, seeds: Tensor) -> Tensor:
    """The posterior that `dflash.ops.accept_prefix_` takes: drafts up to the first that fails, then a new draw.

    Args:
        drafts: ``[batch, rows]`` int64, from `propose`.
        q: ``[batch, rows, vocab]`` float32, what they were drawn from.
        p: ``[batch, rows + 1, vocab]`` float32, from `probabilities` of the target's logits: row j for the
            position of draft j, the last for the one behind.
        positions: ``[batch, rows + 1]`` int64, of the tokens that are chosen.
        seeds: ``[batch]`` int64.

    Returns:
        ``[batch, rows + 1]`` int64: draft j where its coin lets it pass, elsewhere a draw from max(p - q, 0), behind
        the block one from p; -1 where p is NaN. Choices behind the first that differs from its draft mean nothing.
    """
    known = drafts >= 0  # a drafter that gave NaN proposes nothing
    q = torch.where(known[..., None], q, 0.0)
    index = drafts.clamp(min=0)[..., None]
    drafted, wanted = q.gather(-1, index)[..., 0], p[:, :-1].gather(-1, index)[..., 0]
    coin = reference.uniform_noise(seeds, positions[:, :-1], COIN)
    # In float64 the product is exact, and a coin is below 1: a draft with p >= q always passes.
    passed = known & (coin * drafted.double() < wanted.double())
    residual = (p[:, :-1] - q).clamp(min=0)
    # p = q to the last bit leaves nothing, and only rounding can reject there.
    residual = torch.where(residual.sum(-1, keepdim=True) == 0, p[:, :-1], residual)
    drawn = _draw(torch.cat([residual, p[:, -1:]], 1), positions, seeds, RESIDUAL)
    return torch.cat([torch.where(passed, drafts, drawn[:, :-1]), drawn[:, -1:]], 1)
