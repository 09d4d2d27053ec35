"""The receipt of a call: what was asked and answered, and all that decided it; as a file, JSON of unknown origin."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from ..call import Call
from ..files import read_json, write_atomically
from ..limits import MAX_ANSWERS, MAX_BLOCK_SIZE, MAX_POSITIONS, MAX_RECEIPT_BYTES
from ..ops import WeightStorage
from ..sampling import integer
from ..streaming import Tokenizer
from ..terminal import printable, shortened
from .fingerprints import Fingerprints
from .settings import Settings, check_names, unset

__all__ = ["Answer", "Receipt"]

_FORMAT = "dflash-receipt-1"
_REASONS = ("stop", "length")


@dataclass(frozen=True)
class Answer:
    """One row of a call.

    Attributes:
        prompt: its token ids, without padding.
        ids: the answer's token ids, the stop token included.
        seed: of the row's keyed noise (`dflash.sampling.fold`); means nothing at temperature 0.
        finish_reason: ``"stop"`` or ``"length"``.
    """

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    seed: int
    finish_reason: str

    @classmethod
    def parse(cls, content: object, vocab_size: int) -> Answer:
        """Check an answer of unknown origin; raises TypeError or ValueError."""
        given = check_names(content, [field.name for field in dataclasses.fields(cls)], "an answer")
        seed, reason = integer("seed", given["seed"]), given["finish_reason"]
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must fit in int64, got {shortened(seed)}")
        if reason not in _REASONS:
            raise ValueError(f"finish_reason must be {' or '.join(_REASONS)}, got {shortened(reason)}")
        prompt, ids = (_parse_ids(name, given[name], vocab_size) for name in ("prompt", "ids"))
        return cls(prompt, ids, seed, str(reason))


def _parse_ids(name: str, value: object, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise TypeError(f"{name} must be a list of at least one token id, got {shortened(value)}")
    for token in value:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"{name} must hold token ids in 0 .. {vocab_size - 1}, got {shortened(token)}")
    return tuple(value)


@dataclass(frozen=True)
class Receipt:
    """What `dflash.verify` needs to derive every token of a call's answers again.

    It is made by a `Recorder`. It says nothing of the drafter, and needs none.

    Attributes:
        answers: one per row of the call.
        settings: temperature, filters, stop lists, logit rules and grammar.
        fingerprints: of the target and the tokenizer.
        block_size: rows per answer of a step. In bf16 the same bits come from the same shapes.
        batch_size: answers that a step had room for, those of other calls included.
        prefill_chunk: prompt tokens per pass.
        weights: how the target's were stored: "int8", or None for the weights themselves.
    """

    answers: tuple[Answer, ...]
    settings: Settings
    fingerprints: Fingerprints
    block_size: int
    batch_size: int
    prefill_chunk: int
    weights: WeightStorage = None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Receipt:
        """Read a file of unknown origin.

        Raises:
            ValueError: it is not a receipt that this version can check; the message begins with the path.
        """
        where = printable(path)
        content = read_json(Path(path), MAX_RECEIPT_BYTES, unique_keys=True)
        try:
            return cls.parse(content)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where} is not a receipt that can be checked: {error}") from error

    @classmethod
    def parse(cls, content: object) -> Receipt:
        """Check the content of a receipt's JSON.

        Args:
            content: as ``json.loads`` returns it.

        Raises:
            ValueError: a name is missing or unknown, or a value is out of range.
            TypeError: a value has the wrong type.
        """
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f'its "format" must be {_FORMAT!r}')
        given = check_names(content, ["format", *(field.name for field in dataclasses.fields(cls))], "a receipt")
        fingerprints, rows = Fingerprints.parse(given["fingerprints"]), given["answers"]
        if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_ANSWERS:
            raise ValueError(f"answers must be a list of 1 to {MAX_ANSWERS}, got {shortened(rows)}")
        settings = Settings.parse(given["settings"], fingerprints.vocab_size)
        answers = tuple(Answer.parse(row, fingerprints.vocab_size) for row in rows)
        ranges = {"block_size": (1, MAX_BLOCK_SIZE), "batch_size": (len(rows), MAX_ANSWERS)}
        ranges["prefill_chunk"] = 1, MAX_POSITIONS
        for name, (low, high) in ranges.items():
            if not low <= integer(name, given[name]) <= high:
                raise ValueError(f"{name} must lie in {low} .. {high}, got {shortened(given[name])}")
        if (weights := given["weights"]) not in ("int8", None):
            raise ValueError(f'weights must be "int8" or null, got {shortened(weights)}')
        return cls(answers, settings, fingerprints, **{name: given[name] for name in ranges}, weights=weights)

    def to_json(self) -> str:
        """Return the receipt as JSON."""
        content = {
            "format": _FORMAT,
            "answers": [dataclasses.asdict(answer) for answer in self.answers],
            "settings": self.settings.to_json(),
            "fingerprints": dataclasses.asdict(self.fingerprints),
            **{name: getattr(self, name) for name in ("block_size", "batch_size", "prefill_chunk", "weights")},
        }
        return json.dumps(content, allow_nan=False)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the receipt as a JSON file, which appears whole or not at all.

        Raises:
            OSError: it cannot be written.
        """
        write_atomically(Path(path), lambda unfinished: unfinished.write_text(self.to_json() + "\n", encoding="utf-8"))


def call_of(answers: Sequence[Answer], receipt: Receipt, device: torch.device, tokenizer: object = None) -> Call:
    """Return the call that asks for some answers of a receipt, without its stop strings.

    Args:
        answers: of the receipt.
        receipt: says how they were asked for.
        device: of the target.
        tokenizer: the receipt's own, for a grammar.

    Raises:
        ValueError: a value is out of range, or two contradict each other.
        TypeError: a value has the wrong type.
    """
    width = max(len(answer.prompt) for answer in answers)
    ids = torch.zeros(len(answers), width, dtype=torch.int64, device="cpu")
    mask = torch.zeros_like(ids)
    for row, answer in enumerate(answers):
        ids[row, : len(answer.prompt)] = torch.tensor(answer.prompt, dtype=torch.int64, device="cpu")
        mask[row, : len(answer.prompt)] = 1
    arguments = receipt.settings.arguments()
    if receipt.settings.grammar is not None:
        arguments |= {"grammar": receipt.settings.grammar, "tokenizer": cast("Tokenizer", tokenizer)}
    arguments |= {"attention_mask": mask.to(device), "seed": [answer.seed for answer in answers]}
    return Call.resolve(unset(receipt.fingerprints.vocab_size, device), ids.to(device), arguments)
