"""The conversation of ``dflash chat``, and the lines that it is typed in."""

from __future__ import annotations

import contextlib
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
from ..settings import checked
from . import running
from .answer import StreamedAnswer, chat_ids, check_system

COMMANDS = {
    "/help": "shows this",
    "/set NAME VALUE": "sets temperature, system or another option for the next answers; alone, shows them",
    "/drop": "forgets the oldest message and its answer",
    "/reset": "forgets all messages",
    "/bye": "leaves; so do /exit and the end of input; Ctrl-C stops an answer",
    '"""': "begins and ends a message of several lines; so does a backslash at the end of a line",
}
_QUOTES = '"""'


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

    def respond(self, number: int, message: str, is_command: bool) -> bool:
        """Answer a message, line ``number`` of the input, or run a command.

        Returns False, and leaves the conversation as it was, if that cannot be done.
        """
        try:
            if is_command:
                self._run(message)
            else:
                self._answer(check_text(message, "standard input", number))
        except (ValueError, TypeError) as error:
            running.print_error(error)
            if self.as_json:
                typer.echo(json.dumps({"error": str(error)}))
            return False
        return True

    def _answer(self, message: str) -> None:
        """Print the answer to a message, and add both to the conversation."""
        answer = StreamedAnswer(self.generator.tree, quiet=self.as_json)
        try:
            with contextlib.closing(self._ask(message)) as events:
                for event in events:
                    answer.add(event)
        except KeyboardInterrupt:
            self.console.print("[dim](stopped)[/]")
        if answer.last is None:
            return  # stopped before it began
        self.messages += [{"role": "user", "content": message}, {"role": "assistant", "content": answer.text}]
        if self.as_json:
            typer.echo(json.dumps(answer.report()))
        else:
            typer.echo()
            self.console.print(f"[dim]{answer.summary()}[/]", soft_wrap=True)

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
        new = min(self.arguments["max_new_tokens"] or limit, limit - len(ids))
        prompt = torch.tensor([ids], dtype=torch.int64, device=self.device)
        rest = {"tokenizer": self.tokenizer, "skip_special_tokens": True, **self.arguments, "max_new_tokens": new}
        return self.generator.stream(prompt, **rest)

    def _run(self, line: str) -> None:
        """Run a line that begins with a slash. Raises ValueError if there is no such command or it refuses a value."""
        name, _, rest = line.strip().partition(" ")
        if name == "/help":
            typer.echo("\n".join(f"{usage:<18}{text}" for usage, text in COMMANDS.items()), err=True)
        elif name == "/reset":
            self.messages.clear()
        elif name == "/drop":
            del self.messages[:2]
        elif name == "/set":
            setting, _, value = rest.strip().partition(" ")
            self._set(setting, value.strip())
        else:
            known = ", ".join(usage.split()[0] for usage in COMMANDS if usage.startswith("/"))
            raise ValueError(
                f"there is no command {name}: there are {known}; begin a message that has a slash with a space"
            )

    def _set(self, name: str, value: str) -> None:
        """Change a setting of the answers to come. Raises ValueError without a name and a value, and says all."""
        settings = {"system": self.system, **self.arguments}
        if name not in settings or not value:
            values = ", ".join(f"{known}={found}" for known, found in settings.items() if found is not None)
            raise ValueError(f"/set NAME VALUE needs a name of {', '.join(settings)} and a value; now: {values}")
        if name == "system":
            check_system(self.tokenizer, value)
            self.system = value
            return
        with contextlib.suppress(ValueError):  # what is no number is refused by the setting's own check
            value = json.loads(value)
        self.arguments[name] = checked(name, value)


def read_messages(console: Console) -> Iterator[tuple[int, str, bool]]:
    """Yield what standard input says up to /bye: the number of its first line, the message, and if it is a command.

    A message may have several lines: between two lines with three quotes, or with a backslash at each end but the last.
    On a terminal, lines can be edited, and the arrow keys bring earlier ones back.
    """
    running.keep_wrong_bytes()
    is_edited = sys.stdin.isatty() and sys.stdout.isatty()
    if is_edited:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() uses it

    def read(sign: str) -> str:
        if is_edited:
            with contextlib.suppress(EOFError):
                return input(sign) + "\n"
            return ""
        if sys.stdin.isatty():
            console.print(f"[bold green]{sign}[/]", end="")
        return sys.stdin.readline()

    number = 0
    while (line := read("> ")) and line.strip() not in ("/bye", "/exit"):
        number += 1
        first, lines = number, [line.rstrip("\n")]
        is_quoted = lines[0].startswith(_QUOTES)
        while (not lines[-1].endswith(_QUOTES) or lines == [_QUOTES]) if is_quoted else lines[-1].endswith("\\"):
            if not (line := read(". ")):
                break
            number += 1
            lines = [*lines[:-1], lines[-1] if is_quoted else lines[-1][:-1], line.rstrip("\n")]
        message = "\n".join(lines)
        if is_quoted:
            message = message.removeprefix(_QUOTES).removesuffix(_QUOTES).strip("\n")
        if message.strip():
            yield first, message, message.startswith("/") and not is_quoted
