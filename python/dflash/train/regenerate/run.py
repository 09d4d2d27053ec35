"""Responses written by the target itself, which is what its drafter learns from: :func:`regenerate`.

A prompt's responses come from the package's own generator (:class:`LocalWriter`) or from a server that speaks the
OpenAI protocol (:class:`ServerWriter`) and are appended to a JSONL file as they come, so that a run that was stopped
goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .jobs import Answer, Job, Settings, Summary, Writer, jobs

__all__ = ["regenerate"]


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
    ``prompt_ids`` and ``response_ids`` where they are known, ``temperature``, ``seed``, ``model``, ``max_new_tokens``,
    and those of ``top_k``, ``top_p``, ``min_p``, ``raw``, ``bos`` and ``template`` that were on;
    :func:`dflash.train.data.load_rows` reads it, and asks as the row was asked.

    Args:
        prompts: from :func:`dflash.train.data.load_prompts`.
        writer: who answers.
        out: a JSONL file, made if need be, appended to else. Rows that are there are not written again; a last line
            that was torn is dropped.
        settings: how responses are drawn; greedily by default.
        progress: called with the summary so far and the number of rows to write, after every group of answers.

    Returns:
        What was done.

    Raises:
        ValueError: a prompt cannot be answered, or ``out`` holds rows of other prompts, settings or another model: it
            is left as it was. OSError: ``out`` cannot be written; what was written stays.
    """
    settings = Settings() if settings is None else settings
    wanted, out = jobs(prompts, settings), Path(out)
    left_out = writer.check(wanted, settings)
    wanted = [job for job in wanted if job.line not in left_out]
    with _appending(out) as file:
        done, whole = _finished(file, out, {(job.line, job.sample): job for job in wanted}, settings, writer)
        file.truncate(whole)
        file.seek(0, os.SEEK_END)
        missing = [job for job in wanted if (job.line, job.sample) not in done]
        summary = Summary(found=len(done), skipped=len(left_out), out=str(out))
        began = time.perf_counter()
        with contextlib.closing(writer.answers(missing, settings)) as groups:
            for group in groups:
                file.write(b"".join(_line(job, answer, settings, writer) for job, answer in group))
                file.flush()
                summary.written += len(group)
                summary.tokens += sum(answer.num_tokens for _, answer in group)
                summary.truncated += sum(answer.finish_reason == "length" for _, answer in group)
                summary.seconds = time.perf_counter() - began
                summary.acceptance_length = getattr(writer, "acceptance_length", None)
                if progress is not None:
                    progress(summary, len(missing))
        os.fsync(file.fileno())
    summary.skipped += len(getattr(writer, "too_long", ()))
    return summary


def _drawn(job: Job, settings: Settings, writer: Writer) -> dict[str, Any]:
    """How and by whom a response was asked for and written; None for what is off."""
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    on = {key: None if getattr(settings, key) == value else getattr(settings, key) for key, value in off.items()}
    on |= {key: writer.encoding.get(key) or None for key in ("raw", "bos", "template")}
    common = {"temperature": job.temperature, "seed": job.seed, "model": writer.name}
    return {**common, "max_new_tokens": settings.max_new_tokens, **on}


def _line(job: Job, answer: Answer, settings: Settings, writer: Writer) -> bytes:
    row = {"line": job.line, "sample": job.sample}
    row |= {key: job.prompt[key] for key in ("prompt", "messages") if key in job.prompt}
    row |= {"response": answer.response, "finish_reason": answer.finish_reason}
    if answer.prompt_ids is not None:
        row["prompt_ids"] = answer.prompt_ids
    if answer.response_ids is not None:
        row["response_ids"] = answer.response_ids
    row |= {key: value for key, value in _drawn(job, settings, writer).items() if value is not None}
    return (json.dumps(row) + "\n").encode()


@contextlib.contextmanager
def _appending(path: Path) -> Iterator[Any]:
    """``path`` open for reading and writing, and locked; a file that was made and stayed empty is taken away."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r} to write {path.name} into")
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{path} is being written by another process") from error
        try:
            yield file
        finally:
            if not os.fstat(file.fileno()).st_size:
                path.unlink(missing_ok=True)


def _finished(
    file: Any, path: Path, wanted: dict[tuple[int, int], Job], settings: Settings, writer: Writer
) -> tuple[set[tuple[int, int]], int]:
    """The keys of the rows that ``path`` has, and the bytes up to the end of its last whole line."""
    file.seek(0)
    done, whole = set(), 0
    for number, line in enumerate(file, 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            if not line.endswith(b"\n"):
                break  # torn: the run that wrote it was killed
            raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
        if not line.endswith(b"\n"):
            break
        key = (row.get("line"), row.get("sample")) if isinstance(row, dict) else None
        job = wanted.get(key)
        if job is None:
            raise ValueError(f"{path}, line {number}: no response to any of these prompts: choose another file")
        for what, ours in _drawn(job, settings, writer).items():
            if row.get(what) != ours:
                raise ValueError(
                    f"{path}, line {number}: was written with {what} {row.get(what)!r}, now it is {ours!r}: "
                    "choose another file"
                )
        if any(row.get(kind) != job.prompt.get(kind) for kind in ("prompt", "messages")):
            raise ValueError(
                f"{path}, line {number}: answers another prompt than line {job.line}'s: choose another file"
            )
        if job.line in writer.ids and row.get("prompt_ids") != writer.ids[job.line]:
            raise ValueError(
                f"{path}, line {number}: was asked with other tokens than line {job.line}'s are now (tokenizer, chat "
                "template, --raw, --bos, --no-thinking): choose another file"
            )
        done.add(key)
        whole += len(line)
    return done, whole
