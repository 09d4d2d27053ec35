"""Let the target write the responses that its drafter learns from: `regenerate`.

The package's own generator (`LocalWriter`) or a server (`ServerWriter`) writes them. They are appended to a JSONL file
as they arrive, so an interrupted run can continue. The target can write the prompts too (`write_prompts`): it continues
its chat template from where a user's text begins, which is Magpie's method (arXiv 2406.08464).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dflash import Drafter, Generator
from dflash.internals import Session, as_messages, check_text, files, fold, ops, prompt_ids, render_chat, targets
from dflash.light import terminal

from ..config import OFF, RegenerateConfig
from ..measure.datasets import read_jsonl
from .data import DistinctPrompts, special_ids

_SETTINGS = ("max_new_tokens", "temperature", "seed", "stop_token_ids", "stop_strings", *OFF)
# What must agree with the rows of an earlier run, in the order in which differences are named.
_ASKED = ("temperature", "seed", "model", "weights", "max_new_tokens", *OFF, "raw", "bos", "template")
_ASKED += ("prompt", "messages", "tools", "prompt_ids", "stop_token_ids", "stop_strings")


Row = dict[str, Any]  # a row of the file: what is asked, and then also the response


def jobs(prompts: Sequence[dict[str, Any]], config: RegenerateConfig) -> list[Row]:
    """Return a row per response that ``config`` asks for, to prompts of `dflash_tools.train.data.load_prompts`."""
    settings = {"max_new_tokens": config.max_new_tokens}
    settings |= {name: value for name, off in OFF.items() if (value := getattr(config, name)) != off}
    temperatures = [t for t in config.temperatures for _ in range(config.samples if t else 1)]
    rows = []
    for prompt in prompts:
        line = prompt["line"]
        for sample, temperature in enumerate(temperatures):
            sampling = {"temperature": temperature, "seed": fold(fold(config.seed, line), sample), **settings}
            rows.append({"line": line, "sample": sample, **prompt, **sampling})
    return rows


@dataclass
class Summary:
    """Responses written and found in the file; tokens, cut-off responses and mean tokens per step (None without a
    drafter) of the written ones; seconds spent writing; prompts left out as too long; the file; and what became of
    prompts that the target wrote itself.
    """

    written: int = 0
    found: int = 0
    tokens: int = 0
    truncated: int = 0
    seconds: float = 0.0
    acceptance_length: float | None = None
    skipped: int = 0
    out: str = ""
    self_prompts: dict[str, int] | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(kw_only=True, eq=False, repr=False)
class Writer(ABC):
    """Answers rows of `jobs`, in any order.

    Attributes:
        name: the target's name in rows.
        weights: ``"int8"`` if the target's weights are multiplied in 8 bits.
        raw, bos, template: how prompts are encoded, as for `dflash.loading.prompt_ids`.
        skip_long: leave out prompts that do not fit the target together with their response, instead of raising.
        skipped: lines of prompts left out because they are too long.
        acceptance_length: mean tokens per step so far; None if the writer does not know it.
        distinct: finds prompts that lost their text, by their ids.
    """

    name: str = ""
    weights: ops.WeightStorage = field(default=None, init=False)
    raw: bool = False
    bos: bool = field(default=False, init=False)
    template: Mapping[str, Any] | None = None
    skip_long: bool = False
    skipped: set[int] = field(default_factory=set, init=False)
    acceptance_length: float | None = field(default=None, init=False)
    distinct: DistinctPrompts = field(default_factory=DistinctPrompts, init=False)

    @property
    def encoding(self) -> dict[str, Any]:
        """How prompts are encoded: the fields of rows, and the arguments of `dflash.loading.prompt_ids`."""
        return {"raw": self.raw, "bos": self.bos, "template": dict(self.template or {})}

    @abstractmethod
    def check(self, rows: Sequence[Row]) -> None:
        """Add ``prompt_ids`` to the rows if the writer knows them, and fill ``skipped``. Runs before any answer.

        Raises ``ValueError`` if a prompt cannot be answered.
        """

    @abstractmethod
    def answers(self, rows: Sequence[Row]) -> Iterator[list[tuple[Row, int]]]:
        """Yield groups of complete rows as they arrive, each with its number of tokens.

        A complete row has ``response``, ``finish_reason`` ("stop", or "length" if it was cut off) and, if they are
        known, ``prompt_ids`` and ``response_ids``, stop token included. Closing the iterator stops the work.
        """


# ---------------------------------------------------------------------------------------------- the file


def check_out(path: Path) -> None:
    """Raise ``ValueError`` or ``OSError`` if ``path`` cannot be written. Writes nothing."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r} to write {path.name} into")
    if not path.exists():
        files.check_writable(path.parent)
    elif not path.is_file():
        raise ValueError(f"{path} is not a regular file: name another")
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def regenerate(
    prompts: Sequence[dict[str, Any]],
    writer: Writer,
    out: str | os.PathLike,
    config: RegenerateConfig | None = None,
    *,
    progress: Callable[[Summary, int], None] | None = None,
) -> Summary:
    """Write the responses that ``out`` does not have yet; `dflash_tools.train.data.load_rows` reads its rows.

    Args:
        prompts: prompts from `dflash_tools.train.data.load_prompts`.
        writer: the writer that answers them.
        out: a JSONL file. Rows that it holds are not written again; a truncated last line is dropped.
        config: sampling settings; None is greedy.
        progress: called after every group of answers, with the summary so far and the number of responses to write.

    Raises:
        ValueError: a prompt cannot be answered, or ``out`` has rows of another run. ``out`` is not changed.
        OSError: ``out`` cannot be written. Rows already written remain.
    """
    # 1. Check every prompt
    config, out = RegenerateConfig() if config is None else config, Path(out)
    settings = {"weights": writer.weights, **writer.encoding}
    asked = {"model": writer.name, **{name: value for name, value in settings.items() if value}}
    rows = [row | asked for row in jobs(prompts, config)]
    writer.check(rows)
    check_out(out)
    wanted = {(row["line"], row["sample"]): row for row in rows if row["line"] not in writer.skipped}
    # 2. Read what an earlier run wrote. A kill may have cut its last line short
    content = out.read_bytes() if out.exists() else b""
    end = content.rfind(b"\n") + 1
    found = {_found_key(line, f"{out}, line {i}", wanted) for i, line in enumerate(content[:end].splitlines(), 1)}
    missing = [row for key, row in wanted.items() if key not in found]
    if end < len(content):
        os.truncate(out, end)
    # 3. Write the rest
    summary, began = Summary(found=len(found), out=str(out)), time.perf_counter()
    with contextlib.closing(writer.answers(missing)) as groups:
        for group in groups:
            end = _append(out, end, [row for row, _ in group])
            summary.written += len(group)
            summary.tokens += sum(tokens for _, tokens in group)
            summary.truncated += sum(row["finish_reason"] == "length" for row, _ in group)
            summary.seconds = time.perf_counter() - began
            summary.acceptance_length = writer.acceptance_length
            if progress is not None:
                progress(summary, len(missing))
    summary.skipped = len(writer.skipped)
    return summary


