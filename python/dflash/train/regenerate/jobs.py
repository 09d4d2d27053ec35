"""The responses that a run writes, and the interface of their writer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from ...evaluate import as_messages, check_text
from ...sampling import fold
from ...settings import checked

__all__ = ["Answer", "Job", "Settings", "Summary", "Writer", "check_prompt", "jobs"]


@dataclass(frozen=True)
class Settings:
    """Sampling settings of a run. Most fields are options of ``dflash regenerate``.

    Attributes:
        temperatures: each prompt is answered once at 0, greedily, and ``samples`` times at every other temperature.
        seed: seed of the run. A response's seed is a hash of it, the prompt's line and the sample's number, so a
            response does not depend on the rest of its batch.
        max_new_tokens: per response, the stop token included.
        top_k, top_p, min_p: see `dflash.generate`. Off by default, whatever the target's generation_config says.

    Raises:
        ValueError: a setting is out of range. The message names it.
    """

    temperatures: tuple[float, ...] = (0.0,)
    samples: Annotated[int, "Responses per prompt at each positive temperature."] = 1
    seed: Annotated[int, "The same seed writes the same responses."] = 0
    max_new_tokens: Annotated[int, "New tokens at most."] = 1024
    top_k: Annotated[int, "Keep the k best tokens; 0 is off."] = 0
    top_p: Annotated[float, "Keep the most probable tokens up to this mass."] = 1.0
    min_p: Annotated[float, "Drop tokens this much less probable than the best."] = 0.0

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures must be one or more distinct values, got {list(self.temperatures)}")
        for temperature in self.temperatures:
            checked("temperature", temperature)
        for name in ("top_k", "top_p", "min_p", "seed"):
            checked(name, getattr(self, name))

    @property
    def sample_temperatures(self) -> list[float]:
        """The temperature of each response to a prompt, by its number."""
        return [t for t in self.temperatures for _ in range(self.samples if t else 1)]


@dataclass(frozen=True)
class Job:
    """One response to write.

    Attributes:
        line: line of the prompt in its source, from 1.
        sample: number of the response among those to its prompt, from 0.
        prompt: a row of `dflash.train.data.load_prompts`.
        temperature, seed: how it is sampled.
    """

    line: int
    sample: int
    prompt: dict[str, Any]
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    """One response.

    Attributes:
        response: text of the response.
        finish_reason: ``"stop"``, or ``"length"`` if it was cut off and has no stop token.
        prompt_ids, response_ids: None if the writer does not know them. ``response_ids`` ends with the stop token.
        num_tokens: new tokens.
    """

    response: str
    finish_reason: str
    prompt_ids: list[int] | None = None
    response_ids: list[int] | None = None
    num_tokens: int = 0


class Writer(Protocol):
    """Answers jobs, in any order.

    Attributes:
        name: the writer's name in rows.
        encoding: ``raw``, ``bos`` and ``template``, as for `dflash.train.data.prompt_ids`.
        ids: ids of each prompt by its line, as far as the writer knows them.
        skipped: lines of prompts left out because they are too long.
        acceptance_length: mean tokens per step so far; None without a drafter.
    """

    name: str
    encoding: dict[str, Any]
    ids: dict[int, list[int]]
    skipped: set[int]
    acceptance_length: float | None

    def check(self, jobs: Sequence[Job], settings: Settings) -> None:
        """Fill ``ids`` and ``skipped``; raise ``ValueError`` if a prompt cannot be answered. Runs before any answer."""

    def answers(self, jobs: Sequence[Job], settings: Settings) -> Iterator[list[tuple[Job, Answer]]]:
        """Yield groups of answers as they arrive. Closing the iterator stops the work."""


@dataclass
class Summary:
    """Summary of a run.

    Attributes:
        written: responses written by this run.
        found: responses that were in the file before.
        tokens: tokens of the responses written.
        truncated: responses that were cut off.
        seconds: time spent writing.
        acceptance_length: mean tokens per step; None without a drafter.
        skipped: prompts left out because they are too long.
        out: the file.
    """

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
        """Tokens written per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def add(self, answers: Sequence[Answer], seconds: float) -> None:
        """Count a group of answers, ``seconds`` after the start."""
        self.written += len(answers)
        self.tokens += sum(answer.num_tokens for answer in answers)
        self.truncated += sum(answer.finish_reason == "length" for answer in answers)
        self.seconds = seconds


def jobs(prompts: Sequence[dict[str, Any]], settings: Settings) -> list[Job]:
    """Return every response that ``settings`` asks for, to prompts of `dflash.train.data.load_prompts`."""
    return [
        Job(prompt["line"], sample, prompt, temperature, fold(fold(settings.seed, prompt["line"]), sample))
        for prompt in prompts
        for sample, temperature in enumerate(settings.sample_temperatures)
    ]


def check_prompt(job: Job) -> None:
    """Raise ``ValueError`` for a prompt that is not Unicode text, which neither a tokenizer nor a server takes."""
    for text in (value for turn in as_messages(job.prompt) for value in turn.values() if isinstance(value, str)):
        check_text(text, f"the text of the prompt on line {job.line}")
