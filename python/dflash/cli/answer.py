"""Prompts of ``dflash generate`` and ``dflash chat``, encoded, and their answers, printed as they arrive."""

from __future__ import annotations

import sys
from typing import Any

import typer

from ..loading import check_encoding, check_text, prompt_ids
from ..outputs import mean_acceptance
from ..terminal import printable


def encode(tokenizer: Any, text: str, system: str | None, raw: bool, bos: bool) -> list[int]:
    has_template = check_encoding(tokenizer, raw, bos, {"--system": system is not None})
    check_system(tokenizer, system)
    if not has_template:
        return prompt_ids(tokenizer, {"prompt": text}, raw=True, bos=bos)
    return chat_ids(tokenizer, system, [{"role": "user", "content": text}])


def check_system(tokenizer: Any, system: str | None) -> None:
    """Raise ``ValueError`` if the chat template has no place for a system message, before a large model is loaded."""
    if system is not None:
        check_text(system, "--system")
        try:
            chat_ids(tokenizer, system, [{"role": "user", "content": "?"}])
        except ValueError as error:
            raise ValueError(f"--system: {error}") from error


def chat_ids(tokenizer: Any, system: str | None, messages: list[dict[str, str]]) -> list[int]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return prompt_ids(tokenizer, {"messages": first + messages})


# Of the statistics, as they are.
_REPORTED = ("seconds", "time_to_first_token", "tokens_per_second", "histogram", "block_size", "weights")


class StreamedAnswer:
    """The answer of a one-row stream with draft trees or chains, printed as it arrives unless ``quiet``."""

    def __init__(self, tree: int | str | None, quiet: bool) -> None:
        self.text, self.last, self._tree, self._quiet = "", None, tree, quiet
        self._is_terminal = sys.stdout.isatty()

    def add(self, event: Any) -> None:
        self.text, self.last = self.text + event.text[0], event
        if not self._quiet:
            text = printable(event.text[0], keep="\n\t") if self._is_terminal else event.text[0]
            typer.echo(text, nl=False)
            sys.stdout.flush()

    def summary(self) -> str:
        statistics = self.last.statistics
        first = f"first token after {statistics.time_to_first_token * 1000:.0f} ms"
        rows, steps = "" if self._tree is None else f" in trees of {self._tree} rows", set(statistics.rows)
        rows = " in trees of 8 to 128 rows" if self._tree == "auto" else rows
        rows = f" in blocks of {min(steps)} to {max(steps)} rows" if len(steps) > 1 and self._tree is None else rows
        weights = "" if statistics.weights is None else f", {statistics.weights} weights"
        return (
            f"{statistics.num_new_tokens[0]} tokens in {statistics.seconds:.2f} s, "
            f"{statistics.tokens_per_second:.1f} tokens/s, acceptance length {statistics.acceptance_length:.2f} "
            f"of {statistics.block_size}{rows}{weights}, {first}"
        )

    def report(self) -> dict[str, Any]:
        statistics = self.last.statistics
        report = {"text": self.text, "finish_reason": self.last.finish_reasons[0]}
        report |= {name: getattr(statistics, name)[0] for name in ("num_prefilled_tokens", "num_new_tokens")}
        report |= {name: getattr(statistics, name) for name in _REPORTED}
        return report | {"acceptance_length": mean_acceptance(statistics), "tree": self._tree}
