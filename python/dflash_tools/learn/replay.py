"""Replay recorded answers with another drafter, without running the target: `Replayer`."""

from __future__ import annotations

import torch
from torch import nn

from dflash import Drafter, Generator
from dflash.internals import RUNNING, Prefill, StoredAnswer


class Replayer:
    """Counts the tokens that each step would have emitted, had a drafter been served when an answer was written.

    The target's choices at all positions, and its hidden states there, do not depend on the drafter: both are recorded.
    So one pass of the drafter per step is all that is run, by the code that serves, and the counts are those of
    serving with the same seed, at a fixed ``block_size``.

    Args:
        target: whose embeddings and head the drafter shares; no pass of it is run.
        draft: the drafter; its weights may be written between two answers.
        max_length: tokens of the longest prompt, with all that its answer might have had (``max_new_tokens``).
        options: ``block_size``, ``denoise_steps``, ``prompt_lookup``, ``prefill_chunk``, ``drafter_window`` and
            ``draft_weights`` of the generator.

    Raises:
        ValueError: as `dflash.Generator`; or blocks have one row.
    """

    def __init__(self, target: nn.Module, draft: Drafter, *, max_length: int, **options: object) -> None:
        self._generator = Generator(target, draft, max_length=max_length, reuse_prefix=False, **options)
        if self._generator.draft is None:
            raise ValueError("a replay needs blocks of at least 2 rows, got block_size=1")

    @torch.no_grad()
    def __call__(self, answer: StoredAnswer) -> list[int]:
        """Return the tokens that each step emits."""
        return self._generator.lock.run(self._replay, answer)

    def _replay(self, answer: StoredAnswer) -> list[int]:
        generator, engine, state = self._generator, self._generator.engine, self._generator.state
        ids, features = answer.ids.to(engine.target.device), answer.features.to(engine.target.device)
        # 1. The row as it stands after the prompt, whose pass chose the first new token.
        own = {"seed": answer.seed, "draft_sharpness": answer.draft_sharpness, "tree": None}
        prompt, end = ids[: answer.prompt_length], len(ids)
        call = generator.resolve_call(prompt[None], {**answer.settings.arguments(), **own})
        engine.refresh()
        engine.configure(call)
        prefill = Prefill(engine, call, [0], chunk=generator.prefill_chunk)
        for start, stop, *_ in prefill.chunks:
            count, positions = torch.tensor([stop - start]), torch.arange(start, stop)[None]
            fused = engine.draft.fuse(features[None, start:stop], count.to(ids.device))
            engine.draft.inject_(fused, positions.to(ids.device), state.draft_cache)
        state.tokens[0, len(prompt)], state.length[0], state.done[0] = ids[len(prompt)], len(prompt), RUNNING
        # 2. One pass of the drafter per step; what was written says how much of it is accepted.
        state.is_readable = engine.target.device.type == "cpu"
        lengths: list[int] = []
        try:
            while (at := int(state.length[0])) < end - 1:
                block = engine.proposer.propose(state)
                rows = block.ids.shape[1]
                known, seen = ids[at + 1 : at + 1 + rows], features[at : at + rows]
                state.features(block)[0, : len(seen)] = seen
                choices = torch.zeros_like(block.ids)
                choices[0, : len(known)] = known
                engine.commit_(block, choices)
                # A stop string has cut the text: what a step emitted after it does not count.
                lengths.append(min(int(state.length[0]), end - 1) - at)
        finally:
            state.is_readable = False
            state.vacate_(slice(0, 1))
        return lengths
