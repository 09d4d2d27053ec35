"""Prompts of requests as token ids."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..evaluate import check_text, render_chat, text_ids
from .errors import bad_request
from .protocol import ChatRequest, CompletionRequest, Message
from .reasoning import CLOSE, OPEN

__all__ = ["Prompt", "PromptReader"]


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        ids: its tokens.
        text: itself, for ``echo``.
        is_thinking: it ends with the mark that begins the model's reasoning.
    """

    ids: list[int]
    text: str
    is_thinking: bool = False


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts for a target. Its methods take long for long prompts, so call them outside of the event loop.

    Attributes:
        tokenizer: the target's.
    """

    tokenizer: Any

    @property
    def thinks(self) -> bool:
        """True if the chat template knows reasoning."""
        return CLOSE in self._template

    @property
    def _template(self) -> str:
        return self.tokenizer.get_chat_template() if self.tokenizer.chat_template is not None else ""

    def read_chat(self, request: ChatRequest) -> Prompt:
        """Write a conversation by the chat template, up to the beginning of the answer.

        Raises:
            ApiError: there is no template, or it does not take these messages or arguments.
        """
        if not self._template:
            raise bad_request("this model has no chat template: use /v1/completions", "messages")
        arguments = request.chat_template_kwargs or {}
        self._check_arguments(arguments)
        messages = [_message(number, message) for number, message in enumerate(request.messages, 1)]
        try:
            text = render_chat(self.tokenizer, messages, True, arguments)
        except ValueError as error:
            raise bad_request(str(error), "messages") from error
        ids = list(self.tokenizer(text, add_special_tokens=False).input_ids)
        return Prompt(ids, text, self.thinks and text.rstrip().endswith(OPEN))

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Refuse arguments that transformers would take for its own, or that the template does not read."""
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        for name in arguments:
            if name in own or name == "messages" or not re.search(rf"\b{re.escape(name)}\b", self._template):
                raise bad_request(f"the chat template has no argument {name!r}", "chat_template_kwargs")

    def read_completion(self, request: CompletionRequest) -> list[Prompt]:
        """Return the prompts, one or several.

        Raises:
            ApiError: one is empty or not Unicode.
        """
        given = request.prompt
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        prompts = [self._read(prompt, bool(request.echo)) for prompt in ([given] if is_one else given)]
        if not prompts or not all(prompt.ids for prompt in prompts):
            raise bad_request("prompt must hold at least one token", "prompt")
        return prompts

    def _read(self, prompt: str | list[int], needs_text: bool) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(text_ids(self.tokenizer, _unicode(prompt, "prompt")), prompt)
        if needs_text and prompt and max(prompt) >= len(self.tokenizer):
            raise bad_request(f"token ids must lie in 0 .. {len(self.tokenizer) - 1}, got {max(prompt)}", "prompt")
        return Prompt(prompt, self.tokenizer.decode(prompt) if needs_text else "")


def _message(number: int, message: Message) -> dict[str, str]:
    """Return a message as chat templates read it."""
    fields = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    for name in ("reasoning_content", "name"):
        if getattr(message, name) is not None:
            fields[name] = getattr(message, name)
    return {name: _unicode(text, f"message {number}: {name}") for name, text in fields.items()}


def _unicode(text: str, where: str) -> str:
    try:
        return check_text(text, where)
    except ValueError as error:
        raise bad_request(str(error), "prompt" if where == "prompt" else "messages") from error
