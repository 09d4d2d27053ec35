"""Let the target write prompts itself: it continues its chat template from where a user's text begins.

The method is Magpie's (arXiv 2406.08464).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash.internals import fold, render_chat, targets
from dflash.light import terminal

from ..config import RegenerateConfig
from ..measure.datasets import read_jsonl
from .data import special_ids
from .regenerate import LocalWriter, Summary, regenerate

_PROBE = "dflash_probe_text"
_SEED = 2**31  # above every line number, from which the seeds of answers are made


def user_turn(tokenizer: Any, template: Mapping[str, Any] | None = None) -> tuple[str, list[str]]:
    """Return what a chat template writes before a user's text, and the lines that follow it.

    Args:
        tokenizer: the target's.
        template: arguments of the template, as in ``{"enable_thinking": False}``.

    Raises:
        ValueError: there is no template, or no mark before or after the text.
    """
    messages = [{"role": "user", "content": _PROBE}]
    before, *rest = render_chat(tokenizer, messages, True, template).split(_PROBE)
    if len(rest) != 1 or not before.strip() or not rest[0].strip():
        needed = "a chat template that holds a user's text once, with marks before and after it"
        found = f"this one writes {terminal.shortened([before, *rest])} around it: give a file of prompts"
        raise ValueError(f"to write prompts itself, the target needs {needed}; {found}")
    # A space before a word is part of its first token
    return before.rstrip(" "), [line.strip() for line in rest[0].splitlines() if line.strip()]


def write_prompts(
    writer: LocalWriter,
    count: int,
    out: str | os.PathLike,
    *,
    beginnings: Sequence[str] = ("",),
    seed: int = 0,
    max_new_tokens: int = 128,
    progress: Callable[[Summary, int], None] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Let the target write ``count`` prompts at temperature 1 and top-p 0.95, and drop the useless ones.

    These are prompts that have no end, no word or marks of the template in them; loops, in which less than half of the
    runs of four tokens are distinct; and those that have the same beginning as an earlier one, and the same eight
    tokens after it, but for case and punctuation.

    Args:
        writer: the target. Its drafter is not used.
        count: prompts to write. A run can be continued with a higher number.
        out: a JSONL file of all that is written. Rows that it holds are not written again.
        beginnings: texts that prompts begin with, in turn, as in ``"Translate German to English:"``.
        seed: the same seed writes the same prompts.
        max_new_tokens: tokens per prompt at most.
        progress: see `regenerate`.

    Returns:
        The kept prompts, in the form of `dflash_tools.train.data.load_prompts`, by their lines in ``out`` as it was
        asked for; and how many were written, kept, and dropped for each reason.

    Raises:
        ValueError: see `user_turn`; there are no ``beginnings``; ``out`` has rows of another run; or every prompt is
            dropped.
        OSError: ``out`` cannot be written.
    """
    # 1. Write them
    if not beginnings:
        raise ValueError('beginnings must hold one text at least, got none: ("",) leaves prompts open')
    tokenizer = writer.tokenizer
    before, after = user_turn(tokenizer, writer.template)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    def words_of(text: str) -> str:
        return " ".join(re.findall(r"\w+", text.casefold()))

    special, end = special_ids(tokenizer), encode(after[0])[0]
    stops = targets.generation_defaults(writer.target)["stop_token_ids"]
    stop = {"stop_token_ids": sorted({*stops, end})} if end in special else {"stop_strings": after[:1]}
    asked = [{"line": line, "prompt": beginnings[(line - 1) % len(beginnings)], **stop} for line in range(1, count + 1)]
    asked = [{**row, "prompt_ids": encode(before + row["prompt"])} for row in asked]
    config = RegenerateConfig((1.0,), seed=fold(seed, _SEED), max_new_tokens=max_new_tokens, top_p=0.95)
    regenerate(asked, replace(writer, draft=None, skip_long=False), out, config, progress=progress)
    # 2. Drop the useless ones. Of two that are alike, the lower line is kept
    marks, starts, prompts = [before.strip().splitlines()[-1], *after], set[tuple[int, ...]](), list[dict[str, Any]]()
    counts = {"written": count, "kept": 0, "duplicates": 0, "loops": 0, "cut_off": 0, "empty": 0, "with_marks": 0}
    for row in sorted((row for _, _, row in read_jsonl(Path(out))), key=lambda row: row["line"]):
        ids, begun, asked_ids = row["response_ids"], row["prompt"], row["prompt_ids"]
        said, head = (tokenizer.decode(each, skip_special_tokens=True) for each in ([*asked_ids, *ids], asked_ids))
        text = (begun + said.removeprefix(head)).partition(after[0])[0].strip()  # with a space between, if there is one
        words, runs = words_of(text), list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False))
        start = tuple(encode(words)[: 8 + len(encode(words_of(begun)))])
        reasons = {
            "cut_off": row["finish_reason"] == "length",
            "empty": words == words_of(begun),
            "with_marks": not special.isdisjoint([*ids[:-1], *encode(text)]) or any(mark in text for mark in marks),
            "loops": 2 * len(set(runs)) < len(runs),
            "duplicates": start in starts,
        }
        fate = next((reason for reason, holds in reasons.items() if holds), "kept")
        counts[fate] += 1
        if fate == "kept":
            starts.add(start)
            prompts.append({"line": row["line"], "prompt": text})
    if not prompts:
        raise ValueError(f"none of the {count} prompts that the target wrote can be used ({tell(counts)}): see {out}")
    return prompts, counts


def tell(counts: Mapping[str, int]) -> str:
    """Write the counts of `write_prompts` in words."""
    return ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items() if number)
