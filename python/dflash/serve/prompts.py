"""Prompts of requests as token ids."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..evaluate import check_text, render_chat, text_ids
from .errors import bad_request
from .protocol import ChatRequest, CompletionRequest, Message, ToolCall
from .reasoning import CLOSE, OPEN
from .tools import ToolForm, Tools, find_form, is_special

__all__ = ["Prompt", "PromptReader"]


class Prompt(NamedTuple):
    """A prompt.

    Attributes:
        ids: its tokens.
        text: itself, for ``echo``.
        reasoning: ``"begun"`` if it ends with the mark that begins the model's reasoning, ``"optional"`` if the answer
            may begin with that; otherwise empty.
        hides_reasoning: the mark that ends the reasoning is no part of an answer's text.
    """

    ids: list[int]
    text: str
    reasoning: Literal["", "begun", "optional"] = ""
    hides_reasoning: bool = False

    @property
    def is_thinking(self) -> bool:
        """True if it ends with the mark that begins the model's reasoning."""
        return self.reasoning == "begun"


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

    @functools.cached_property
    def tool_form(self) -> ToolForm | None:
        """How the chat template writes tool calls, if that form is known."""
        return find_form(self.tokenizer) if self._template else None

    def read_chat(self, request: ChatRequest, tools: Tools | None = None) -> Prompt:
        """Write a conversation by the chat template, up to the beginning of the answer.

        The template is shown ``tools`` if it reads them.

        Raises:
            ApiError: there is no template, or it does not take these messages or arguments.
        """
        if not self._template:
            raise bad_request("this model has no chat template: use /v1/completions", "messages")
        arguments = request.chat_template_kwargs or {}
        self._check_arguments(arguments)
        if tools is not None and self._reads("tools"):
            arguments = {**arguments, "tools": tools.shown}
        if any(message.tool_calls for message in request.messages) and not self._reads("tool_calls"):
            raise bad_request("the chat template does not write tool_calls", "messages")
        messages = [_message(number, message) for number, message in enumerate(request.messages, 1)]
        try:
            text = render_chat(self.tokenizer, messages, True, arguments)
        except ValueError as error:
            raise bad_request(str(error), "messages") from error
        ids = list(self.tokenizer(_unicode(text, "messages"), add_special_tokens=False).input_ids)
        if not self.thinks or text.rstrip().endswith(CLOSE):
            return Prompt(ids, text)
        reasoning = "begun" if text.rstrip().endswith(OPEN) else "optional"
        return Prompt(ids, text, reasoning, is_special(self.tokenizer, CLOSE))

    def _reads(self, name: str) -> bool:
        """Return True if the chat template mentions a name."""
        return re.search(rf"\b{re.escape(name)}\b", self._template) is not None

    def _check_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Refuse arguments that transformers would take for its own, or that the template does not read."""
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        for name in arguments:
            if name in own or name == "messages" or not self._reads(name):
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


def _message(number: int, message: Message) -> dict[str, Any]:
    """Return a message as chat templates read it."""
    fields = {"role": "system" if message.role == "developer" else message.role, "content": message.text}
    for name in ("reasoning_content", "name", "tool_call_id"):
        if getattr(message, name) is not None:
            fields[name] = getattr(message, name)
    texts = {name: _unicode(text, f"message {number}: {name}") for name, text in fields.items()}
    return texts | ({"tool_calls": [_call(number, call) for call in message.tool_calls]} if message.tool_calls else {})


def _call(number: int, call: ToolCall) -> dict[str, Any]:
    """Return a tool call as chat templates read it: with its arguments as an object."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(f"message {number}: the arguments of a tool call must be a JSON object", "messages")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _unicode(text: str, where: str) -> str:
    try:
        return check_text(text, where)
    except ValueError as error:
        raise bad_request(str(error), "prompt" if where == "prompt" else "messages") from error