def _found_key(line: bytes, where: str, wanted: Mapping[tuple[int, int], Row]) -> tuple[int, int]:
    """Return line and sample of a row in the file; raise ``ValueError`` for a row of another run."""
    try:
        row = json.loads(line)
        key = row.get("line"), row.get("sample")
        ours = wanted.get(key)
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{where}: not a row of dflash regenerate: choose another file") from error
    if ours is None:
        raise ValueError(f"{where}: no response to any of these prompts: choose another file")
    for name in _ASKED:
        if row.get(name) == ours.get(name) or (name == "prompt_ids" and name not in ours):
            continue
        difference = f"was written with {name} {row.get(name)!r}, now it is {ours.get(name)!r}"
        if name in ("prompt", "messages", "tools"):
            difference = f"answers another prompt than line {key[0]}'s"
        elif name == "prompt_ids":
            why = "(tokenizer, chat template, --raw, --bos, --no-thinking)"
            difference = f"was asked with other tokens than line {key[0]}'s are now {why}"
        raise ValueError(f"{where}: {difference}: choose another file")
    return key


def _append(path: Path, end: int, rows: Iterable[Row]) -> int:
    """Write rows after the first ``end`` bytes of a file, wait until they are on the disk, and return the new end."""
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    try:
        with open(path, "ab", buffering=0) as file:  # closing a buffer would write again what failed
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            os.truncate(path, end)
        advice = "its lines so far are whole: make room, and start again with the same arguments"
        raise OSError(f"{path} could not be written ({error.strerror or error}); {advice}") from error
    return end + len(data)


