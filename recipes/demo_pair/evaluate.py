"""Evaluate the pair on held-out prompts: acceptance (also of prompt lookup), correct answers, repetition."""

from __future__ import annotations

import itertools
import re
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from dflash import load_draft
from dflash.generator import Generator
from dflash.loading import load_target_of
from dflash_tools.measure import encode
from dflash_tools.measure.benchmark import distinct_ngrams

from .pretrain import END
from .tasks import Example, examples, is_right

HELD_OUT_SEED, SUMS_SEED = 1_000_003, 5_000_003
_SUMS_DRAWN = 6_000  # held-out sums, of which `held_out_sums` keeps those that differ


def held_out_examples(count: int) -> list[Example]:
    """Return the first ``count`` held-out examples. Training never sees their prompts."""
    return list(itertools.islice(examples(HELD_OUT_SEED, held=True), count))


def sum_kind(prompt: str) -> tuple[str, str]:
    """Return which kind of sum a prompt asks for, and its length.

    The length is the number of digits, of both numbers if two are added or subtracted, or "mixed" if these differ.
    """
    first, second = re.findall(r"\d+", prompt)
    verb = prompt.split(" ", 1)[0]
    if verb == "multiply":
        return verb, str(len(first))
    return verb, str(len(first)) if len(first) == len(second) else "mixed"


def held_out_sums(each: int) -> dict[tuple[str, str], list[Example]]:
    """Return up to ``each`` different held-out sums of every `sum_kind`. Few of one digit exist."""
    drawn = itertools.islice(examples(SUMS_SEED, held=True, kinds=("sums",)), _SUMS_DRAWN)
    found: dict[tuple[str, str], list[Example]] = {}
    for example in {example.prompt: example for example in drawn}.values():
        found.setdefault(sum_kind(example.prompt), []).append(example)
    return {kind: found[kind][:each] for kind in sorted(found)}


def prompt_lookup_length(prompt: list[int], answer: list[int], block_size: int = 16) -> list[int]:
    """Return the tokens per step if prompt lookup (n-grams of up to 3) had written ``answer``.

    A step writes its accepted tokens and one more. The answer's first token belongs to no step, as with DFlash.
    """
    lookup = PromptLookupCandidateGenerator(
        num_output_tokens=block_size - 1, max_matching_ngram_size=3, max_length=len(prompt) + len(answer) + block_size
    )
    text, done, steps = torch.tensor([[*prompt, *answer]], dtype=torch.int64, device="cpu"), len(prompt) + 1, []
    while done < text.shape[1]:
        proposed = lookup.get_candidates(text[:, :done])[0][0, done:]
        rest = text[0, done : done + len(proposed)]
        accepted = int((proposed[: len(rest)] == rest).long().cumprod(0).sum())
        steps.append(min(accepted + 1, text.shape[1] - done))
        done += steps[-1]
    return steps


def distinct_share(answer: list[int]) -> float:
    """Return the share of distinct 8-grams in an answer; 1 if it has none."""
    different, count = distinct_ngrams(answer)
    return different / count if count else 1.0


@torch.inference_mode()
def evaluate(
    folder: Path,
    drafter: str = "draft",
    *,
    prompts: int = 192,
    temperature: float = 0.0,
    draft_sharpness: float = 1.0,
    batch: int = 32,
    seed: int = 1,
) -> dict[str, Any]:
    """Run a pair in float32 on ``prompts`` held-out prompts.

    Args:
        folder: folder with ``target``, and a drafter's folder if there is one.
        drafter: the drafter's folder.
        prompts: number of held-out prompts.
        temperature: 0 is greedy.
        draft_sharpness: see `dflash.generate`.
        batch: prompts per batch.
        seed: seed of the sampling.

    Returns:
        A dict with ``acceptance_length`` (mean tokens per step, bonus token included), ``prompt_lookup`` (acceptance
        length of prompt lookup on the same outputs), ``right`` (share of correct answers), ``right_one_answer`` (among
        prompts that have one right answer), ``distinct_8_grams``, ``answer_tokens`` (mean), ``finished`` (share of
        answers that stopped by themselves) and ``by_kind`` (the same per family of tasks).
    """
    arguments = {"temperature": temperature, "draft_sharpness": draft_sharpness}
    rows = _answer(folder, drafter, held_out_examples(prompts), batch, seed, arguments)
    return {"prompts": len(rows), **arguments, **_summary(rows)}


