"""The prompt: fill both caches in chunks, and choose each row's first token as one-token decoding does."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..cache import KVCache
from ..proposers import Block
from .host_step import walk
from .state import FULL, INVALID, RUNNING, STOPPED
from .step import Engine

__all__ = ["fill_caches", "prefill"]


@torch.no_grad()
def prefill(
    engine: Engine, prompts: list[Tensor], limits: list[int], *, chunk: int, reuse: bool, snapshot: bool
) -> list[int]:
    """Fill both caches with the prompts and choose each row's first token from the last row of its prompt.

    Args:
        engine: as for `fill_caches`, as are the others.
        prompts: see there.
        limits: see there.
        chunk: see there.
        reuse: see there.
        snapshot: see there.

    Returns:
        Per row, how many tokens of its prompt were run.
    """
    logits, counts = fill_caches(engine, prompts, limits, chunk=chunk, reuse=reuse, snapshot=snapshot)
    _choose_first(engine, logits)
    return counts


@torch.no_grad()
def fill_caches(
    engine: Engine, prompts: list[Tensor], limits: list[int], *, chunk: int, reuse: bool, snapshot: bool
) -> tuple[Tensor, list[int]]:
    """Run the prompts through target and drafter.

    Args:
        engine: its state is written.
        prompts: per row, ``[length]`` int64.
        limits: per row, the tokens it may hold in all.
        chunk: prompt tokens per forward pass.
        reuse: run only what the caches do not hold already.
        snapshot: keep a place in each prompt from which a later one can resume if it diverges from this one.

    Returns:
        The logits ``[batch, 1, vocab]`` of each prompt's last row; per row, how many tokens of its prompt were run.
    """
    state, lengths = engine.state, [len(prompt) for prompt in prompts]
    ids = pad_sequence(prompts, batch_first=True)
    cached = _cached_prefix(engine, ids, lengths) if reuse else [0] * len(prompts)
    state.target_cache.resume_(cached)
    state.tokens.zero_()
    state.tokens[:, : ids.shape[1]] = ids
    state.length.copy_(torch.tensor(lengths, dtype=torch.int64, device="cpu"))
    state.prompt_length.copy_(state.length)
    state.limits.copy_(torch.tensor(limits, dtype=torch.int64, device="cpu"))
    state.num_context.zero_()
    logits = _run_chunks(engine, prompts, cached, chunk, snapshot)
    return logits, [length - held for length, held in zip(lengths, cached, strict=True)]


def _cached_prefix(engine: Engine, ids: Tensor, lengths: list[int]) -> list[int]:
    """Count the leading tokens of each prompt that both caches hold.

    At least a prompt's last token is run: its logits choose the first new one.
    """
    state, draft = engine.state, engine.draft
    shared = ids.eq(state.tokens[:, : ids.shape[1]])
    shared &= torch.arange(ids.shape[1], device=ids.device) < state.length[:, None]
    shared = shared.long().cumprod(1).sum(1)
    shared, drafted = torch.stack([shared, state.length - state.num_context]).tolist()
    cached = [min(have, length - 1) for have, length in zip(shared, lengths, strict=True)]
    cached = _fitting(state.target_cache, cached, lengths, state.tokens.shape[1])
    if draft is not None and any(have > held for have, held in zip(cached, drafted, strict=True)):
        # The features of the last step's tokens wait in `context` for a step that will not come.
        index = torch.arange(state.context.shape[1], device=ids.device)
        positions = (state.length - state.num_context)[:, None] + index
        positions = torch.where(index < state.num_context[:, None], positions, -1)
        draft.inject_(draft.fuse(state.context, state.num_context), positions, state.draft_cache)
    return cached


def _fitting(cache: KVCache, cached: list[int], lengths: list[int], capacity: int) -> list[int]:
    """Lower what each row keeps to where its cache can resume, and until all rows fit.

    Every row runs as many positions as the one with the most; they must fit after what it keeps.
    """
    while True:
        lower = cache.resumable(cached)
        most = max(length - have for length, have in zip(lengths, lower, strict=True))
        lower = [min(have, capacity - most) for have in lower]
        if lower == cached:
            return cached
        cached = lower


def _run_chunks(engine: Engine, prompts: list[Tensor], cached: list[int], chunk: int, snapshot: bool) -> Tensor:
    """Run what is not cached; return the logits ``[batch, 1, vocab]`` of each prompt's last row."""
    state, draft, device = engine.state, engine.draft, engine.target.device
    cache = state.target_cache
    ids = pad_sequence([prompt[held:] for prompt, held in zip(prompts, cached, strict=True)], batch_first=True)
    counts = [len(prompt) - held for prompt, held in zip(prompts, cached, strict=True)]
    held = torch.tensor(cached, dtype=torch.int64, device=device)
    last_logits: list[Tensor | None] = [None] * len(prompts)
    starts = range(0, ids.shape[1], chunk)
    # Which rows of a chunk end a prompt; put on the device all at once, since each transfer waits for what is queued.
    ends = [sorted({n - 1 - start for n in counts if start < n <= start + chunk}) for start in starts]
    flat = torch.tensor([index for keep in ends for index in keep], dtype=torch.int64, device=device)
    keeps = flat.split([len(keep) for keep in ends])
    for start, keep, keep_on_device in zip(starts, ends, keeps, strict=True):
        # 1. The target, with logits only for rows that end a prompt.
        rows, past = ids[:, start : start + chunk], torch.minimum(held + start, state.length)
        live = (state.length - past).clamp(max=rows.shape[1])
        # From before each row's last chunk, unless that is the prompt's beginning, where states are zero.
        if snapshot:
            cache.keep_snapshot_(
                [row for row, n in enumerate(counts) if start < n <= start + chunk and start + cached[row] > 0]
            )
        logits, taps = engine.target.forward(rows, past, cache, keep_on_device, keep=live)
        for row, n in enumerate(counts):
            if n - 1 - start in keep:
                last_logits[row] = logits[row, keep.index(n - 1 - start)]
        # 2. The drafter's K/V of the same positions, from the tapped features.
        if draft is not None:
            positions = past[:, None] + torch.arange(rows.shape[1], device=device)
            positions = torch.where(positions < state.length[:, None], positions, -1)
            draft.inject_(draft.fuse(torch.cat(taps, -1), live), positions, state.draft_cache)
    return torch.stack(last_logits)[:, None]


def _choose_first(engine: Engine, logits: Tensor) -> None:
    """Choose each row's first new token from ``logits [batch, 1, vocab]`` and set ``done``."""
    state, ended = engine.state, []
    prompt = dataclasses.replace(state, length=state.length - 1)  # a block of one row: the prompt's last token
    block = Block(prompt.anchor)
    logits = engine.rules.apply(logits, block, prompt)
    if engine.host_rules is None:
        first = engine.keyed.choose_at(logits, state.length[:, None], state)
    else:
        first, _, ended = walk(engine, block, logits, prompt, [RUNNING] * len(logits))
    first = engine.target.ranks.share_(first)
    state.tokens.scatter_(1, state.length[:, None], first.clamp(min=0))
    stopped = torch.isin(first[:, 0], state.stop_token_ids)
    full = state.length + 1 >= state.limits
    state.done.copy_(torch.where(stopped, STOPPED, torch.where(full, FULL, RUNNING)))
    state.done.masked_fill_(first[:, 0] < 0, INVALID)
    if ended:
        state.done[ended] = STOPPED