# ---------------------------------------------------------------------------------------------- our own generator


@dataclass(eq=False, repr=False)
class LocalWriter(Writer):
    """Answers with `dflash.Generator`, in batches of prompts of similar length, longest first.

    Args:
        target: a causal language model of transformers.
        tokenizer: the target's tokenizer.
        draft: a drafter, which is faster in small batches. None is faster in large ones.
        batch_size: sequences per batch.
        bos: put the tokenizer's BOS token before a raw prompt.
        weights: ``"int8"`` to multiply by copies of the target's weights in 8 bits, see `dflash.Generator`.
    """

    target: nn.Module
    tokenizer: Any
    draft: Drafter | None = None
    _: KW_ONLY
    batch_size: int = 64
    bos: bool = False
    weights: ops.WeightStorage = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        self.distinct = DistinctPrompts(self.tokenizer)
        self._steps = self._step_tokens = 0

    def check(self, rows: Sequence[Row]) -> None:
        positions, known = targets.max_positions(self.target), {}
        self.skipped = set()
        for row in rows:
            line, new, where = row["line"], row["max_new_tokens"], f"the prompt on line {row['line']}"
            if line not in known:
                try:
                    known[line] = row.get("prompt_ids") or prompt_ids(self.tokenizer, row, **self.encoding)
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from error
                if not known[line]:
                    raise ValueError(f"{where} has no token")
                self.distinct.add(known[line], row, where)
            row["prompt_ids"] = ids = known[line]
            if positions is not None and len(ids) + new > positions:
                if not self.skip_long:
                    why = f"with {new} new ones it passes the target's {positions} positions"
                    raise ValueError(f"{where} has {len(ids)} tokens: {why} (--skip-long leaves such prompts out)")
                self.skipped.add(line)

    def answers(self, rows: Sequence[Row]) -> Iterator[list[tuple[Row, int]]]:
        if not rows:
            return
        # 1. Let each row of a generator answer one prompt after the other
        first = rows[0]["prompt_ids"]
        are_same = all(row["prompt_ids"] == first for row in rows)
        generator = Generator(
            self.target,
            self.draft,
            max_length=max(len(row["prompt_ids"]) + row["max_new_tokens"] for row in rows),
            batch_size=min(self.batch_size, len(rows)),
            prefill_chunk=max(1, min(512, len(first) - 1)) if are_same else 512,  # whole chunks are run once
            weights=self.weights,
        )
        session = Session(generator, cache_bytes=2**30 if are_same else 0)
        device = self.target.get_input_embeddings().weight.device
        waiting, answering = iter(rows), dict[int, tuple[Row, list[int]]]()
        while True:
            for row in itertools.islice(waiting, len(session.idle)):
                ids = torch.tensor([row["prompt_ids"]], device=device)
                settings = OFF | {name: row[name] for name in _SETTINGS if name in row}
                tokenizer = self.tokenizer if "stop_strings" in row else None
                answering[session.admit(session.resolve(ids, tokenizer=tokenizer, **settings))] = row, []
            if not answering:
                return
            # 2. Collect the answers that end
            ended = []
            for place, event, error in session.step():
                row, tokens = answering[place]
                if error:
                    raise ValueError(f"the prompt on line {row['line']}: {error}")
                if tokens:  # the prompt's own pass writes the first
                    self._steps, self._step_tokens = self._steps + 1, self._step_tokens + len(event.ids[0])
                tokens += event.ids[0]
                if (reason := event.finish_reasons[0]) is not None:
                    session.retire(place)
                    del answering[place]
                    text = self.tokenizer.decode(tokens, skip_special_tokens=True)
                    answer = {"response": text, "finish_reason": reason, "response_ids": tokens}
                    ended.append((row | answer, len(tokens)))
            if self.draft is not None and self._steps:
                self.acceptance_length = self._step_tokens / self._steps
            if ended:
                yield ended


# ---------------------------------------------------------------------------------------------- a server