@torch.inference_mode()
def evaluate_sums(folder: Path, *, each: int = 48, batch: int = 32) -> dict[str, Any]:
    """Answer held-out sums greedily, in float32.

    Args:
        folder: as in `evaluate`.
        each: sums per kind and length, see `held_out_sums`.
        batch: prompts per batch.

    Returns:
        A dict with ``by_length`` (share of correct answers per length, all kinds together) and ``by_kind`` (``right``
        and the number of ``prompts`` per kind and length).
    """
    sums = held_out_sums(each)
    asked = [example for part in sums.values() for example in part]
    rows = _answer(folder, "draft", asked, batch, 0, {"temperature": 0.0})
    return sums_report(sums, {row["prompt"] for row in rows if row["right"]})


def sums_report(sums: dict[tuple[str, str], list[Example]], right: set[str]) -> dict[str, Any]:
    """Return what `evaluate_sums` does, given the prompts that were answered right."""
    lengths: dict[str, list[bool]] = {}
    kinds: dict[str, dict[str, Any]] = {}
    for (kind, length), part in sums.items():
        found = [example.prompt in right for example in part]
        lengths.setdefault(length, []).extend(found)
        kinds.setdefault(kind, {})[length] = {"right": statistics.fmean(found), "prompts": len(found)}
    return {"by_length": {length: statistics.fmean(found) for length, found in lengths.items()}, "by_kind": kinds}


def _answer(
    folder: Path, drafter: str, held: list[Example], batch: int, seed: int, arguments: dict[str, Any]
) -> list[dict[str, Any]]:
    """Answer examples in batches of like length, and return each one's measurements."""
    target, tokenizer = load_target_of(folder)
    draft = load_draft(folder / drafter, dtype=torch.float32) if (folder / drafter).exists() else None
    held = sorted(held, key=lambda example: len(example.prompt))
    generator = Generator(target, draft, max_length=640, batch_size=batch, reuse_prefix=False)
    rows: list[dict[str, Any]] = []
    for start in range(0, len(held), batch):
        part = held[start : start + batch]
        rows += _answer_batch(generator, tokenizer, part, batch, {**arguments, "seed": seed + start})
    return rows


def _answer_batch(
    generator: Generator, tokenizer: Any, held: list[Example], size: int, arguments: dict[str, Any]
) -> list[dict[str, Any]]:
    """Answer a batch of examples, and return each one's measurements."""
    # 1. Pad on the left, and fill up the last batch
    ids = [encode(tokenizer, example.prompt)[0].tolist() for example in held]
    width = max(map(len, ids))
    ids += [ids[-1]] * (size - len(ids))
    padded = torch.tensor([[END] * (width - len(row)) + row for row in ids], dtype=torch.int64, device="cpu")
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], dtype=torch.int64, device="cpu")
    # 2. Answer
    out = generator.generate(padded, attention_mask=mask, max_new_tokens=256, return_dict_in_generate=True, **arguments)
    # 3. Judge each answer
    rows = []
    for row, example in enumerate(held):
        answer = out.sequences[row, width : width + out.statistics.num_new_tokens[row]].tolist()
        finished = answer[-1] == END
        text = tokenizer.decode(answer[:-1] if finished else answer)
        rows.append(
            {
                "prompt": example.prompt,
                "kind": example.kind,
                "right": finished and is_right(example, text),
                "finished": finished,
                "tokens": len(answer),
                "distinct": distinct_share(answer),
                "steps": out.statistics.acceptance_lengths[row],
                "lookup": prompt_lookup_length(ids[row], answer),
            }
        )
    return rows


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over all answers and per family."""

    def length(rows: list[dict[str, Any]], key: str) -> float:
        return statistics.fmean(step for row in rows for step in row[key])

    def mean(rows: list[dict[str, Any]], key: str) -> float:
        return statistics.fmean(row[key] for row in rows)

    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in sorted({row["kind"] for row in rows})}
    return {
        "acceptance_length": length(rows, "steps"),
        "prompt_lookup": length(rows, "lookup"),
        "right": mean(rows, "right"),
        "right_one_answer": mean([row for row in rows if row["kind"] != "letters"], "right"),
        "distinct_8_grams": mean(rows, "distinct"),
        "answer_tokens": mean(rows, "tokens"),
        "finished": mean(rows, "finished"),
        "by_kind": {
            kind: {
                "acceptance_length": length(part, "steps"),
                "right": mean(part, "right"),
                "answer_tokens": mean(part, "tokens"),
            }
            for kind, part in kinds.items()
        },
    }
