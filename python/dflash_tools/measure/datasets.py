"""Prompts of datasets: known ones by name, files of JSON lines or text, and the hub's."""

from __future__ import annotations

import gzip
import itertools
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dflash.internals import files
from dflash.light import terminal

_TURNS = ("turns", "prompt", "question")
PROMPT_FIELDS = "prompt, messages, conversations, question or turns"
_TEXT_SUFFIXES = (".txt", ".txt.gz")
_JSON_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
_SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"


class Dataset(NamedTuple):
    """A known dataset: names of its file, arguments of ``datasets.load_dataset``, and the categories that count."""

    files: tuple[str, ...]
    hub: dict[str, Any]
    categories: tuple[str, ...] = ()


# fmt: off
DATASETS = {
    "humaneval": Dataset(
        ("HumanEval.jsonl.gz", "HumanEval.jsonl"), {"path": "openai/openai_humaneval", "split": "test"}),
    "gsm8k": Dataset(("gsm8k_test.jsonl", "gsm8k.jsonl"), {"path": "openai/gsm8k", "name": "main", "split": "test"}),
    "mt-bench": Dataset(
        ("mt_bench.jsonl", "spec_bench.jsonl"), {"path": "HuggingFaceH4/mt_bench_prompts", "split": "train"},
        _MT_BENCH),
    "spec-bench": Dataset(("spec_bench.jsonl",), {"path": "json", "data_files": _SPEC_BENCH, "split": "train"}),
}
# fmt: on


class Conversation(NamedTuple):
    """A user's turns, which follow the messages of ``history``."""

    turns: tuple[str, ...]
    history: tuple[dict[str, str], ...] = ()


def load_conversations(dataset: str, data: str | Path | None = None, limit: int | None = None) -> list[Conversation]:
    """Load the prompts of a dataset as published, with no instruction added.

    Args:
        dataset: a key of `DATASETS`, or a file of JSON lines, gzipped or not. A line has ``turns``, ``prompt`` or
            ``question``, a text or a list of them; or ``messages``, of which the user's last is answered.
        data: the folder of the known datasets' files; None loads them from the hub, through ``datasets``.
        limit: maximum number of prompts.
    """
    categories = DATASETS[dataset].categories if dataset in DATASETS else ()
    rows = _rows(dataset, data)
    if categories:
        rows = ((where, row) for where, row in rows if row.get("category", categories[0]) in categories)
    prompts = [_conversation(row, where) for where, row in itertools.islice(rows, limit)]
    if not prompts:
        raise ValueError(f"--dataset {dataset!r} has no prompts")
    return prompts


def _conversation(row: Mapping[str, Any], where: str) -> Conversation:
    messages, turns = parse_prompt(row, where)
    if parse_tools(row, where):
        raise ValueError(f"{where}: a benchmark shows no tools: leave them out")
    if messages is None:
        return Conversation(tuple(turns))
    *history, last = messages
    if last["role"] != "user":
        raise ValueError(f"{where}: the last message to answer must be the user's")
    return Conversation((last["content"],), tuple(history))


