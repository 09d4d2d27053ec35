"""Responses through a server."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .jobs import Answer, Job, Settings

__all__ = ["ServerWriter"]

_SEED_BITS = 31  # what every server takes


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
