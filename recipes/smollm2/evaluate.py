"""Evaluate a pair on held-out prompts, many at once: acceptance (of prompt lookup too), sameness, repetition."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from recipes.demo_pair.evaluate import prompt_lookup_length

from dflash import Drafter, Generator
from dflash.loading import prompt_ids
from dflash.session import Session
from dflash_tools.measure.benchmark import distinct_ngrams
from dflash_tools.measure.datasets import first_prompt, read_jsonl

WAYS = {"T=0": (True, 0.0), "T=0.7": (True, 0.7), "one-token": (False, 0.0)}  # with the drafter?, temperature
Progress = Callable[[str, int, int], None]


class Answer(NamedTuple):
    """The tokens of an answer, and how many of them each step wrote. The first comes from the prompt's own pass."""

    ids: list[int]
    steps: list[int]


def answer(generator: Generator, prompts: Sequence[list[int]], show: Callable[[int], None], **settings: Any) -> Any:
    """Return an `Answer` per prompt, token ids. Rows that end take the next prompt."""
    session, waiting, rows = Session(generator), iter(range(len(prompts))), dict[int, int]()
    answers, ended, device = [Answer([], []) for _ in prompts], 0, generator.engine.target.device
    while True:
        for number in itertools.islice(waiting, len(session.idle)):
            ids = torch.tensor([prompts[number]], dtype=torch.int64, device=device)
            rows[session.admit(session.resolve(ids, **settings))] = number
        if not rows:
            return answers
        for row, event, error in session.step():
            if error:
                raise ValueError(f"prompt {rows[row] + 1}: {error}")
            found = answers[rows[row]]
            if found.ids:
                found.steps.append(len(event.ids[0]))
            found.ids.extend(event.ids[0])
            if event.finish_reasons[0] is not None:
                session.retire(row)
                del rows[row]
                show(ended := ended + 1)


def evaluate_file(
    path: Path, target: Any, draft: Drafter, tokenizer: Any, *, new: int, rows: int, limit: int | None, show: Progress
) -> dict[str, dict[str, Any]]:
    """Answer the first turns of a file of prompts, ``rows`` at a time.

    Args:
        path: JSONL of prompts, gzipped or not; ``category`` groups them.
        target: the target.
        draft: its drafter.
        tokenizer: the target's.
        new: new tokens per answer at most.
        rows: prompts that are answered at once.
        limit: only that many prompts of each category; None for all.
        show: called with what runs, and how many answers of how many have ended.

    Returns:
        Measurements by category, with those of the whole file as "all"; see `summarize`.
    """
    # 1. Read the prompts
    groups: dict[str, list[list[int]]] = {}
    for where, _, row in read_jsonl(path):
        group = groups.setdefault(str(row.get("category") or ""), [])
        if limit is None or len(group) < limit:
            group.append(prompt_ids(tokenizer, first_prompt(row, where)))
    kinds = [kind for kind, group in groups.items() for _ in group]
    prompts = [ids for group in groups.values() for ids in group]
    # 2. Answer them in each way
    sizes = {"max_length": max(map(len, prompts)) + new, "batch_size": min(rows, len(prompts))}
    found = {}
    for way, (drafts, temperature) in WAYS.items():
        generator = Generator(target, draft if drafts else None, **sizes)
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "seed": 0, "max_new_tokens": new}
        progress = functools.partial(show, f"{path.name} {way}")
        found[way] = answer(generator, prompts, lambda done, say=progress: say(done, len(prompts)), **sampling)
    # 3. Measure each category
    chosen = {"all": range(len(prompts))} | {
        kind: [place for place, each in enumerate(kinds) if each == kind] for kind in groups if kind
    }
    return {
        kind: summarize(
            [prompts[place] for place in places],
            {name: [answers[place] for place in places] for name, answers in found.items()},
            draft.config.block_size,
        )
        for kind, places in chosen.items()
    }


def summarize(prompts: list[list[int]], found: dict[str, list[Answer]], block_size: int) -> dict[str, Any]:
    """Return measurements of answers.

    Args:
        prompts: token ids.
        found: the answers to these in each of `WAYS`.
        block_size: that prompt lookup has too.

    Returns:
        ``prompts``, their number; ``identical``, how many answers at T = 0 equal one-token decoding's; and per
        temperature ``tokens_per_step`` (bonus token included), ``prompt_lookup``, the same had prompt lookup written
        these answers, ``distinct_4_grams``, the share that is new within an answer, and ``new_tokens``, their mean.
    """
    one_token = found["one-token"]
    identical = sum(ours.ids == theirs.ids for ours, theirs in zip(found["T=0"], one_token, strict=True))
    out: dict[str, Any] = {"prompts": len(prompts), "identical": identical}

    def mean(numbers: list[int]) -> float | None:
        return sum(numbers) / len(numbers) if numbers else None

    for name, answers in found.items():
        if not WAYS[name][0]:
            continue
        pairs = zip(prompts, answers, strict=True)
        lookup = [prompt_lookup_length(prompt, each.ids, block_size) for prompt, each in pairs]
        grams = [sum(counts) for counts in zip(*(distinct_ngrams(each.ids, 4) for each in answers), strict=True)]
        out[name] = {
            "tokens_per_step": mean([step for each in answers for step in each.steps]),
            "prompt_lookup": mean([step for steps in lookup for step in steps]),
            "distinct_4_grams": grams[0] / grams[1] if grams[1] else None,
            "new_tokens": mean([len(each.ids) for each in answers]),
        }
    return out


def table(files: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Return the measurements of files as a Markdown table, with prompt lookup's tokens per step in parentheses."""
    drafted = [way for way, (drafts, _) in WAYS.items() if drafts]
    head = ["file", "category", "prompts", "equal to one-token"]
    head += [text for way in drafted for text in (f"tokens per step, {way}", "distinct 4-grams")]
    lines = [head, ["---"] * len(head)]
    for file, kinds in files.items():
        for kind, found in kinds.items():
            cells = [file, kind, str(found["prompts"]), str(found["identical"])]
            for part in (found[way] for way in drafted):
                numbers = (part["tokens_per_step"], part["prompt_lookup"], part["distinct_4_grams"])
                ours, lookup, distinct = ("-" if number is None else f"{number:.2f}" for number in numbers)
                cells += [f"{ours} ({lookup})", distinct]
            lines.append(cells)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
