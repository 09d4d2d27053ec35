"""Responses written by a server that speaks OpenAI's protocol, through the ``openai`` client.

The server is not trusted: an answer's size and time are bounded (`bounded_client`), and its content is checked
(`completion`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any
from urllib.parse import urlsplit

from ...evaluate import as_messages
from ...terminal import printable
from .bounded_client import bounded_client
from .completion import read_completion
from .jobs import Answer, Job, Settings, check_prompt

__all__ = ["ServerWriter"]

_SEED_BITS = 31  # accepted by every server
_TOO_LONG = re.compile(r"context (length|window|size)|too long|max(imum)?[ _]model[ _]len|longer than", re.IGNORECASE)


class _TooLongError(ValueError):
    """The prompt and its response are too long for the server."""


def _import_openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise ValueError("this needs the openai package: pip install '.[train]'") from error
    return openai


class ServerWriter:
    """Answers through a server with OpenAI's protocol (vLLM, SGLang, llama.cpp ...), several requests at a time.

    Args:
        url: the API's root, as in ``http://localhost:8000/v1``.
        model: the target's name on the server.
        raw: send prompts unchanged for completion, instead of as a user's message.
        template: arguments of the chat template (``chat_template_kwargs`` of vLLM and SGLang).
        concurrency: requests at a time.
        retries: how often a request is sent again after a network error or status 408, 409, 429 or 5xx. The client
            waits 0.5 s before the first and twice as long before each next, or as long as the server asks for.
        timeout: seconds per request, from its first byte to the last one of its answer.
        api_key: sent as a bearer token; None sends none.
        token_ids: ask for the ids too (vLLM's ``return_token_ids``); rows then hold them.
        skip_long: leave out prompts that the server refuses as too long, instead of raising.

    Raises:
        ValueError: the URL is not one, ``concurrency`` is below 1, or the ``openai`` package is missing.
    """

    acceptance_length = None  # servers do not report it

    def __init__(  # noqa: PLR0913
        self,
        url: str,
        model: str,
        *,
        raw: bool = False,
        template: Mapping[str, Any] | None = None,
        concurrency: int = 32,
        retries: int = 5,
        timeout: float = 600.0,
        api_key: str | None = None,
        token_ids: bool = False,
        skip_long: bool = False,
    ) -> None:
        if not _is_url(url):
            raise ValueError(f"the server must be an http:// or https:// URL, got {url!r}")
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        self._openai = _import_openai()
        self.url, self.name, self.raw = url.rstrip("/"), model, raw
        self.encoding: dict[str, Any] = {"raw": raw, "bos": False, "template": dict(template or {})}
        self.concurrency, self.retries, self.timeout = concurrency, retries, timeout
        self.api_key, self.token_ids, self.skip_long = api_key, token_ids, skip_long
        self.ids: dict[int, list[int]] = {}  # only the server knows them
        self.skipped: set[int] = set()

    def check(self, jobs: Sequence[Job], settings: Settings) -> None:  # noqa: ARG002 - of every writer
        """Raise for text that cannot be sent, and for a conversation if ``raw`` is set. The server checks lengths."""
        self.skipped = set()
        for job in jobs:
            if self.raw and "messages" in job.prompt:
                raise ValueError(f"the prompt on line {job.line} is a conversation, which cannot be continued raw")
            check_prompt(job)

    def answers(self, jobs: Sequence[Job], settings: Settings) -> Iterator[list[tuple[Job, Answer]]]:
        """Yield answers as they arrive; see `Writer`. The first request that fails after all retries ends the run.

        Requests run in an event loop in a separate thread. Unfinished ones are cancelled when the run ends.
        """
        from anyio.from_thread import start_blocking_portal

        waiting = iter(jobs)
        under_way: dict[Future[Answer], Job] = {}
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(self._client()) as client:

            def start(count: int) -> None:
                for job in itertools.islice(waiting, count):
                    under_way[portal.start_task_soon(self._answer, client, job, settings)] = job

            try:
                start(self.concurrency)
                while under_way:
                    finished = wait(under_way, return_when=FIRST_COMPLETED).done
                    answered, failure = self._collect({future: under_way.pop(future) for future in finished})
                    if failure is None:
                        start(len(finished))
                    if answered:  # written before a failure ends the run
                        yield answered
                    if failure is not None:
                        raise failure
            finally:
                for future in under_way:
                    future.cancel()

    def _client(self) -> Any:
        key = self.api_key or "none"  # the client wants one; _request leaves the header out
        options = {"base_url": self.url, "api_key": key, "max_retries": self.retries, "timeout": self.timeout}
        return self._openai.AsyncOpenAI(http_client=bounded_client(self._openai, self.timeout), **options)

    def _collect(self, finished: Mapping[Future[Answer], Job]) -> tuple[list[tuple[Job, Answer]], BaseException | None]:
        """Return the answers of finished requests and the first failure; note prompts that are left out."""
        answered, failure = [], None
        for future, job in finished.items():
            error = future.exception()
            if error is None:
                answered.append((job, future.result()))
            elif self.skip_long and isinstance(error, _TooLongError):
                self.skipped.add(job.line)
            else:
                failure = failure or error
        return answered, failure

    async def _answer(self, client: Any, job: Job, settings: Settings) -> Answer:
        request = self._request(job, settings)
        try:  # The raw response is read here, because the client's models take any JSON.
            if self.raw:
                reply = await client.completions.with_raw_response.create(prompt=job.prompt["prompt"], **request)
            else:
                create = client.chat.completions.with_raw_response.create
                reply = await create(messages=as_messages(job.prompt), **request)
        except self._openai.OpenAIError as error:
            raise self._explain(error, job) from error
        where = f"the answer of {self._endpoint} to line {job.line}"
        expected = {"raw": self.raw, "token_ids": self.token_ids, "max_new_tokens": settings.max_new_tokens}
        return read_completion(reply.content, where, **expected)

    def _request(self, job: Job, settings: Settings) -> dict[str, Any]:
        """Return the arguments that both endpoints take."""
        # Extensions of OpenAI's protocol are sent only on request.
        extra = {name: getattr(settings, name) for name in ("top_k", "min_p") if getattr(settings, name)}
        if self.token_ids:
            extra["return_token_ids"] = True
        if not self.raw and self.encoding["template"]:
            extra["chat_template_kwargs"] = self.encoding["template"]
        return {
            "model": self.name,
            "max_tokens": settings.max_new_tokens,
            "temperature": job.temperature,
            "top_p": settings.top_p,
            "seed": job.seed % 2**_SEED_BITS,
            "extra_body": extra,
            "extra_headers": {} if self.api_key else {"Authorization": self._openai.Omit()},
        }

    @property
    def _endpoint(self) -> str:
        return f"{self.url}{'/completions' if self.raw else '/chat/completions'}"

    def _explain(self, error: Any, job: Job) -> ValueError:
        """Turn a client's error into one line."""
        reason = printable(str(error.__cause__ or "") or str(error))  # no connection, reset, timed out, too large
        if isinstance(error, self._openai.APIStatusError):
            reason = f"status {error.status_code}: {printable(_server_message(error))}"
            if error.status_code not in (408, 409, 429) and error.status_code < 500:
                kind = _TooLongError if error.status_code == 413 or _TOO_LONG.search(reason) else ValueError
                return kind(f"{self._endpoint} refused the prompt on line {job.line}: {reason}")
        tries = f" in {self.retries + 1} tries" if isinstance(error, self._openai.APIError) else ""
        return ValueError(f"{self._endpoint} did not answer the prompt on line {job.line}{tries}: {reason}")


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:  # a port or an IPv6 address that is not one
        return False


def _server_message(error: Any) -> str:
    """Return the server's reason for a refusal, in one line."""
    message = error.body.get("message") if isinstance(error.body, dict) else error.body
    text = message if isinstance(message, str) else error.response.text
    return " ".join(text.split())[:300] or error.response.reason_phrase
