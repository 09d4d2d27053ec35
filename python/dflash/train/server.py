"""Responses written by a server that speaks OpenAI's protocol, through the ``openai`` client."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import KW_ONLY, dataclass
from typing import Any

from ..evaluate.prompts import as_messages, check_text
from ..terminal import printable, shortened
from .regenerate import Row, Writer

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
            reason, code = f"status {error.status_code}: {printable(_server_message(error))}", error.status_code
            if code in (408, 409, 429) or code >= 500:
                raise self._unanswered(line, reason) from error
            if self.skip_long and (code == 413 or _TOO_LONG.search(reason)):
                self.skipped.add(line)
                return None
            raise ValueError(f"{self.endpoint} refused the prompt on line {line}: {reason}") from error
        except self._openai.OpenAIError as error:  # no connection, reset, timed out
            raise self._unanswered(line, printable(str(error.__cause__ or "") or str(error))) from error
        answer, tokens = self._read(reply.http_response.content, f"the answer of {self.endpoint} to line {line}")
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
            shown = printable(body[:200].decode(errors="replace"))
            raise ValueError(f"{where}: not an answer of OpenAI's protocol: {shown}") from error
        if thoughts:
            raise ValueError(
                f"{where} has its thoughts outside its text, and the drafter needs the text as it was written: "
                "start the server without a reasoning parser"
            )
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise ValueError(f"{where} has finish_reason {shortened(reason)} and content {shortened(text)}")
        answer: Row = {"response": check_text(text, where), "finish_reason": reason}
        if not self.token_ids:
            return answer, num_tokens
        # 2. The ids
        ids = {
            "prompt_token_ids": choice.get("prompt_token_ids") or reply.get("prompt_token_ids"),
            "token_ids": choice.get("token_ids"),
        }
        if missing := [name for name, found in ids.items() if not found]:
            raise ValueError(f"{where}: {missing[-1]} was asked for, and is not there (return_token_ids is vLLM's)")
        answer |= {"prompt_ids": ids["prompt_token_ids"], "response_ids": ids["token_ids"]}
        return answer, num_tokens or len(ids["token_ids"])


def _server_message(error: Any) -> str:
    """Return the server's reason for a refusal, in one line."""
    message = error.body.get("message") if isinstance(error.body, dict) else error.body
    text = message if isinstance(message, str) else error.response.text
    return " ".join(text.split())[:300] or error.response.reason_phrase
