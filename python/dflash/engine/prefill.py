"""Prompts: fill both caches in chunks, and choose each row's first token as one-token decoding does."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..cache import KVCache
from ..call import Call
from ..state import FULL, INVALID, RUNNING, STOPPED, Block
from ..terminal import first_line
from .prefix import PrefixCache
from .step import Engine, walk

_SHORT_END = 8  # an end of at most this part of a chunk joins the chunk before it


class PicturesError(ValueError):
    """The target cannot run a prompt's pictures."""


class Prefill:
    """The prompts of consecutive rows on their way through target and drafter, in lockstep.

    Until it is complete its rows count as done. A step between two chunks writes for them only to slots that the next
    chunk writes again.

    Args:
        engine: its state is written.
        call: whose prompts they are.
        cached: per row, how many leading tokens of its prompt both caches hold; fewer than all, and none where the
            prompts' own log probabilities are kept.
        first: the row of the first prompt.
        chunk: prompt tokens per forward pass. A short end joins the chunk before it, if that changes none of the
            target's bits.
        snapshot: keep a position of each prompt from which a later prompt can resume if it differs from there on.
        prefix: where whole chunks are looked up and stored. Needs one prompt, with ``cached`` 0. Prompts with pictures
            are run whole, and leave it alone.

    Attributes:
        counts: per row, how many tokens of its prompt are not ``cached``.
        num_loaded: how many of them have come from ``prefix``.
        chunks: what is left to run; each is its first token and the one after its last, the rows of it that end a
            prompt, and these on the device.
    """

    def __init__(
        self, engine: Engine, call: Call, cached: Sequence[int], *, first: int = 0, chunk: int, snapshot: bool = False,
        prefix: PrefixCache | None = None,
    ) -> None:  # fmt: skip
        prompts, self.logprobs, self.snapshot, self._prefix = call.prompts, call.prompt_logprobs, snapshot, prefix
        self._keys, self.num_loaded = [] if prefix is None else prefix.keys(prompts[0]), 0
        self._pictures, self._padded = call.pictures, call.ids
        if self._pictures is not None:
            chunk, prefix, self._prefix = call.longest, None, None  # ids do not tell pictures apart
        self.engine, self.rows, self.chunk = engine, slice(first, first + len(prompts)), chunk
        lengths = list(map(len, prompts))
        self.counts = list(map(operator.sub, lengths, cached))
        self._cached = list(cached)
        self._logits: list[Tensor | None] = [None] * len(prompts)
        left = [prompt[held:] for prompt, held in zip(prompts, cached, strict=True)]
        self._ids = pad_sequence(left, batch_first=True)
        state, device, rows = engine.state, engine.state.tokens.device, self.rows
        # 1. The state of the rows
        ids = pad_sequence(prompts, batch_first=True)
        state.target_cache.resume_(cached, first)
        numbers = torch.tensor([cached, lengths], dtype=torch.int64, device="cpu")
        self._held, self._lengths = numbers.to(device)
        state.tokens[rows] = 0
        state.tokens[rows, : ids.shape[1]] = ids
        state.length[rows], state.prompt_length[rows] = self._held, self._lengths
        state.limits[rows] = self._lengths + call.max_new_tokens
        state.num_context[rows], state.done[rows] = 0, FULL
        # 2. The rows of each chunk that end a prompt; put on the device all at once, since each transfer waits for
        # what is queued.
        starts, length = [*range(0, self._ids.shape[1], chunk)], self._ids.shape[1]
        rest, target = length - starts[-1], engine.target
        is_short = len(starts) > 1 and rest <= chunk // _SHORT_END
        if is_short and not target.is_recurrent and target.is_exact_for(len(prompts) * (chunk + rest)):
            starts.pop()
        chunks, ends, flat = [], [], []
        for start, stop in itertools.pairwise([*starts, length]):
            keep = sorted({n - 1 - start for n in self.counts if start < n <= stop})
            chunks.append((start, stop, keep))
            ends.append(len(keep))
            flat += keep
        on_device = torch.tensor(flat, dtype=torch.int64, device=device).split(ends)
        self.chunks = deque((*chunk, keep) for chunk, keep in zip(chunks, on_device, strict=True))

    @torch.no_grad()
    def run_chunk(self) -> None:
        """Take what ``prefix`` has by now of the chunks before the last, and run the next one of every prompt."""
        engine, state, chain = self.engine, self.engine.state, self.engine.chain
        while self._load():
            pass
        start, stop, keep, keep_on_device = self.chunks.popleft()
        ids = self._ids[:, start:stop]
        past = torch.minimum(self._held + start, self._lengths)
        live = (self._lengths - past).clamp(max=ids.shape[1])
        # 1. The target, with logits only for rows that end a prompt, unless those of all are asked for.
        if self.snapshot:  # before each row's last chunk, unless that is the beginning, where states are zero
            ending = [row for row, n in enumerate(self.counts) if start < n <= stop]
            kept = [self.rows.start + row for row in ending if start + self._cached[row] > 0]
            state.target_cache.keep_snapshot_(kept)
        cache = state.target_cache.rows(self.rows)
        if self._pictures is not None:
            try:
                ends, taps = engine.target.run_pictures(self._padded.long(), self._lengths, self._pictures, cache)
            except Exception as error:  # of the model's own functions, which see the caller's tensors first here
                raise PicturesError(f"the target cannot run these pictures: {first_line(error)}") from error
            self._logits, keep, self._pictures = [*ends], [], {}
        else:
            asked = 0 if self.logprobs else keep_on_device
            logits, taps = engine.target.forward(ids, past, cache, asked, keep=live, ends=self._lengths)
        if self.logprobs:
            engine.logprobs.write_prompt_(self.rows, logits, state.tokens[self.rows], past)
            logits = logits[:, keep_on_device]
        for row, n in enumerate(self.counts):
            if n - 1 - start in keep:
                self._logits[row] = logits[row, keep.index(n - 1 - start)]
        # 2. The drafter's K/V of the same positions, from the tapped features.
        if taps:
            features = torch.cat(taps, -1)
            if state.history is not None:
                state.history.write_(self.rows, past, features)
            chain.follow_prompt_(features, past, live, state, self.rows)
        state.length[self.rows] = past + live
        if self._prefix is not None:
            keys = self._keys[: stop // self.chunk]
            if len(keys) * self.chunk > start:  # it has a whole chunk
                self._prefix.save(keys, self.rows.start)
            else:
                self._prefix.touch(keys)

    def _load(self) -> bool:
        """Take the next chunk from ``prefix``; False if it is not there, or ends the prompt."""
        start, stop, keep, keep_on_device = self.chunks[0]
        is_last = len(self.chunks) == 1
        if self._prefix is None or self.logprobs or (is_last and stop - start <= self.chunk):
            return False
        if not self._prefix.load_(self._keys[start // self.chunk], self.rows.start, start):
            return False
        self.chunks.popleft()
        if is_last:
            shifted = [place - self.chunk for place in keep], keep_on_device - self.chunk
            self.chunks.append((start + self.chunk, stop, *shifted))
        self.engine.state.length[self.rows.start].fill_(start + self.chunk)
        self.num_loaded += self.chunk
        return True

    @property
    def ends(self) -> Tensor:
        """``[batch, 1, vocab]``, the logits of each prompt's last token, once all are run; -inf for other rows."""
        logits = self._logits[0].new_full((self.engine.batch_size, 1, len(self._logits[0])), -torch.inf)
        logits[self.rows, 0] = torch.stack(self._logits)
        return logits

    @torch.no_grad()
    def choose_first(self) -> None:
        """Choose each row's first new token and set its ``done``, once all prompts are run."""
        engine, rows, logits = self.engine, self.rows, self.ends
        state, raw, ended = engine.state, logits[rows], []
        # 1. Rules and noise are those of all rows: the others' choices are dropped.
        prompt = state.at_prompt_end
        block = Block(prompt.anchor)
        logits = engine.rules.apply(logits, block, prompt)
        if engine.grammar_masks is not None:
            logits = engine.grammar_masks.apply(logits)
        if engine.host_rules is None:
            first = state.sampling.select(logits, state.length[:, None])
        else:
            first, _, ended = walk(engine, block, logits, prompt, [RUNNING] * engine.batch_size)
        first = engine.target.ranks.share_(first)[rows]
        # 2. Emit it.
        length = state.length[rows]
        if engine.logprobs is not None:
            engine.logprobs.write_(rows, raw, first, length[:, None])
        if state.history is not None:
            state.history.write_top_(rows, length, raw)
        state.tokens[rows].scatter_(1, length[:, None], first.clamp(min=0))
        stopped = (first == state.stop_token_ids[rows]).any(1)
        done = torch.where(stopped, STOPPED, torch.where(length + 1 >= state.limits[rows], FULL, RUNNING))
        state.done[rows] = done.masked_fill(first[:, 0] < 0, INVALID)
        if ended:
            state.done[ended] = STOPPED


def cached_prefix(engine: Engine, prompts: Sequence[Tensor]) -> list[int]:
    """Count the leading tokens of each prompt that both caches hold, for the first rows in lockstep.

    At least a prompt's last token is run: its logits choose the first new one.
    """
    state, rows = engine.state, slice(0, len(prompts))
    ids, lengths = pad_sequence(list(prompts), batch_first=True), list(map(len, prompts))
    length, num_context = state.length[rows], state.num_context[rows]
    shared = ids.eq(state.tokens[rows, : ids.shape[1]])
    shared &= torch.arange(ids.shape[1], device=ids.device) < length[:, None]
    shared, drafted = torch.stack([shared.long().cumprod(1).sum(1), length - num_context]).tolist()
    cached = [min(have, n - 1) for have, n in zip(shared, lengths, strict=True)]
    cached = _fitting(state.target_cache, cached, lengths, state.tokens.shape[1])
    is_behind = any(have > held for have, held in zip(cached, drafted, strict=True))
    if is_behind:
        # The features of the last tokens wait in `context` for a step that will not come.
        engine.chain.follow_(state.context[rows], state, rows)
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
