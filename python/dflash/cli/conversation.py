"""The conversation of ``dflash chat``, and the lines that it is typed in."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import typer
from rich.console import Console

from ..generator import Generator
from ..loading import check_text
from . import running
from .answer import StreamedAnswer, chat_ids


@dataclass
class Chat:
    """A conversation: its messages, the generator that answers them, and the arguments of an answer."""

    generator: Generator
    tokenizer: Any
    device: str
    system: str | None
    arguments: dict[str, Any]
    as_json: bool
    messages: list[dict[str, str]] = field(default_factory=list)
    console: Console = field(default_factory=lambda: Console(stderr=True))

    def answer(self, number: int, message: str) -> bool:
        """Answer a message, line ``number`` of the input.

        Returns False, and leaves the conversation as it was, if that cannot be done.
        """
        answer = StreamedAnswer(self.generator.tree, quiet=self.as_json)
        try:
            check_text(message, "standard input", number)
            with contextlib.closing(self._ask(message)) as events:
                for event in events:
                    answer.add(event)
        except KeyboardInterrupt:
            self.console.print("[dim](stopped)[/]")
        except ValueError as error:
            running.print_error(error)
            if self.as_json:
                typer.echo(json.dumps({"error": str(error)}))
            return False
        if answer.last is None:
            return True  # stopped before it began
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer.text}]
        if self.as_json:
            typer.echo(json.dumps(answer.report()))
        else:
            typer.echo()
            self.console.print(f"[dim]{answer.summary()}[/]", soft_wrap=True)
        return True

    def _ask(self, message: str) -> Iterator[Any]:
        """Stream the answer to a message, which is not added yet. Raises ValueError if there is no room for it."""
        ids = chat_ids(self.tokenizer, self.system, [*self.messages, {"role": "user", "content": message}])
        limit = self.generator.max_length
        if len(ids) >= limit and not self.messages:
            raise ValueError(f"this message has {len(ids)} tokens, the limit is {limit}: send a shorter one")
        if len(ids) >= limit:
            raise ValueError(
                f"the conversation would have {len(ids)} tokens, the limit is {limit}: this message was left out; "
                "/drop forgets the oldest message and its answer, /reset all of them"
            )
        new = min(self.arguments["max_new_tokens"], limit - len(ids))
        prompt = torch.tensor([ids], dtype=torch.int64, device=self.device)
        rest = {"tokenizer": self.tokenizer, "skip_special_tokens": True, **self.arguments, "max_new_tokens": new}
        return self.generator.stream(prompt, **rest)


def read_lines(console: Console) -> Iterator[tuple[int, str]]:
    """Yield the non-empty lines of standard input up to /exit, with numbers. On a terminal, show a prompt sign."""
    running.keep_wrong_bytes()
    for number in itertools.count(1):
        if sys.stdin.isatty():
            console.print("[bold green]>[/] ", end="")
        line = sys.stdin.readline()
        if not line or line.strip() == "/exit":
            return
        if line.strip():
            yield number, line.rstrip("\n")