_SEED_BITS = 31  # accepted by every server
_TOO_LONG = re.compile(r"context (length|window|size)|too long|max(imum)?[ _]model[ _]len|longer than", re.IGNORECASE)


@dataclass(eq=False, repr=False)
class ServerWriter(Writer):
    """Answers through a server with OpenAI's protocol (vLLM, SGLang, llama.cpp ...), several requests at a time.

    ``raw`` sends prompts unchanged for completion, instead of as a user's message; ``template`` is sent as the
    ``chat_template_kwargs`` of vLLM and SGLang. With ``skip_long``, the server's refusal leaves a prompt out.

    Args:
        url: the API's root, as in ``http://localhost:8000/v1``.
        model: the target's name on the server.
        concurrency: requests at a time.
        retries: how often the client sends a request again after a network error or status 408, 409, 429 or 5xx.
        timeout: seconds that the server may be silent.
        api_key: sent as a bearer token; None sends none.
        token_ids: ask for the ids too (vLLM's ``return_token_ids``); rows then hold them.
    """

    url: str
    model: str
    _: KW_ONLY
    concurrency: int = 32
    retries: int = 5
    timeout: float = 600.0
    api_key: str | None = None
    token_ids: bool = False

    def __post_init__(self) -> None:
        if not re.match("https?://.", self.url):
            raise ValueError(f"the server must be an http:// or https:// URL, got {self.url!r}")
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        try:
            import openai
        except ImportError as error:
            raise ValueError("this needs the openai package: pip install '.[train]'") from error
        self.name, self._openai = self.model, openai
        # The client wants a key; _request leaves the header out.
        self.headers = {} if self.api_key else {"Authorization": openai.Omit()}
        self.endpoint = self.url.rstrip("/") + ("/completions" if self.raw else "/chat/completions")

    def check(self, rows: Sequence[Row]) -> None:
        self.skipped = set()  # the server checks lengths
        for row in rows:
            if self.raw and "messages" in row:
                raise ValueError(f"the prompt on line {row['line']} is a conversation, which cannot be continued raw")
            if "tools" in row:  # a server answers with calls that it has read, not with the text
                raise ValueError(f"the prompt on line {row['line']} has tools: let the target itself answer (--model)")

    def answers(self, rows: Sequence[Row]) -> Iterator[list[tuple[Row, int]]]:
        """Yield answers as they arrive; see `Writer`. The first request that fails after all retries ends the run.

        Requests run in an event loop in a separate thread. Unfinished ones are cancelled when the run ends.
        """
        from anyio.from_thread import start_blocking_portal

        waiting = iter(rows)
        under_way: set[Future[tuple[Row, int] | None]] = set()
        arguments = {"base_url": self.url, "max_retries": self.retries, "timeout": self.timeout}
        client = self._openai.AsyncOpenAI(api_key=self.api_key or "none", **arguments)
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(client):

            def start(count: int) -> None:
                for row in itertools.islice(waiting, count):
                    under_way.add(portal.start_task_soon(self._answer, client, row))

            try:
                start(self.concurrency)
                while under_way:
                    finished = wait(under_way, None, FIRST_COMPLETED).done
                    under_way -= finished
                    failures = [error for done in finished if (error := done.exception()) is not None]
                    if not failures:
                        start(len(finished))
                    answered = [done.result() for done in finished if done.exception() is None]
                    if answered := [answer for answer in answered if answer is not None]:
                        yield answered  # before a failure ends the run
                    if failures:
                        raise failures[0]
            finally:
                for future in under_way:
                    future.cancel()

    async def _answer(self, client: Any, row: Row) -> tuple[Row, int] | None:
        """Ask the server. Return None if the prompt is left out as too long."""
        resource, line = client.completions if self.raw else client.chat.completions, row["line"]
        try:
            reply = await resource.with_raw_response.create(**self._request(row))
        except self._openai.APIStatusError as error:
            code = error.status_code
            reason = f"status {code}: {terminal.printable(_server_message(error))}"
            if code in (408, 409, 429) or code >= 500:
                raise self._unanswered(line, reason) from error
            if self.skip_long and (code == 413 or _TOO_LONG.search(reason)):
                self.skipped.add(line)
                return None
            raise ValueError(f"{self.endpoint} refused the prompt on line {line}: {reason}") from error
        except self._openai.OpenAIError as error:  # no connection, reset, timed out
            raise self._unanswered(line, terminal.printable(str(error.__cause__ or "") or str(error))) from error
        answer, tokens = self._read(reply.http_response.content, f"the answer of {self.endpoint} to line {line}")
        if self.token_ids:
            self.distinct.add(answer["prompt_ids"], row, f"the prompt on line {line}")
        return row | answer, tokens

    def _unanswered(self, line: int, reason: str) -> ValueError:
        tries = f"in {self.retries + 1} tries"
        return ValueError(f"{self.endpoint} did not answer the prompt on line {line} {tries}: {reason}")

    def _request(self, row: Row) -> dict[str, Any]:
        # Extensions of OpenAI's protocol are sent only on request.
        extra = {name: row[name] for name in ("top_k", "min_p") if name in row}
        if self.token_ids:
            extra["return_token_ids"] = True
        if not self.raw and self.template:
            extra["chat_template_kwargs"] = dict(self.template)
        return {
            **({"prompt": row["prompt"]} if self.raw else {"messages": as_messages(row)}),
            "model": self.name,
            "max_tokens": row["max_new_tokens"],
            "temperature": row["temperature"],
            "top_p": row.get("top_p", 1.0),
            "seed": row["seed"] % 2**_SEED_BITS,
            "extra_body": extra,
            "extra_headers": self.headers,
        }

    def _read(self, body: bytes, where: str) -> tuple[Row, int]:
        """Return the fields of an answer in OpenAI's protocol, and its number of tokens; raise ``ValueError`` else."""
        # 1. The text
        try:
            reply = json.loads(body)
            choice = reply["choices"][0]
            message = choice if self.raw else choice["message"]
            text, reason = message["text" if self.raw else "content"], choice["finish_reason"]
            thoughts = message.get("reasoning_content") or message.get("reasoning")
            num_tokens = (reply.get("usage") or {}).get("completion_tokens") or 0
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            shown = terminal.printable(body[:200].decode(errors="replace"))
            raise ValueError(f"{where}: not an answer of OpenAI's protocol: {shown}") from error
        if thoughts:
            raise ValueError(f"{where} has its thoughts outside its text: start the server without a reasoning parser")
        if not isinstance(text, str) or reason not in ("stop", "length"):
            what = f"finish_reason {terminal.shortened(reason)} and content {terminal.shortened(text)}"
            raise ValueError(f"{where} has {what}")
        answer: Row = {"response": check_text(text, where), "finish_reason": reason}
        if not self.token_ids:
            return answer, num_tokens
        # 2. The ids
        asked, ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids"), choice.get("token_ids")
        if not asked or not ids:
            name = "prompt_token_ids" if ids else "token_ids"
            raise ValueError(f"{where}: {name} was asked for, and is not there (return_token_ids is vLLM's)")
        return answer | {"prompt_ids": asked, "response_ids": ids}, num_tokens or len(ids)


