"""Write the target's responses to a JSONL file, and continue an interrupted run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...evaluate import Journal
from .jobs import Answer, Job, Settings, Summary, Writer, jobs

__all__ = ["regenerate"]

_Key = tuple[int, int]  # line and sample


def regenerate(
    prompts: Sequence[dict[str, Any]],
    writer: Writer,
    out: str | os.PathLike,
    settings: Settings | None = None,
    *,
    progress: Callable[[Summary, int], None] | None = None,
) -> Summary:
    """Write the responses that ``out`` does not have yet.

    A row of ``out`` holds ``line``, ``sample``, ``prompt`` or ``messages``, ``response``, ``finish_reason``,
    ``temperature``, ``seed``, ``model`` and ``max_new_tokens``. If known, it holds ``prompt_ids`` and ``response_ids``
    too. ``top_k``, ``top_p``, ``min_p``, ``raw``, ``bos`` and ``template`` are present only if they were on.
    `dflash.train.data.load_rows` reads such rows, and encodes each prompt as its row says.

    Args:
        prompts: prompts from `dflash.train.data.load_prompts`.
        writer: the writer that answers them.
        out: a JSONL file. Rows that it holds are not written again; a truncated last line is dropped.
        settings: sampling settings; None is greedy.
        progress: called after every group of answers, with the summary so far and the number of responses to write.

    Returns:
        A summary of the run.

    Raises:
        ValueError: a prompt cannot be answered, or ``out`` holds rows of other prompts, other settings or another
            model. ``out`` is not changed.
        OSError: ``out`` cannot be written. Rows already written remain.
    """
    # 1. Check every prompt
    settings = Settings() if settings is None else settings
    wanted = jobs(prompts, settings)
    writer.check(wanted, settings)
    by_key = {(job.line, job.sample): job for job in wanted if job.line not in writer.skipped}
    with Journal(Path(out)) as journal:
        # 2. Read what an earlier run wrote
        found = _read_found(journal, by_key, settings, writer)
        missing = [job for key, job in by_key.items() if key not in found]
        summary = Summary(found=len(found), out=str(out))
        journal.append([])
        # 3. Write the rest
        began = time.perf_counter()
        with contextlib.closing(writer.answers(missing, settings)) as groups:
            for group in groups:
                journal.append(_row(job, answer, settings, writer) for job, answer in group)
                summary.add([answer for _, answer in group], time.perf_counter() - began)
                summary.acceptance_length = writer.acceptance_length
                if progress is not None:
                    progress(summary, len(missing))
    summary.skipped = len(writer.skipped)
    return summary


def _provenance(job: Job, settings: Settings, writer: Writer) -> dict[str, Any]:
    """Return the fields of a row that say how and by whom it is written; None for settings that are off."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    on = {key: None if getattr(settings, key) == value else getattr(settings, key) for key, value in off.items()}
    on |= {key: writer.encoding.get(key) or None for key in ("raw", "bos", "template")}
    common = {"temperature": job.temperature, "seed": job.seed, "model": writer.name}
    return {**common, "max_new_tokens": settings.max_new_tokens, **on}


def _row(job: Job, answer: Answer, settings: Settings, writer: Writer) -> dict[str, Any]:
    """Return a row of the file."""
    row = {"line": job.line, "sample": job.sample}
    row |= {key: job.prompt[key] for key in ("prompt", "messages") if key in job.prompt}
    row |= {"response": answer.response, "finish_reason": answer.finish_reason}
    row |= {"prompt_ids": answer.prompt_ids, "response_ids": answer.response_ids}
    row |= _provenance(job, settings, writer)
    return {key: value for key, value in row.items() if value is not None}


def _read_found(journal: Journal, wanted: Mapping[_Key, Job], settings: Settings, writer: Writer) -> set[_Key]:
    """Return the keys of the rows in the file; raise ``ValueError`` for a row of another run."""
    found = set()
    for number, row in journal.read():
        key = (row.get("line"), row.get("sample")) if isinstance(row, dict) else ()
        difference = "no response to any of these prompts"
        if all(type(part) is int for part in key) and key in wanted:
            difference = _difference(row, wanted[key], settings, writer)
        if difference:
            raise ValueError(f"{journal.path}, line {number}: {difference}: choose another file")
        found.add(key)
    return found


def _difference(row: Mapping[str, Any], job: Job, settings: Settings, writer: Writer) -> str | None:
    """Return why ``row`` is not a response to ``job``; None if it is."""
    for what, ours in _provenance(job, settings, writer).items():
        if row.get(what) != ours:
            return f"was written with {what} {row.get(what)!r}, now it is {ours!r}"
    if any(row.get(kind) != job.prompt.get(kind) for kind in ("prompt", "messages")):
        return f"answers another prompt than line {job.line}'s"
    if job.line in writer.ids and row.get("prompt_ids") != writer.ids[job.line]:
        return (
            f"was asked with other tokens than line {job.line}'s are now "
            "(tokenizer, chat template, --raw, --bos, --no-thinking)"
        )
    return None
