"""Responses written by a server that speaks OpenAI's protocol, through the ``openai`` client."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any
from urllib.parse import urlsplit

from ..evaluate.prompts import as_messages, check_text
from ..terminal import printable
from .regenerate import Job, RegenerateConfig, Response, Writer

_SEED_BITS = 31  # accepted by every server
_MAX_ANSWER_BYTES = 16 * 2**20
_TOO_LONG = re.compile(r"context (length|window|size)|too long|max(imum)?[ _]model[ _]len|longer than", re.IGNORECASE)


class _TooLongError(ValueError):
    """The prompt and its response are too long for the server."""


class ServerWriter(Writer):
    """Answers through a server with OpenAI's protocol (vLLM, SGLang, llama.cpp ...), several requests at a time.

    Args:
        url: the API's root, as in ``http://localhost:8000/v1``.
        model: the target's name on the server.
        raw: send prompts unchanged for completion, instead of as a user's message.
        template: arguments of the chat template (``chat_template_kwargs`` of vLLM and SGLang).
        concurrency: requests at a time.
        retries: how often a request is sent again after a network error or status 408, 409, 429 or 5xx. The client
            waits 0.5 s before the first and twice as long before each next, or as long as the server asks for.
        timeout: seconds per request. An answer that takes as long for all tries together is given up too.
        api_key: sent as a bearer token; None sends none.
        token_ids: ask for the ids too (vLLM's ``return_token_ids``); rows then hold them.
        skip_long: leave out prompts that the server refuses as too long, instead of raising.

    Raises:
        ValueError: the URL is not one, ``concurrency`` is below 1, or the ``openai`` package is missing.
    """

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
        try:
            import openai
        except ImportError as error:
            raise ValueError("this needs the openai package: pip install '.[train]'") from error
        super().__init__(model, raw=raw, bos=False, template=template, skip_long=skip_long)
        self._openai = openai
        self.url, self.raw, self.endpoint = url.rstrip("/"), raw, "/completions" if raw else "/chat/completions"
        self.concurrency, self.retries, self.timeout = concurrency, retries, timeout
        self.api_key, self.token_ids = api_key, token_ids

    def check(self, jobs: Sequence[Job], config: RegenerateConfig) -> None:  # noqa: ARG002 - of every writer
        """Raise for text that cannot be sent, and for a conversation if ``raw`` is set. The server checks lengths."""
        self.skipped = set()
        for job in jobs:
            if self.raw and "messages" in job.prompt:
                raise ValueError(f"the prompt on line {job.line} is a conversation, which cannot be continued raw")
            job.check_text()

    def answers(self, jobs: Sequence[Job], config: RegenerateConfig) -> Iterator[list[tuple[Job, Response]]]:
        """Yield answers as they arrive; see `Writer`. The first request that fails after all retries ends the run.

        Requests run in an event loop in a separate thread. Unfinished ones are cancelled when the run ends.
        """
        from anyio.from_thread import start_blocking_portal

        waiting = iter(jobs)
        under_way: dict[Future[Response], Job] = {}
        key = self.api_key or "none"  # the client wants one; _request leaves the header out
        options = {"base_url": self.url, "api_key": key, "max_retries": self.retries, "timeout": self.timeout}
        client = self._openai.AsyncOpenAI(**options)
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(client):

            def start(count: int) -> None:
                for job in itertools.islice(waiting, count):
                    under_way[portal.start_task_soon(self._answer, client, job, config)] = job

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

    def _collect(
        self, finished: Mapping[Future[Response], Job]
    ) -> tuple[list[tuple[Job, Response]], BaseException | None]:
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

    async def _answer(self, client: Any, job: Job, config: RegenerateConfig) -> Response:
        import anyio

        request, body = self._request(job, config), bytearray()
        resource = client.completions if self.raw else client.chat.completions
        where = f"the answer of {self.url}{self.endpoint} to line {job.line}"
        try:  # streamed, because the client would take any JSON of any size
            with anyio.fail_after(self.timeout * (self.retries + 1)):
                async with resource.with_streaming_response.create(**request) as reply:
                    async for chunk in reply.iter_bytes():
                        body += chunk
                        if len(body) > _MAX_ANSWER_BYTES:
                            break
        except TimeoutError as error:
            raise self._unanswered(job, "timed out") from error
        except self._openai.OpenAIError as error:
            raise self._explain(error, job) from error
        except Exception as error:  # of the HTTP library, while the body is read
            raise self._unanswered(job, printable(error)) from error
        if len(body) > _MAX_ANSWER_BYTES:
            raise ValueError(f"{where} is larger than {_MAX_ANSWER_BYTES // 2**20} MiB")
        return self._read(bytes(body), where)

    def _request(self, job: Job, config: RegenerateConfig) -> dict[str, Any]:
        # Extensions of OpenAI's protocol are sent only on request.
        extra = {name: getattr(config, name) for name in ("top_k", "min_p") if getattr(config, name)}
        if self.token_ids:
            extra["return_token_ids"] = True
        if not self.raw and self.encoding["template"]:
            extra["chat_template_kwargs"] = self.encoding["template"]
        return {
            **({"prompt": job.prompt["prompt"]} if self.raw else {"messages": as_messages(job.prompt)}),
            "model": self.name,
            "max_tokens": config.max_new_tokens,
            "temperature": job.temperature,
            "top_p": config.top_p,
            "seed": job.seed % 2**_SEED_BITS,
            "extra_body": extra,
            "extra_headers": {} if self.api_key else {"Authorization": self._openai.Omit()},
        }

    def _read(self, body: bytes, where: str) -> Response:
        """Return the answer in a completion of OpenAI's protocol; raise ``ValueError`` for anything else."""
        # 1. The text
        try:
            reply = json.loads(body)
            choice = reply["choices"][0]
            message = choice if self.raw else choice["message"]
            text, reason = message["text" if self.raw else "content"], choice["finish_reason"]
            thoughts = message.get("reasoning_content") or message.get("reasoning")
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
            shown = printable(body[:200].decode(errors="replace"))
            raise ValueError(f"{where}: not an answer of OpenAI's protocol: {shown}") from error
        if thoughts:
            raise ValueError(
                f"{where} has its thoughts outside its text, and the drafter needs the text as it was written: "
                "start the server without a reasoning parser"
            )
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise ValueError(f"{where} has finish_reason {reason!r:.60} and content {text!r:.60}")
        check_text(text, where)
        # 2. The number of tokens and, if they were asked for, their ids
        usage = reply.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        num_tokens = count if type(count) is int else 0
        if not self.token_ids:
            return Response(text, reason, num_tokens=num_tokens)
        ids = choice.get("token_ids")
        prompt_ids = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        for name, found in (("token_ids", ids), ("prompt_token_ids", prompt_ids)):
            if not found:
                raise ValueError(f"{where}: {name} was asked for, and is not there (return_token_ids is vLLM's)")
            if not isinstance(found, list) or not all(type(token) is int and token >= 0 for token in found):
                raise ValueError(f"{where}: {name} must be a list of token ids, got {found!r:.60}")
        return Response(text, reason, prompt_ids, ids, num_tokens or len(ids))

    def _explain(self, error: Any, job: Job) -> ValueError:
        """Turn a client's error into one line."""
        reason = printable(str(error.__cause__ or "") or str(error))  # no connection, reset, timed out
        if isinstance(error, self._openai.APIStatusError):
            reason = f"status {error.status_code}: {printable(_server_message(error))}"
            if error.status_code not in (408, 409, 429) and error.status_code < 500:
                kind = _TooLongError if error.status_code == 413 or _TOO_LONG.search(reason) else ValueError
                return kind(f"{self.url}{self.endpoint} refused the prompt on line {job.line}: {reason}")
        return self._unanswered(job, reason)

    def _unanswered(self, job: Job, reason: str) -> ValueError:
        where = f"{self.url}{self.endpoint}"
        return ValueError(f"{where} did not answer the prompt on line {job.line} in {self.retries + 1} tries: {reason}")


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