def _server_message(error: Any) -> str:
    """Return the server's reason for a refusal, in one line."""
    message = error.body.get("message") if isinstance(error.body, dict) else error.body
    text = message if isinstance(message, str) else error.response.text
    return " ".join(text.split())[:300] or error.response.reason_phrase


# ---------------------------------------------------------------------------------------------- prompts of the target

_PROBE = "dflash_probe_text"
_SEED = 2**31  # above every line number, from which the seeds of answers are made


def user_turn(tokenizer: Any, template: Mapping[str, Any] | None = None) -> tuple[str, list[str]]:
    """Return what a chat template writes before a user's text, and the lines that follow it.

    Args:
        tokenizer: the target's.
        template: arguments of the template, as in ``{"enable_thinking": False}``.

    Raises:
        ValueError: there is no template, or no mark before or after the text.
    """
    messages = [{"role": "user", "content": _PROBE}]
    before, *rest = render_chat(tokenizer, messages, True, template).split(_PROBE)
    if len(rest) != 1 or not before.strip() or not rest[0].strip():
        needed = "a chat template that holds a user's text once, with marks before and after it"
        found = f"this one writes {terminal.shortened([before, *rest])} around it: give a file of prompts"
        raise ValueError(f"to write prompts itself, the target needs {needed}; {found}")
    # A space before a word is part of its first token
    return before.rstrip(" "), [line.strip() for line in rest[0].splitlines() if line.strip()]


