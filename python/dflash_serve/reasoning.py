"""How models write their reasoning: a table of forms, and which one a chat template has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class ReasoningForm(NamedTuple):
    """What stands before and after reasoning; ``reply`` before content; ``hidden``: other marks that are not content.

    ``next`` stands between reasoning and what follows it, which may be reasoning again.
    """

    open: str
    close: str
    reply: str = ""
    next: str = ""
    hidden: Sequence[str] = ()

    @property
    def marks(self) -> list[str]:
        return [mark for mark in (self.open, self.close, self.reply, self.next, *self.hidden) if mark]


_HARMONY = ("<|channel|>commentary<|message|>", "<|end|>", "<|return|>", "<|call|>")
# A template has the first form whose last mark is in its source.
REASONING_FORMS = {
    "gpt-oss": ReasoningForm(
        "<|channel|>analysis<|message|>", "<|end|>", "<|channel|>final<|message|>", "<|start|>assistant", _HARMONY),
    "gemma4": ReasoningForm("<|channel>thought\n", "<channel|>"),
    "kimi-k3": ReasoningForm(
        "<|open|>think<|sep|>", "<|close|>think<|sep|>", "<|open|>response<|sep|>", "",
        ["<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"]),
    "command-r": ReasoningForm(
        "<|START_THINKING|>", "<|END_THINKING|>", hidden=["<|START_RESPONSE|>", "<|END_RESPONSE|>"]),
    "mistral": ReasoningForm("[THINK]", "[/THINK]"),
    "seed": ReasoningForm("<seed:think>", "</seed:think>"),
    "hunyuan": ReasoningForm("<think:opensource>", "</think:opensource>"),
    "minimax-m3": ReasoningForm("<mm:think>", "</mm:think>"),
    "kimi": ReasoningForm("◁think▷", "◁/think▷"),
    "apertus": ReasoningForm("<|inner_prefix|>", "<|inner_suffix|>"),
    "think": ReasoningForm("<think>", "</think>"),
}  # fmt: skip
_SIGNS = {"gpt-oss": "<|channel|>analysis", "kimi-k3": "'<|open|>'"}


def find_reasoning_form(tokenizer: Any, name: str | None = None) -> ReasoningForm | None:
    source = str(tokenizer.chat_template or "")
    forms = REASONING_FORMS if name is None else {name: REASONING_FORMS[name]}
    return next((form for key, form in forms.items() if name or _SIGNS.get(key, form.close) in source), None)
