"""Encode prompts as a target's input."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..terminal import shortened
from .chat import check_template, render_chat

_SURROGATE = re.compile("[\ud800-\udfff]")


def as_messages(prompt: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of ``{"messages"}``, or those of ``{"prompt"}``, a user's text."""
    return prompt["messages"] if "messages" in prompt else [{"role": "user", "content": prompt["prompt"]}]


def check_text(text: str, where: str, first_line: int = 1) -> str:
    """Return ``text`` if it is Unicode, which tokenizers need; else raise ``ValueError`` that names the line.

    A byte that is not UTF-8 is expected as a lone surrogate, as Python reads the arguments of a command, and files
    opened with ``errors="surrogateescape"``. ``first_line`` is the number of the text's first line in ``where``.
    """
    if found := _SURROGATE.search(text):
        code = ord(found[0])
        what = f"the byte {code - 0xDC00:#x}" if 0xDC80 <= code <= 0xDCFF else f"half of a character, \\u{code:x}"
        line = first_line + text.count("\n", 0, found.start())
        raise ValueError(f"{where}, line {line}: not UTF-8 text: {what}")
    return text


def check_encoding(tokenizer: Any, raw: bool, bos: bool, options: Mapping[str, bool] | None = None) -> bool:
    """Return True if prompts become messages of a chat. ``options`` need that; by name, whether they were given.

    Raises:
        ValueError: such an option or ``bos`` was given and does not fit, the tokenizer has no BOS token, or its chat
            template loses the user's text.
    """
    has_template = tokenizer.chat_template is not None and not raw
    for name, is_given in (options or {}).items():
        if is_given and not has_template:
            raise ValueError(f"{name} needs a tokenizer with a chat template, and no --raw")
    if bos and has_template:
        raise ValueError("--bos is for raw prompts, and this tokenizer has a chat template: leave --bos out")
    if bos and tokenizer.bos_token_id is None:
        raise ValueError("--bos: this tokenizer has no BOS token")
    if has_template:
        try:
            check_template(tokenizer, "user")
        except ValueError as error:
            raise ValueError(f"{error}, or continue texts without it (--raw)") from None
    return has_template


def prompt_ids(
    tokenizer: Any, prompt: Mapping[str, Any], *, raw: bool = False, bos: bool = False,
    template: Mapping[str, Any] | None = None,
) -> list[int]:  # fmt: skip
    """Encode a prompt, ``{"prompt": text}`` or ``{"messages": [...]}``, as the target's input ids.

    A text becomes a user's message if the tokenizer has a chat template, unless ``raw``. ``tools`` need a template.
    """
    if prompt.keys() & {"messages", "tools"} or not (raw or tokenizer.chat_template is None):
        text = render_prompt(tokenizer, prompt, as_messages(prompt), True, template)
        return tokenizer(text, add_special_tokens=False).input_ids
    return text_ids(tokenizer, prompt["prompt"], bos=bos)


def render_prompt(
    tokenizer: Any, prompt: Mapping[str, Any], messages: Any, asks: bool, template: Mapping[str, Any] | None
) -> str:
    """Write messages as `render_chat` does, with the tools of a prompt, which must be shown."""
    tools = prompt.get("tools")
    text = render_chat(tokenizer, messages, asks, {**(template or {}), "tools": tools})
    if lost := [name for tool in tools or () if (name := tool["function"]["name"]) not in text]:
        raise ValueError(f"the chat template does not show the tool {shortened(lost[0])}: leave tools out")
    return text


def text_ids(tokenizer: Any, text: str, *, bos: bool = False) -> list[int]:
    """Encode ``text`` itself, as the tokenizer does; ``bos`` puts one BOS token before it if the tokenizer does not."""
    ids = list(tokenizer(text).input_ids)
    if bos:
        if tokenizer.bos_token_id is None:
            raise ValueError("--bos: this tokenizer has no BOS token")
        if ids[:1] != [tokenizer.bos_token_id]:
            ids.insert(0, tokenizer.bos_token_id)
    return ids
