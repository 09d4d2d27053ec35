"""Responses written by the package's own generator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...drafter import Drafter
from ...generator import Generator
from ...targets import text_config
from ..data import prompt_ids
from .jobs import Answer, Job, Settings, check_prompt

__all__ = ["LocalWriter"]

_PREFILL_ROWS = 16384  # tokens per forward pass, over all rows of a batch


class LocalWriter:
    """Answers with `dflash.Generator`, in batches of prompts of similar length, longest first.

    Args:
        target: a causal language model of transformers.
        tokenizer: the target's tokenizer.
        draft: a drafter, which is faster in small batches. None writes one token per step, which is faster in large
            batches.
        name: the target's name in rows.
        batch_size: sequences per batch.
        raw, bos, template: see `dflash.train.data.prompt_ids`.
        skip_long: leave out prompts that do not fit the target together with their response, instead of raising.
    """

    def __init__(  # noqa: PLR0913
        self,
        target: nn.Module,
        tokenizer: Any,
        draft: Drafter | None = None,
        *,
        name: str = "",
        batch_size: int = 64,
        raw: bool = False,
        bos: bool = False,
        template: Mapping[str, Any] | None = None,
        skip_long: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.target, self.tokenizer, self.draft = target, tokenizer, draft
        self.name, self.batch_size, self.skip_long = name, batch_size, skip_long
        self.encoding: dict[str, Any] = {"raw": raw, "bos": bos, "template": dict(template or {})}
        self.ids: dict[int, list[int]] = {}
        self.skipped: set[int] = set()
        self._steps = self._step_tokens = 0

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per step so far; None without a drafter or a step."""
        return self._step_tokens / self._steps if self.draft is not None and self._steps else None

    def check(self, jobs: Sequence[Job], settings: Settings) -> None:
        """Tokenize every prompt. One that does not fit the target with its response raises, or is skipped."""
        positions = getattr(text_config(self.target), "max_position_embeddings", None)
        self.ids, self.skipped = {}, set()
        for job in jobs:
            if job.line in self.ids:
                continue
            check_prompt(job)
            try:
                ids = self.ids[job.line] = prompt_ids(self.tokenizer, job.prompt, **self.encoding)
            except ValueError as error:
                raise ValueError(f"the prompt on line {job.line}: {error}") from error
            if not ids:
                raise ValueError(f"the prompt on line {job.line} has no token")
            if positions is None or len(ids) + settings.max_new_tokens <= positions:
                continue
            if not self.skip_long:
                raise ValueError(
                    f"the prompt on line {job.line} has {len(ids)} tokens: with {settings.max_new_tokens} new ones "
                    f"it passes the target's {positions} positions (--skip-long leaves such prompts out)"
                )
            self.skipped.add(job.line)

    def answers(self, jobs: Sequence[Job], settings: Settings) -> Iterator[list[tuple[Job, Answer]]]:
        """Yield one group per batch; see `Writer`. Call `check` first."""
        if not jobs:
            return
        longest = max(len(self.ids[job.line]) for job in jobs)
        rows = min(self.batch_size, len(jobs))
        generator = Generator(
            self.target,
            self.draft,
            max_length=longest + settings.max_new_tokens,
            batch_size=rows,
            prefill_chunk=max(1, min(512, _PREFILL_ROWS // rows)),
            reuse_prefix=False,
        )
        for temperature in settings.temperatures:
            same = [job for job in jobs if job.temperature == temperature]
            same.sort(key=lambda job: len(self.ids[job.line]), reverse=True)
            for start in range(0, len(same), rows):
                yield self._answer_batch(generator, same[start : start + rows], settings)

    def _answer_batch(self, generator: Generator, jobs: list[Job], settings: Settings) -> list[tuple[Job, Answer]]:
        # 1. Pad the prompts to the right
        prompts = [torch.tensor(self.ids[job.line], dtype=torch.int64, device="cpu") for job in jobs]
        ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
        device = self.target.get_input_embeddings().weight.device
        # 2. Generate, each row with its own seed
        out = generator.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=settings.max_new_tokens,
            temperature=jobs[0].temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=[job.seed for job in jobs],
            return_dict_in_generate=True,
        )
        steps = [length for row in out.statistics.acceptance_lengths for length in row]
        self._steps += len(steps)
        self._step_tokens += sum(steps)
        # 3. Decode each row up to its own end
        group = []
        rows = out.sequences[:, ids.shape[1] :].tolist()
        for job, row, length, reason in zip(jobs, rows, out.statistics.num_new_tokens, out.finish_reasons, strict=True):
            response = row[:length]
            text = self.tokenizer.decode(response, skip_special_tokens=True)
            group.append((job, Answer(text, reason, self.ids[job.line], response, length)))
        return group
