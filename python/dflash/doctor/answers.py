"""A pair, and its answers to a few prompts by the real decoding loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..drafter import Drafter
from ..evaluate import Decoding, GeneratorRunner, Total
from ..generator import Generator
from ..targets import text_config
from .prompts import Prompts
from .recording import Answered

__all__ = ["Answers", "Pair", "Show", "answer"]

Show = Callable[..., None]  # show(name, done, total, text)


@dataclass(frozen=True)
class Pair:
    """A pair, as it was loaded.

    Attributes:
        target: the causal language model.
        drafter: its drafter.
        keys: the drafter's ``config.json``.
    """

    target: Any
    drafter: Drafter
    keys: Mapping[str, Any]


@dataclass(frozen=True)
class Answers:
    """Prompts with their answers, what they took, and the generator that wrote them."""

    sequences: list[Answered]
    total: Total
    generator: Generator

    @property
    def acceptance_length(self) -> float:
        """Tokens per step; 0 if there was none."""
        return self.total.acceptance_length or 0.0

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(one.prompt_length for one in self.sequences)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(one.ids) for one in self.sequences)


def answer(pair: Pair, prompts: Prompts, max_new_tokens: int, show: Show) -> Answers:
    """Answer every prompt greedily.

    Raises:
        ValueError: a prompt cannot be encoded or is too long for the target.
    """
    prompts.check_room(pair.target)
    room = max(map(len, prompts.ids)) + max_new_tokens
    positions = getattr(text_config(pair.target), "max_position_embeddings", None)
    generator = Generator(pair.target, pair.drafter, max_length=min(room, positions or room))
    runner = GeneratorRunner(generator, Decoding(max_new_tokens), pair.drafter.device)
    total, sequences = Total(), []
    for number, row in enumerate(prompts.ids):
        show("answers", number, len(prompts.ids), "")
        one = runner(row)
        total.add(len(one.ids), one.seconds, one.steps)
        sequences.append(Answered([*row, *one.ids], len(row)))
    show("answers", len(prompts.ids), len(prompts.ids), "")
    return Answers(sequences, total, generator)
