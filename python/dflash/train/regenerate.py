"""Responses written by the target itself, which is what its drafter learns from: :func:`regenerate`.

A prompt's responses come from the package's own generator (:class:`LocalWriter`) or from a server that speaks the
OpenAI protocol (:class:`ServerWriter`) and are appended to a JSONL file as they come, so that a run that was stopped
goes on where it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ..drafter import Drafter
from ..generator import Generator
from ..sampling import Sampling, fold
from ..target import text_config
from .data import prompt_ids

__all__ = ["Answer", "Job", "LocalWriter", "ServerWriter", "Settings", "Summary", "Writer", "jobs", "regenerate"]

_PREFILL_ROWS = 16384  # of a batch, in one forward pass
_SEED_BITS = 31  # what every server takes


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


# ---------------------------------------------------------------------------------------------- our own generator


class LocalWriter:
    """Answers through :class:`dflash.Generator`, in batches of prompts of like length, the longest first.

    Args:
        target: the causal language model of transformers.
        tokenizer: its tokenizer.
        draft: a drafter of it, to go faster one sequence at a time; None decodes one token a step, which is faster in
            wide batches.
        name: what rows call the target.
        batch_size: rows of a batch.
        raw, bos, template: see :func:`dflash.train.data.prompt_ids`.
        skip_long: leave out prompts that are too long for the target with their response, instead of raising.
    """

    def __init__(
        self,
        target: nn.Module,
        tokenizer: Any,
        draft: Drafter | None = None,
        *,
        name: str = "",
        batch_size: int = 64,
        raw: bool = False,
        bos: bool = False,
        template: Mapping[str, Any] | None = None,
        skip_long: bool = False,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.target, self.tokenizer, self.draft = target, tokenizer, draft
        self.name, self.batch_size, self.skip_long = name, batch_size, skip_long
        self.encoding: dict[str, Any] = {"raw": raw, "bos": bos, "template": dict(template or {})}
        self.ids: dict[int, list[int]] = {}
        self._steps: list[int] = [0, 0]  # how many, and the tokens they emitted

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens a step so far; None without a drafter or a step."""
        steps, tokens = self._steps
        return tokens / steps if self.draft is not None and steps else None

    def check(self, jobs: Sequence[Job], settings: Settings) -> set[int]:
        """Tokenize every prompt; raise if one does not fit the target with its response, or leave it out."""
        positions = getattr(text_config(self.target), "max_position_embeddings", None)
        self.ids, long = {}, set()
        for job in jobs:
            if job.line in self.ids:
                continue
            try:
                ids = self.ids[job.line] = prompt_ids(self.tokenizer, job.prompt, **self.encoding)
            except ValueError as error:
                raise ValueError(f"the prompt on line {job.line}: {error}") from error
            if not ids:
                raise ValueError(f"the prompt on line {job.line} has no token")
            if positions is not None and len(ids) + settings.max_new_tokens > positions:
                if not self.skip_long:
                    raise ValueError(
                        f"the prompt on line {job.line} has {len(ids)} tokens: with {settings.max_new_tokens} new ones "
                        f"it passes the target's {positions} positions (--skip-long leaves such prompts out)"
                    )
                long.add(job.line)
        return long

    def answers(self, jobs: Sequence[Job], settings: Settings) -> Iterator[list[tuple[Job, Answer]]]:
        """As :class:`Writer` says; :meth:`check` comes first."""
        if not jobs:
            return
        longest = max(len(self.ids[job.line]) for job in jobs)
        rows = min(self.batch_size, len(jobs))
        generator = Generator(
            self.target,
            self.draft,
            max_length=longest + settings.max_new_tokens,
            batch_size=rows,
            prefill_chunk=max(1, min(512, _PREFILL_ROWS // rows)),
            reuse_prefix=False,
        )
        for temperature in settings.temperatures:
            of_one = [job for job in jobs if job.temperature == temperature]
            of_one.sort(key=lambda job: len(self.ids[job.line]), reverse=True)
            for start in range(0, len(of_one), rows):
                yield self._batch(generator, of_one[start : start + rows], settings)

    def _batch(self, generator: Generator, jobs: list[Job], settings: Settings) -> list[tuple[Job, Answer]]:
        prompts = [torch.tensor(self.ids[job.line]) for job in jobs]
        ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
        device = self.target.get_input_embeddings().weight.device
        out = generator.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=settings.max_new_tokens,
            temperature=jobs[0].temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=[job.seed for job in jobs],
            return_dict_in_generate=True,
        )
        steps = [length for row in out.statistics.acceptance_lengths for length in row]
        self._steps = [self._steps[0] + len(steps), self._steps[1] + sum(steps)]
        written = out.sequences[:, ids.shape[1] :].tolist()
        group = []
        for job, row, length, reason in zip(
            jobs, written, out.statistics.num_new_tokens, out.finish_reasons, strict=True
        ):
            response = row[:length]
            text = self.tokenizer.decode(response, skip_special_tokens=True)
            group.append((job, Answer(text, reason, self.ids[job.line], response, length)))
        return group


# ---------------------------------------------------------------------------------------------- servers


class _TooLongError(ValueError):
    """A server has no room for a prompt and its response."""


_TOO_LONG = re.compile(r"context (length|window|size)|too long|max(imum)?[ _]model[ _]len|longer than", re.IGNORECASE)


class ServerWriter:
    """Answers through a server with OpenAI's protocol (vLLM, SGLang, llama.cpp ...), several requests at a time.

    Args:
        url: the API's root, as in ``http://localhost:8000/v1``.
        model: the name under which it serves the target.
        raw: complete prompts as they are, instead of sending them as a user's message.
        template: arguments of the chat template (``chat_template_kwargs`` of vLLM and SGLang).
        concurrency: requests at once.
        retries: how often a request is sent again after a network error or an answer of status 408, 429 or 5xx.
        backoff: seconds before the first of them, doubled each time.
        timeout: seconds for one answer.
        api_key: sent as a bearer token.
        token_ids: ask for the ids as well (vLLM's ``return_token_ids``); rows hold them then.
        skip_long: leave out prompts that the server refuses as too long, instead of raising.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        raw: bool = False,
        template: Mapping[str, Any] | None = None,
        concurrency: int = 32,
        retries: int = 4,
        backoff: float = 1.0,
        timeout: float = 600.0,
        api_key: str | None = None,
        token_ids: bool = False,
        skip_long: bool = False,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the server must be an http:// or https:// URL, got {url!r}")
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self.url, self.name = url.rstrip("/"), model
        self.raw, self.template = raw, dict(template or {})
        self.encoding = {"raw": raw, "bos": False, "template": self.template}
        self.concurrency, self.retries, self.backoff, self.timeout = concurrency, retries, backoff, timeout
        self.api_key, self.token_ids = api_key, token_ids
        self.ids: dict[int, list[int]] = {}  # the server keeps them
        self.skip_long = skip_long
        self.too_long: set[int] = set()  # lines of prompts that were refused so

    def check(self, jobs: Sequence[Job], settings: Settings) -> set[int]:
        """Raise if a conversation is to be completed raw."""
        if self.raw:
            for job in jobs:
                if "messages" in job.prompt:
                    raise ValueError(f"the prompt on line {job.line} is a conversation, which cannot be continued raw")
        return set()

    def answers(self, jobs: Sequence[Job], settings: Settings) -> Iterator[list[tuple[Job, Answer]]]:
        """As :class:`Writer` says. The first request that fails for good ends the run.

        Requests that are under way when the run ends are not waited for: a server may take minutes for one.
        """
        stopped, self.too_long = threading.Event(), set()
        asked: queue.SimpleQueue[Job] = queue.SimpleQueue()
        answered: queue.SimpleQueue[tuple[Job, Answer | BaseException]] = queue.SimpleQueue()

        def work() -> None:
            with contextlib.suppress(queue.Empty):
                while not stopped.is_set():
                    job = asked.get_nowait()
                    try:
                        answered.put((job, self._answer(job, settings, stopped)))
                    except BaseException as error:  # raised where answers are waited for
                        if not self._left_out(error):
                            stopped.set()
                        answered.put((job, error))

        for job in jobs:
            asked.put(job)
        for _ in range(min(self.concurrency, len(jobs))):
            threading.Thread(target=work, name="dflash-request", daemon=True).start()
        left = len(jobs)
        try:
            while left:
                group = [answered.get()]
                with contextlib.suppress(queue.Empty):
                    while True:
                        group.append(answered.get_nowait())
                left -= len(group)
                # What was answered is written before what failed ends the run.
                if good := [(job, answer) for job, answer in group if isinstance(answer, Answer)]:
                    yield good
                for job, error in group:
                    if self._left_out(error):
                        self.too_long.add(job.line)
                    elif isinstance(error, BaseException):
                        raise error
        finally:
            stopped.set()

    def _left_out(self, outcome: Answer | BaseException) -> bool:
        return self.skip_long and isinstance(outcome, _TooLongError)

    def _answer(self, job: Job, settings: Settings, stopped: threading.Event) -> Answer:
        chat = not self.raw
        body: dict[str, Any] = {
            "model": self.name,
            "max_tokens": settings.max_new_tokens,
            "temperature": job.temperature,
            "top_p": settings.top_p,
            "seed": job.seed % 2**_SEED_BITS,
        }
        # Not of OpenAI's own protocol: sent only where asked for.
        body |= {name: getattr(settings, name) for name in ("top_k", "min_p") if getattr(settings, name)}
        if self.token_ids:
            body["return_token_ids"] = True
        if chat and self.template:
            body["chat_template_kwargs"] = self.template
        if chat:
            messages = job.prompt.get("messages") or [{"role": "user", "content": job.prompt["prompt"]}]
            return self._read(self._post("/chat/completions", {**body, "messages": messages}, job, stopped), job, chat)
        reply = self._post("/completions", {**body, "prompt": job.prompt["prompt"]}, job, stopped)
        return self._read(reply, job, chat)

    def _read(self, reply: Any, job: Job, chat: bool) -> Answer:
        try:
            choice = reply["choices"][0]
            message = choice["message"] if chat else choice
            text, reason = message["content" if chat else "text"], choice["finish_reason"]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self.url}: not an answer of OpenAI's protocol: {str(reply)[:200]}") from error
        if chat and (message.get("reasoning_content") or message.get("reasoning")):
            raise ValueError(
                f"{self.url}: it keeps the thoughts of {self.name} apart from its answers, and the drafter needs the "
                "text as it was written: start the server without a reasoning parser"
            )
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise ValueError(
                f"{self.url}: the answer to line {job.line} has finish_reason {reason!r} and content {text!r:.60}"
            )
        ids = choice.get("token_ids") if self.token_ids else None
        prompt = (choice.get("prompt_token_ids") or reply.get("prompt_token_ids")) if self.token_ids else None
        if self.token_ids and not (ids and prompt):
            raise ValueError(f"{self.url}: it was asked for token ids and sends none (return_token_ids is vLLM's)")
        usage = reply.get("usage") or {}
        return Answer(text, reason, prompt, ids, usage.get("completion_tokens") or len(ids or ()))

    def _post(self, path: str, body: dict[str, Any], job: Job, stopped: threading.Event) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        for attempt in range(self.retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                reason = f"status {error.code}: {_message(error)}"
                if error.code not in (408, 429) and error.code < 500:
                    kind = _TooLongError if error.code == 413 or _TOO_LONG.search(reason) else ValueError
                    raise kind(f"{self.url}{path} refused the prompt on line {job.line}: {reason}") from error
            except (OSError, http.client.HTTPException) as error:  # no connection, reset, timed out, cut off
                reason = str(getattr(error, "reason", error)) or type(error).__name__
            except ValueError as error:
                raise ValueError(f"{self.url}{path} answers with what is not JSON: {error}") from error
            if attempt < self.retries and stopped.wait(self.backoff * 2**attempt):
                break
        raise ValueError(
            f"{self.url}{path} did not answer the prompt on line {job.line} in {attempt + 1} tries: {reason}"
        )


def _message(error: urllib.error.HTTPError) -> str:
    """What a server says of its refusal, in one line."""
    text = error.read(4096).decode(errors="replace").strip()
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        content = json.loads(text)
        inner = content.get("error", content)
        text = inner if isinstance(inner, str) else inner["message"]
    return " ".join(text.split())[:300] or error.reason