def write_prompts(
    writer: LocalWriter,
    count: int,
    out: str | os.PathLike,
    *,
    beginnings: Sequence[str] = ("",),
    seed: int = 0,
    max_new_tokens: int = 128,
    progress: Callable[[Summary, int], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Let the target write ``count`` prompts at temperature 1 and top-p 0.95, and drop the useless ones.

    These are prompts that have no end, no word or marks of the template in them; loops, in which less than half of the
    runs of four tokens are distinct; and those that have the same beginning as an earlier one, and the same eight
    tokens after it, but for case and punctuation.

    Args:
        writer: the target. Its drafter is not used.
        count: prompts to write. A run can be continued with a higher number.
        out: a JSONL file of all that is written. Rows that it holds are not written again.
        beginnings: texts that prompts begin with, in turn, as in ``"Translate German to English:"``.
        seed: the same seed writes the same prompts.
        max_new_tokens: tokens per prompt at most.
        progress: see `regenerate`.

    Returns:
        The kept prompts, in the form of `dflash_tools.train.data.load_prompts`, by their lines in ``out`` as it was
        asked for; and how many were written, kept, and dropped for each reason.

    Raises:
        ValueError: see `user_turn`; there are no ``beginnings``; ``out`` has rows of another run; or every prompt is
            dropped.
        OSError: ``out`` cannot be written.
    """
    # 1. Write them
    if not beginnings:
        raise ValueError('beginnings must hold one text at least, got none: ("",) leaves prompts open')
    tokenizer = writer.tokenizer
    before, after = user_turn(tokenizer, writer.template)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    def words_of(text: str) -> str:
        return " ".join(re.findall(r"\w+", text.casefold()))

    special, end = special_ids(tokenizer), encode(after[0])[0]
    stops = targets.generation_defaults(writer.target)["stop_token_ids"]
    stop = {"stop_token_ids": sorted({*stops, end})} if end in special else {"stop_strings": after[:1]}
    asked = [{"line": line, "prompt": beginnings[(line - 1) % len(beginnings)], **stop} for line in range(1, count + 1)]
    asked = [{**row, "prompt_ids": encode(before + row["prompt"])} for row in asked]
    config = RegenerateConfig((1.0,), seed=fold(seed, _SEED), max_new_tokens=max_new_tokens, top_p=0.95)
    regenerate(asked, replace(writer, draft=None, skip_long=False), out, config, progress=progress)
    # 2. Drop the useless ones. Of two that are alike, the lower line is kept
    marks, starts, prompts = [before.strip().splitlines()[-1], *after], set[tuple[int, ...]](), list[dict[str, Any]]()
    counts = {"written": count, "kept": 0, "duplicates": 0, "loops": 0, "cut_off": 0, "empty": 0, "with_marks": 0}
    for row in sorted((row for _, _, row in read_jsonl(Path(out))), key=lambda row: row["line"]):
        ids, begun, asked_ids = row["response_ids"], row["prompt"], row["prompt_ids"]
        said, head = (tokenizer.decode(each, skip_special_tokens=True) for each in ([*asked_ids, *ids], asked_ids))
        text = (begun + said.removeprefix(head)).partition(after[0])[0].strip()  # with a space between, if there is one
        words, runs = words_of(text), list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
        start = tuple(encode(words)[: 8 + len(encode(words_of(begun)))])
        reasons = {
            "cut_off": row["finish_reason"] == "length",
            "empty": words == words_of(begun),
            "with_marks": not special.isdisjoint([*ids[:-1], *encode(text)]) or any(mark in text for mark in marks),
            "loops": 2 * len(set(runs)) < len(runs),
            "duplicates": start in starts,
        }
        fate = next((reason for reason, holds in reasons.items() if holds), "kept")
        counts[fate] += 1
        if fate == "kept":
            starts.add(start)
            prompts.append({"line": row["line"], "prompt": text})
    if not prompts:
        raise ValueError(f"none of the {count} prompts that the target wrote can be used ({tell(counts)}): see {out}")
    return prompts, counts


def tell(counts: Mapping[str, int]) -> str:
    """Write the counts of `write_prompts` in words."""
    return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items() if number)
