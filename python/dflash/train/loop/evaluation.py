"""Measure the acceptance length on held-out prompts, in the real decoding loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...drafter import Drafter
from ...evaluate import Decoding, GeneratorRunner, answer_all
from ...generator import Generator
from ...targets import text_config

__all__ = ["HeldOutEvaluation"]


class HeldOutEvaluation:
    """Answers prompts with `dflash.Generator`, as ``dflash benchmark`` does.

    Args:
        target: the target.
        drafter: the drafter in training. Each `run` copies its weights.
        longest: length of the longest prompt with its answer, in tokens.
        device: device that both models run on.
    """

    def __init__(self, target: nn.Module, drafter: Drafter, longest: int, device: torch.device) -> None:
        dtype = next(target.parameters()).dtype
        copy = Drafter(drafter.config, dtype=dtype, device=device).eval()
        positions = getattr(text_config(target), "max_position_embeddings", None) or longest
        self.generator = Generator(target, copy, max_length=min(longest, positions))
        self.device = device

    def run(
        self,
        drafter: Drafter,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperatures: Sequence[float],
        accelerator: Any,
    ) -> dict[str, float | None]:
        """Return the acceptance length at each temperature. All processes must call this; they share the prompts."""
        self.generator.draft.load_state_dict(drafter.state_dict())
        mine = prompts[accelerator.process_index :: accelerator.num_processes]
        out = {}
        for temperature in temperatures:
            total = answer_all(
                GeneratorRunner(self.generator, Decoding(max_new_tokens, temperature), self.device), mine
            )
            sums = torch.tensor([sum(total.steps), len(total.steps)], dtype=torch.float32, device=self.device)
            tokens, steps = accelerator.reduce(sums, reduction="sum").tolist()
            name = "acceptance_length" if temperature == 0 else f"acceptance_length_t{temperature:g}"
            out[name] = tokens / steps if steps else None
        return out
