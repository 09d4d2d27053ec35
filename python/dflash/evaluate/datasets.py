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
    """Where a dataset comes from: names of its file, arguments of ``datasets.load_dataset``, and which rows count."""

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
    """What a user says, turn by turn, behind the messages of ``history``; ``key`` is its place and a digest of it."""

    key: str
    turns: tuple[str, ...]
    history: tuple[dict[str, str], ...] = ()


def load_prompts(dataset: str, data: str | Path | None = None, limit: int | None = None) -> list[Prompt]:
    """The prompts of a dataset as published, no instruction added.

    Args:
        dataset: a key of :data:`SOURCES`, or a file of JSON lines, gzipped or not. A line has ``turns``, ``prompt`` or
            ``question``, a text or a list of them; or ``messages``, of which the last of the user is answered.
        data: the folder that holds the known datasets' files; None asks the hub, through ``datasets``.
        limit: the first so many prompts.

    Raises:
        ValueError: there is no such file, a line is not what it should be, ``datasets`` is missing or cannot reach the
            hub, or there is no prompt.
    """
    source = SOURCES.get(dataset)
    if source is None:
        path = Path(dataset)
        if not path.is_file():
            raise ValueError(f"--dataset {dataset!r} is neither one of {', '.join(SOURCES)} nor a file of JSON lines")
        rows: Iterable[tuple[str, Any]] = _from_file(path)
    elif data is None:
        rows = _from_hub(dataset, source)
    else:
        found = [Path(data) / name for name in source.files if (Path(data) / name).is_file()]
        if not found:
            raise ValueError(f"--data {str(data)!r} holds no {' or '.join(source.files)} for {dataset}")
        rows = _from_file(found[0])
    categories = None if source is None else source.categories
    prompts: list[Prompt] = []
    for where, row in rows:
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


def _from_file(path: Path) -> Iterable[tuple[str, Any]]:
    return ((where, row) for where, _, row in read_jsonl(path))


def _from_hub(dataset: str, source: Source) -> Iterable[tuple[str, Any]]:
    local = f"--data DIR reads {source.files[0]} from a folder instead"
    try:
        datasets = import_datasets("bench")
    except ValueError as error:
        raise ValueError(f"--dataset {dataset}: {error}; {local}") from error
    try:
        rows = datasets.load_dataset(**source.hub)
    except Exception as error:  # offline, moved, out of disk: its own kinds, and requests'
        where = source.hub.get("data_files", source.hub["path"])
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--dataset {dataset}: {where} could not be loaded ({reason}); {local}") from error
    return ((f"{dataset}, row {index}", row) for index, row in enumerate(rows))
