"""The responses to write, and who writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...sampling import Sampling, fold

__all__ = ["Answer", "Job", "Settings", "Summary", "Writer", "jobs"]


@dataclass(frozen=True)
class Settings:
    """How responses are drawn.

    Attributes:
        temperatures: each prompt is answered once greedily for a 0, and ``samples`` times for any other.
        samples: answers to a prompt at each positive temperature.
        seed: of the whole run; an answer's own seed follows from it, the prompt's line and the sample's number, so
            that a row does not depend on what else is in its batch.
        max_new_tokens: of a response, its stop token counted.
        top_k, top_p, min_p: as in :func:`dflash.generate`; off by default, whatever the target's own settings.
    """

    temperatures: tuple[float, ...] = (0.0,)
    samples: int = 1
    seed: int = 0
    max_new_tokens: int = 1024
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures must be one or more different ones, got {list(self.temperatures)}")
        for temperature in self.temperatures:
            Sampling.create(1).set_(
                1, temperature=temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed
            )

    @property
    def draws(self) -> list[float]:
        """The temperature of each sample of a prompt, by its number."""
        return [t for t in self.temperatures for _ in range(self.samples if t else 1)]


@dataclass(frozen=True)
class Job:
    """One response to write: ``sample`` number of the prompt on ``line``. ``prompt`` is a row of ``load_prompts``."""

    line: int
    sample: int
    prompt: dict[str, Any]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    """What was written. Ids are None where the writer does not know them; ``response_ids`` end with the stop token.

    ``finish_reason`` is ``"stop"``, or ``"length"`` for a response that was cut off and has no stop token.
    """

    response: str
    finish_reason: str
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    num_tokens: int = 0


class Writer(Protocol):
    """Something that answers jobs, in any order, as it comes.

    ``name`` says in a row who wrote it; ``encoding`` holds ``raw``, ``bos`` and ``template``, as for
    :func:`dflash.train.data.prompt_ids`; ``ids`` maps the lines of prompts that were checked to their ids, where the
    writer knows them.
    """

    name: str
    encoding: dict[str, Any]
    ids: dict[int, list[int]]

    def check(self, jobs: Sequence[Job], settings: Settings) -> set[int]:
        """Raise ``ValueError`` for what cannot be answered, before any is; returns the lines that are left out."""

    def answers(self, jobs: Sequence[Job], settings: Settings) -> Iterator[list[tuple[Job, Answer]]]:
        """Groups of answers; closing the iterator stops the work."""


@dataclass
class Summary:
    """What a run did: rows written by it, rows found, tokens written, how many were cut off, seconds, prompts that were
    left out because they are too long."""

    written: int = 0
    found: int = 0
    tokens: int = 0
    truncated: int = 0
    seconds: float = 0.0
    acceptance_length: float | None = None
    skipped: int = 0
    out: str = ""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def jobs(prompts: Sequence[dict[str, Any]], settings: Settings) -> list[Job]:
    """Every response that ``settings`` asks for of prompts from :func:`dflash.train.data.load_prompts`."""
    return [
        Job(prompt["line"], sample, prompt, temperature, fold(fold(settings.seed, prompt["line"]), sample))
        for prompt in prompts
        for sample, temperature in enumerate(settings.draws)
    ]