def _rows(dataset: str, data: str | Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a dataset, each with its place for error messages."""
    source, path = DATASETS.get(dataset), Path(dataset)
    if source is not None and data is None:
        local = f"--data DIR reads {source.files[0]} from a folder instead"
        name = source.hub.get("data_files", source.hub["path"])
        rows = _from_hub(f"--dataset {dataset}: {name} could not be loaded ({local})", "bench", **source.hub)
        yield from ((f"{dataset}, row {index}", row) for index, row in enumerate(rows))
        return
    if source is not None:
        path = next(filter(Path.is_file, (Path(data) / name for name in source.files)), None)
        if path is None:
            raise ValueError(f"--data {str(data)!r} holds no {' or '.join(source.files)} for {dataset}")
    elif not path.is_file():
        raise ValueError(f"--dataset {dataset!r} is neither one of {', '.join(DATASETS)} nor a file of JSON lines")
    yield from ((where, row) for where, _, row in read_jsonl(path))


def _from_hub(failed: str, extra: str, *place: Any, **options: Any) -> Any:
    """Load a data set; ``failed`` begins the error."""
    try:
        return import_datasets(extra).load_dataset(*place, **options)
    except Exception as error:  # several libraries raise their own: not found, gated, offline, no such split, disk full
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{failed}: {reason}") from error


def import_datasets(extra: str = "train") -> Any:
    """Import the ``datasets`` package; the error names the extra that installs it."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"this needs the datasets package: pip install '.[{extra}]'") from error
    return datasets


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Read the lines of a UTF-8 text file, gzipped if its name ends in ``.gz``, with their numbers from 1.

    Raises:
        ValueError: a line is not UTF-8, and is named; or the file is cut short, and the last good line is named.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rb") as file:  # as text, a wrong byte would be found with its whole buffer, lines too early
            for number, line in enumerate(file, 1):
                yield number, line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}: not UTF-8 text: the byte {error.object[error.start]:#x}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file after line {number}: {error}") from error


def read_jsonl(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Read the objects of a JSONL file; empty lines are skipped.

    Yields:
        The place for error messages, the line's number, the object.

    Raises:
        ValueError: as `read_lines`, and for a line that is not a JSON object.
    """
    for number, content in read_lines(path):
        if content.strip():
            where = f"{path}, line {number}"
            row = files.parse_json(content, where)
            if not isinstance(row, dict):
                raise ValueError(f"{where}: must be a JSON object, got {type(row).__name__}")
            yield where, number, row


def read_records(source: str | os.PathLike, split: str) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield place (for error messages), line and content of each row of a source.

    A source is a JSONL file or a text file (one row, ``{"text"}``), gzipped or not, or the hub name of a data set,
    ``owner/name`` or ``owner/name:config``.
    """
    name = os.fspath(source)
    path = Path(name).expanduser()
    if path.is_dir():
        raise ValueError(f"data {name!r} is a folder: name its files")
    if path.is_file():
        if not name.endswith(_TEXT_SUFFIXES):
            yield from read_jsonl(path)
        elif (text := "".join(line for _, line in read_lines(path))).strip():
            yield str(path), 1, {"text": text}
        return
    if name.startswith((".", "/", "~")) or name.endswith(_TEXT_SUFFIXES + _JSON_SUFFIXES) or name.count("/") > 1:
        raise FileNotFoundError(f"there is no data file {name!r}")
    hub, _, config = name.partition(":")
    failed = f"data {name!r} is neither a file nor a data set within reach"
    rows = _from_hub(failed, "train", hub, config or None, split=split)
    for line, row in enumerate(rows, 1):
        yield f"{name}, row {line}", line, {key: value for key, value in row.items() if value is not None}


_SPEAKERS = {"human": "user", "gpt": "assistant"}  # of ShareGPT


def with_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row without what is None; if it has only ``conversations`` to read, they become its ``messages``."""
    row = {key: value for key, value in row.items() if value is not None}
    if not row.get("conversations") or row.keys() & {*_TURNS, "messages", "response", "text", "input_ids"}:
        return row
    turns = row.pop("conversations")
    if isinstance(turns, list):
        turns = [_message(turn) if isinstance(turn, dict) else turn for turn in turns]
    return row | {"messages": turns}


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    if not turn.keys() >= {"from", "value"}:
        return turn
    speaker = turn["from"]
    return {"role": _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker, "content": turn["value"]}


def parse_prompt(row: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]] | None, list[str]]:
    """Return what a row asks: messages up to the last that is not the assistant's, or None and the user's turns.

    A row has ``messages`` (or a ``prompt`` that is a list of them); or ``turns``, ``prompt`` or ``question``, a text or
    a list of texts. Anything else raises ``ValueError``, beginning with ``where``.
    """
    row = with_messages(row)
    prompt = row.get("prompt")
    if "messages" in row or (isinstance(prompt, list) and any(isinstance(turn, dict) for turn in prompt)):
        messages = parse_messages(row, where)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not any(message["role"] != "system" for message in messages):
            raise ValueError(f"{where}: messages has nothing to answer: no message before the assistant's")
        return messages, []
    field = next((name for name in _TURNS if name in row), None)
    if field is None:
        raise ValueError(f"{where}: a prompt needs {PROMPT_FIELDS}, got {', '.join(row) or 'no field'}")
    turns = [row[field]] if isinstance(row[field], str) else row[field]
    if not isinstance(turns, list | tuple) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        given = terminal.shortened(row[field])
        raise ValueError(f"{where}: {field} must be non-empty text, or a list of such, got {given}")
    return None, list(turns)


def first_prompt(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a row's ``prompt`` or ``messages``, with its tools. Of several turns, the first is used."""
    messages, turns = parse_prompt(row, where)
    prompt: dict[str, Any] = {"prompt": turns[0]} if messages is None else {"messages": messages}
    return prompt | parse_tools(row, where)


def parse_tools(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the ``tools`` of a row, a list or its JSON text; nothing if it has none."""
    tools = row.get("tools") or None
    tools = files.parse_json(tools, f"{where}: tools") if isinstance(tools, str) else tools
    return {"tools": tools} if tools else {}


def parse_messages(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return all messages of a row, each with ``role`` and ``content``."""
    messages = row.get("messages", row.get("prompt"))
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}: messages must be a list of role and content, got {terminal.shortened(messages)}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            given = terminal.shortened(message)
            raise ValueError(f"{where}: message {number} must have role and content as text, got {given}")
    return [dict(message) for message in messages]
