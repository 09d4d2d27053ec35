"""The datasets of ``dflash benchmark``: published prompts, by name or from a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import read_jsonl
from .prompts import import_datasets, parse_prompt

__all__ = ["SOURCES", "Prompt", "load_prompts"]

_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Source:
    """Where a dataset comes from.

    Attributes:
        files: names that its file may have.
        hub: arguments of ``datasets.load_dataset``.
        categories: only these count; None for all.
    """

    files: tuple[str, ...]
    hub: dict[str, Any]
    categories: tuple[str, ...] | None = None


_SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
SOURCES = {
    "humaneval": Source(
        ("HumanEval.jsonl.gz", "HumanEval.jsonl"), {"path": "openai/openai_humaneval", "split": "test"}
    ),
    "gsm8k": Source(("gsm8k_test.jsonl", "gsm8k.jsonl"), {"path": "openai/gsm8k", "name": "main", "split": "test"}),
    "mt-bench": Source(
        ("mt_bench.jsonl", "spec_bench.jsonl"),
        {"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"},
        _MT_BENCH,
    ),
    "spec-bench": Source(("spec_bench.jsonl",), {"path": "json", "data_files": _SPEC_BENCH, "split": "train"}),
}


@dataclass(frozen=True)
class Prompt:
    """What a user says, turn by turn.

    Attributes:
        key: the prompt's place in its dataset and a digest of its text.
        turns: of the user.
        history: messages before the first turn.
    """

    key: str
    turns: tuple[str, ...]
    history: tuple[dict[str, str], ...] = ()


def load_prompts(dataset: str, data: str | Path | None = None, limit: int | None = None) -> list[Prompt]:
    """Load the prompts of a dataset as published, with no instruction added.

    Args:
        dataset: a key of `SOURCES`, or a file of JSON lines, gzipped or not. A line has ``turns``, ``prompt`` or
            ``question``, a text or a list of them; or ``messages``, of which the user's last is answered.
        data: the folder of the known datasets' files; None loads them from the hub, through ``datasets``.
        limit: take only so many prompts.

    Raises:
        ValueError: the file is missing or one of its lines is wrong, ``datasets`` is missing or cannot reach the hub,
            or there is no prompt.
    """
    source = SOURCES.get(dataset)
    categories = None if source is None else source.categories
    prompts: list[Prompt] = []
    for where, row in _rows(dataset, source, data):
        if limit is not None and len(prompts) == limit:
            break
        messages, turns = parse_prompt(row, where)
        if categories and row.get("category", categories[0]) not in categories:
            continue
        history = messages or []
        if messages is not None:
            if messages[-1]["role"] != "user":
                raise ValueError(f"{where}: the last message to answer must be the user's")
            turns = [history.pop()["content"]]
        digest = hashlib.sha256("\0".join([*map(json.dumps, history), *turns]).encode()).hexdigest()[:16]
        prompts.append(Prompt(f"{len(prompts)}-{digest}", tuple(turns), tuple(history)))
    if not prompts:
        raise ValueError(f"--dataset {dataset!r} has no prompts")
    return prompts


def _rows(dataset: str, source: Source | None, data: str | Path | None) -> Iterable[tuple[str, Any]]:
    """The rows of a dataset, each with its place for error messages."""
    if source is None:
        path = Path(dataset)
        if not path.is_file():
            raise ValueError(f"--dataset {dataset!r} is neither one of {', '.join(SOURCES)} nor a file of JSON lines")
    elif data is None:
        return _rows_from_hub(dataset, source)
    else:
        found = [Path(data) / name for name in source.files if (Path(data) / name).is_file()]
        if not found:
            raise ValueError(f"--data {str(data)!r} holds no {' or '.join(source.files)} for {dataset}")
        path = found[0]
    return ((where, row) for where, _, row in read_jsonl(path))


def _rows_from_hub(dataset: str, source: Source) -> Iterable[tuple[str, Any]]:
    local = f"--data DIR reads {source.files[0]} from a folder instead"
    try:
        datasets = import_datasets("bench")
    except ValueError as error:
        raise ValueError(f"--dataset {dataset}: {error}; {local}") from error
    try:
        rows = datasets.load_dataset(**source.hub)
    except Exception as error:  # several libraries raise their own: offline, moved, disk full
        where = source.hub.get("data_files", source.hub["path"])
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--dataset {dataset}: {where} could not be loaded ({reason}); {local}") from error
    return ((f"{dataset}, row {index}", row) for index, row in enumerate(rows))
