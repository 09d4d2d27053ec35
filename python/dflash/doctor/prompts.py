"""A pair, the prompts that it is examined on, and its answers to them by the real decoding loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..drafter import Drafter
from ..evaluate import Decoding, GeneratorRunner, Total
from ..evaluate.prompts import parse_prompt, prompt_ids
from ..files import read_jsonl
from ..generator import Generator
from ..targets import max_positions

Show = Callable[..., None]  # show(name, done, total, text)

_COUNT = 8  # of the prompts next to a target
_MOST = 32  # of --prompts: the target's states over all answers are kept in memory
_OWN = (
    "Write a Python function that merges two sorted lists.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it take? Explain step by step.",
    "Summarize the plot of Romeo and Juliet in five sentences.",
    "Translate into French: The weather was so bad that we stayed at home and read.",
    "List the planets of the solar system in order, with one fact about each.",
    "Write a SQL query for the ten customers with the largest total of orders in 2023.",
    "Explain to a child why the sky is blue.",
    "Solve 3x + 7 = 25 and check the result.",
)


class Pair(NamedTuple):
    """A causal language model, its drafter, and the drafter's parsed ``config.json``."""

    target: Any
    drafter: Drafter
    keys: Mapping[str, Any]


class Answered(NamedTuple):
    """The token ids of a prompt with the target's answer to it, and the length of the prompt."""

    ids: list[int]
    prompt_length: int


class Answers(NamedTuple):
    """Prompts with their answers, what they took, and the generator that wrote them."""

    sequences: list[Answered]
    total: Total
    generator: Generator

    @property
    def acceptance_length(self) -> float:
        """Tokens per step; 0 if there was none."""
        return self.total.acceptance_length or 0.0


@dataclass(frozen=True)
class Prompts:
    """What a pair is asked, and how that is encoded.

    Attributes:
        rows: each ``{"prompt": text}`` or ``{"messages": [...]}``.
        tokenizer: the target's.
        template: arguments of the chat template.
        bos: put a BOS token before a prompt without chat template.
        origin: where the prompts come from, in words.
    """

    rows: Sequence[Mapping[str, Any]]
    tokenizer: Any
    template: Mapping[str, Any] = field(default_factory=dict)
    bos: bool = False
    origin: str = ""

    @functools.cached_property
    def ids(self) -> list[list[int]]:
        """Of each prompt. Raises ``ValueError`` if one cannot be encoded."""
        return [list(prompt_ids(self.tokenizer, row, template=self.template, bos=self.bos)) for row in self.rows]

    def check_room(self, target: Any) -> None:
        """Raise ``ValueError`` if a prompt cannot be encoded, or is too long for the target, which may be empty."""
        longest = max(map(len, self.ids))
        positions = max_positions(target)
        if positions is not None and longest + 2 > positions:
            raise ValueError(
                f"a prompt of {longest} tokens does not fit the target's {positions} positions: shorten it"
            )


def find_prompts(file: str | None, model: str) -> tuple[list[dict[str, Any]], str]:
    """Return the prompts to answer, each ``{"prompt"}`` or ``{"messages"}``, and where they come from in words.

    Args:
        file: JSON lines with ``prompt``, ``question``, ``turns`` (of which the first is asked) or ``messages``. Of more
            than 32, so many from all over the file are used. None for eight of ``prompts.jsonl`` next to the target's
            folder, if it is there, else of our own.
        model: the target's folder or hub id.

    Raises:
        ValueError: the file is missing, holds no prompt, or one of its lines is wrong.
    """
    if file is not None:
        return _some(_read(Path(file), f"--prompts {file!r}"), _MOST, file)
    path = Path(model).absolute().parent / "prompts.jsonl"
    if Path(model).is_dir() and path.is_file():
        try:
            return _some(_read(path, str(path)), _COUNT, str(path))
        except ValueError as error:
            raise ValueError(f"{error} (the file stands next to the target; --prompts names another)") from error
    return [{"prompt": text} for text in _OWN], f"{len(_OWN)} of the doctor's own"


def answer(pair: Pair, prompts: Prompts, max_new_tokens: int, show: Show) -> Answers:
    """Answer every prompt greedily. Raises ``ValueError`` as `Prompts.check_room`."""
    prompts.check_room(pair.target)
    room = max(map(len, prompts.ids)) + max_new_tokens
    positions = max_positions(pair.target)
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


def _some(rows: list[dict[str, Any]], most: int, name: str) -> tuple[list[dict[str, Any]], str]:
    """Return rows from all over a file, and in words which they are."""
    count = min(most, len(rows))
    which = f"all {count}" if count == len(rows) else f"{count} of the {len(rows)}"
    return [rows[index * len(rows) // count] for index in range(count)], f"{which} in {name}"


def _read(path: Path, name: str) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ValueError(f"{name} is not a file: name a file of JSON lines, each with a prompt")
    found: list[dict[str, Any]] = []
    for where, _, row in read_jsonl(path):
        messages, turns = parse_prompt(row, where)
        found.append({"prompt": turns[0]} if messages is None else {"messages": messages})
    if not found:
        raise ValueError(f"{name} is empty: a line is a JSON object with a prompt")
    return found
